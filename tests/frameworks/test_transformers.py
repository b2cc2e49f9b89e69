"""`generate` of transformers, as in docs/frameworks.md."""

import json

import pytest
import torch

import backend_kwargs as bk
from tests.frameworks.page import SECTIONS, run


@pytest.fixture
def on_a_cpu(monkeypatch):
    from transformers import CompileConfig

    monkeypatch.setattr(CompileConfig, "_compile_all_devices", True)


@pytest.mark.usefixtures("on_a_cpu")
def test_generate_compiles_by_strings(causal_lm, tokens):
    """`generate` compiles with templates and options, gives eager's tokens, and its config is JSON."""
    prompt = tokens[:1]
    expected = causal_lm.generate(prompt, max_new_tokens=4, pad_token_id=0)
    names = run("generate", model=causal_lm, prompt=prompt)
    assert torch.equal(names["tokens"], expected)
    from backend_kwargs.compile_records import records

    (record,) = records()
    assert record.spec == "tmpl-inductor:aten+fast_compile"
    assert record.options["size_asserts"] is False
    written = json.loads(causal_lm.generation_config.to_json_string())["compile_config"]
    assert written["options"] == {"template": "aten+fast_compile", "size_asserts": False}


@pytest.mark.usefixtures("on_a_cpu")
def test_saved_model_has_no_compile_config(causal_lm, tokens):
    """A model saved by `save_pretrained` loads and generates; transformers omits the compile config."""
    from transformers import LlamaForCausalLM

    names = run("generate", model=causal_lm, prompt=tokens[:1])
    loaded = LlamaForCausalLM.from_pretrained("saved")
    assert loaded.generation_config.compile_config is None
    assert torch.equal(loaded.generate(tokens[:1]), names["tokens"])


def test_page_quotes_the_error_for_a_value():
    """The page quotes the error of transformers for a Backend in a CompileConfig."""
    from transformers import CompileConfig, GenerationConfig

    config = GenerationConfig(compile_config=CompileConfig(backend=bk.make_backend("tmpl-inductor")))
    with pytest.raises(TypeError) as raised:
        config.to_json_string()
    assert f"TypeError: {raised.value}".splitlines()[0] in SECTIONS["generate"]


def test_strings_say_what_any_config_says():
    """A Backend's `to_config` can be split into the string and the options of a CompileConfig."""
    backend = bk.make_backend("tmpl-inductor:aten+debug", {"multi_kernel_hints": [1, 2]})
    config = backend.to_config()
    name, _, template = config["backend"].partition(":")
    options = json.loads(json.dumps({"template": template, **config["options"]}))
    assert bk.make_backend(name, options) == backend


@pytest.mark.usefixtures("on_a_cpu")
def test_generate_races_with_a_static_cache(causal_lm, tokens, tmp_path):
    """Under auto, a prompt one token short of the static cache gives eager's tokens, and the next call too."""
    from transformers import CompileConfig

    options = {"budget_s": 5, "store": str(tmp_path / "decisions"), "candidates": ["no_size_asserts"], "race": "always"}
    config = CompileConfig(backend="tmpl-inductor:auto", options=options, mode=None)
    prompt, given = tokens[:1, :15], {"max_length": 17, "pad_token_id": 0, "do_sample": False}
    expected = causal_lm.generate(prompt, **given)
    for _ in range(2):
        made = causal_lm.generate(prompt, cache_implementation="static", compile_config=config, **given)
        assert torch.equal(made, expected)
    from backend_kwargs.compile_records import records

    decisions = [record.facts.decision for record in records()]
    assert decisions
    assert not [decision.facts for decision in decisions if "race failed" in decision.facts]

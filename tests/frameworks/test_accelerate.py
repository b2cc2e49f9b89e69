"""accelerate and the Trainer of transformers, as in docs/frameworks.md."""

import copy
import json
import pickle

import pytest
import torch
from torch import nn

import backend_kwargs as bk
from tests.frameworks.page import SECTIONS, compiled, run

pytestmark = [
    pytest.mark.usefixtures("own_accelerator"),
    # torch's warning on a machine without an accelerator.
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning"),
    # dynamo's warning when it reads `.grad` of a tensor between two regions.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]
BACKENDS = ["tmpl-inductor:auto", bk.make_backend("tmpl-inductor:auto")]
BUDGET = {"auto": True, "budget_s": 10.0}


@pytest.fixture
def dataset(tokens):
    return [{"input_ids": row, "labels": row} for row in tokens]


def two_layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 1))


def test_accelerator_trains_under_a_backend(tmp_path):
    """`Accelerator` compiles with the plugin's backend and options; its saved state can be loaded."""
    model, x = two_layers(), torch.randn(8, 16)
    expected = model(x).square().mean()
    names = run("accelerate", model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1))
    loss = names["model"](x).square().mean()
    torch.testing.assert_close(loss, expected)
    names["accelerator"].backward(loss)
    names["optimizer"].step()
    (graph,) = bk.report(names["model"]).graphs
    assert (graph.backend, dict(graph.options)) == ("tmpl-inductor:auto", BUDGET)
    names["accelerator"].save_state(tmp_path / "state")
    names["accelerator"].load_state(tmp_path / "state")
    plain = two_layers()
    plain.load_state_dict(names["accelerator"].unwrap_model(names["model"], keep_torch_compile=False).state_dict())
    torch.testing.assert_close(plain(x), names["model"](x))


def test_plugin_is_a_real_one():
    """The plugin has an enum member to compare, plain data to write, and works without arguments."""
    from accelerate.utils import DynamoBackend

    from backend_kwargs.integrations.accelerate import TorchDynamoPlugin

    backend = bk.make_backend("tmpl-inductor:aten", epilogue_fusion=False)
    plugin = TorchDynamoPlugin(backend=backend, fullgraph=True)
    assert plugin.backend is DynamoBackend.INDUCTOR
    assert plugin.to_kwargs() == {"backend": backend, "fullgraph": True}
    assert json.loads(json.dumps(plugin.to_dict()))["backend"] == "inductor"
    assert TorchDynamoPlugin().to_kwargs() == {"backend": bk.make_backend("tmpl-inductor")}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        pytest.param(
            {"backend": "tmpl-inductor:max_autotun"},
            "Unknown template 'max_autotun'. Did you mean 'max_autotune'?",
            id="backend",
        ),
        pytest.param(
            {"backend": "tmpl-inductor:auto", "options": {"budget": 3}},
            "Unknown option 'budget'. Did you mean 'budget_s'?",
            id="options",
        ),
        pytest.param(
            {"backend": "tmpl-inductor", "mode": "max-autotun"},
            "Unknown mode 'max-autotun'. Did you mean 'max-autotune'?",
            id="mode",
        ),
    ],
)
def test_wrong_values_are_errors_at_once(given, message):
    """The plugin raises as `make_backend` does, before the model is prepared."""
    from backend_kwargs.integrations.accelerate import TorchDynamoPlugin

    with pytest.raises(bk.BackendKwargsError) as raised:
        TorchDynamoPlugin(**given)
    assert str(raised.value) == message


@pytest.mark.parametrize(
    "backend", ["tmpl-inductor:auto", bk.make_backend("tmpl-inductor:auto")], ids=["name", "value"]
)
def test_page_quotes_accelerates_errors(backend):
    """The page quotes accelerate's errors for a name and for a Backend, so that a search finds them."""
    from accelerate import Accelerator

    with pytest.raises((ValueError, AttributeError)) as raised:
        Accelerator(dynamo_backend=backend)
    assert f"{type(raised.value).__name__}: {raised.value}" in SECTIONS["accelerate"]


@pytest.mark.xfail(raises=ValueError, reason="accelerate checks names against its enum: upstream.md")
def test_accelerate_accepts_the_names():
    """A release of accelerate that accepts any name of torch's makes this pass: then simplify the page."""
    from accelerate import Accelerator

    Accelerator(dynamo_backend="tmpl-inductor:auto")


@pytest.mark.xfail(raises=ValueError, reason="Trainer hands the name to accelerate: upstream.md")
def test_trainer_accepts_the_names(causal_lm, dataset, monkeypatch):
    """As above, for the argument of transformers' Trainer."""
    from transformers import Trainer, TrainingArguments

    for name in ("ACCELERATE_DYNAMO_BACKEND", "ACCELERATE_DYNAMO_MODE"):
        monkeypatch.setenv(name, "")  # restored afterwards
    args = TrainingArguments("out", report_to="none", torch_compile_backend="tmpl-inductor:auto")
    Trainer(model=causal_lm, args=args, train_dataset=dataset)


def saved_loads_uncompiled(folder):
    from transformers import LlamaForCausalLM

    loaded = LlamaForCausalLM.from_pretrained(folder)
    return all(torch.isfinite(parameter).all() for parameter in loaded.parameters())


def test_trainer_trains_a_compiled_model(causal_lm, dataset):
    """Trainer trains a model that was compiled before, and its checkpoint loads uncompiled."""
    names = run("Trainer", model=causal_lm.train(), dataset=dataset)
    assert names["trainer"].state.global_step == 2
    assert compiled() == ["tmpl-inductor:auto"]
    names["trainer"].save_model("saved")
    assert saved_loads_uncompiled("saved")


def test_trainer_mixin_compiles_by_the_plugin(causal_lm, dataset):
    """`TrainerMixin` passes the plugin to accelerate, here with regional compilation."""
    names = run("Trainer", 1, model=causal_lm.train(), dataset=dataset)
    assert names["trainer"].state.global_step == 2
    assert set(compiled()) == {"tmpl-inductor:fast_compile"}
    names["trainer"].save_model("saved")
    assert saved_loads_uncompiled("saved")


def test_trainer_mixin_without_a_plugin_is_plain(causal_lm, dataset):
    """Without `dynamo_plugin` nothing changes."""
    from transformers import Trainer, TrainingArguments

    from backend_kwargs.integrations.accelerate import TrainerMixin

    class MyTrainer(TrainerMixin, Trainer):
        pass

    arguments = TrainingArguments("out", max_steps=1, report_to="none")
    MyTrainer(model=causal_lm, args=arguments, train_dataset=dataset).train()
    assert compiled() == []


def test_two_ways_to_compile_are_an_error(causal_lm, dataset):
    """`torch_compile` of TrainingArguments together with the mixin raises, since it would be silently ignored."""
    from transformers import Trainer, TrainingArguments

    from backend_kwargs.integrations.accelerate import TorchDynamoPlugin, TrainerMixin

    class MyTrainer(TrainerMixin, Trainer):
        pass

    arguments = TrainingArguments("out", torch_compile=True, report_to="none")
    with pytest.raises(bk.BackendKwargsError) as raised:
        MyTrainer(model=causal_lm, args=arguments, train_dataset=dataset, dynamo_plugin=TorchDynamoPlugin())
    expected = "`dynamo_plugin` and TrainingArguments(torch_compile=True) exclude each other."
    assert str(raised.value) == expected


def test_compiled_model_is_copied_and_pickled(causal_lm, tokens):
    """A model compiled in place can be copied and pickled, as Trainer and its tuners do."""
    causal_lm.compile(backend=bk.make_backend("tmpl-inductor:fast_compile", size_asserts=False))
    expected = causal_lm(tokens).logits
    for copied in (copy.deepcopy(causal_lm), pickle.loads(pickle.dumps(causal_lm))):
        torch.testing.assert_close(copied(tokens).logits, expected, atol=1e-4, rtol=1e-3)

"""CompileConfig: a value that is checked when it is created, and its JSON."""

import json
import pickle

import pytest
import torch

import backend_kwargs as bk
from backend_kwargs import CompileConfig
from backend_kwargs.bundles.config import REMOVED
from tests import forks


def test_mode_and_options_go_together():
    """`mode` and `options` can be combined, and an option overrides the mode's."""
    config = CompileConfig(mode="max-autotune", options={"triton.cudagraphs": False})
    assert (config.resolved.options["max_autotune"], config.resolved.options["triton.cudagraphs"]) == (True, False)


def test_aitune_field_names_are_taken():
    """The fields of AITune's TorchInductorBackendConfig are accepted."""
    fields = {
        "fullgraph": True,
        "dynamic": False,
        "mode": None,
        "options": {"epilogue_fusion": False},
        "autocast_enabled": True,
        "autocast_dtype": torch.float16,
    }
    config = CompileConfig.from_dict(fields)
    assert {name: getattr(config, name) for name in fields} == fields


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        pytest.param({"fullgraph": 1}, "CompileConfig field 'fullgraph' must be bool, got 1 (int).", id="type"),
        pytest.param({"kind": "aoti"}, f"CompileConfig field 'kind' was removed: {REMOVED['kind']}.", id="removed"),
        pytest.param(
            {"autocast_dtype": "int8"},
            "CompileConfig field 'autocast_dtype' must be a floating torch.dtype, or the name of one, got 'int8' "
            "(str).",
            id="dtype",
        ),
        pytest.param(
            {"options": {"epilog_fusion": True}},
            "Unknown Inductor option 'epilog_fusion'. Did you mean 'epilogue_fusion'?",
            id="option",
        ),
        pytest.param(
            {"options": {"mode": "default"}},
            "CompileConfig's options must not hold 'mode': set the field `mode`.",
            id="mode among options",
        ),
        pytest.param(
            {"tolerance": 0.0},
            "CompileConfig field 'tolerance' must be float above 0 | None, got 0.0 (float).",
            id="no tolerance",
        ),
        pytest.param(
            {"tolerance": float("nan")},
            "CompileConfig field 'tolerance' must be float above 0 | None, got nan (float).",
            id="a tolerance that every error passes",
        ),
        pytest.param({"mod": "default"}, "Unknown CompileConfig field 'mod'. Did you mean 'mode'?", id="field"),
        pytest.param(
            {"backend": "tmpl-inductr"}, "Unknown backend 'tmpl-inductr'. Did you mean 'tmpl-inductor'?", id="backend"
        ),
    ],
)
def test_a_wrong_field_is_an_error_at_once(fields, message):
    with pytest.raises(bk.BackendKwargsError) as raised:
        CompileConfig(**fields)
    assert str(raised.value) == message


def test_describe_shows_changed_fields_alone():
    config = CompileConfig(mode="max-autotune", autocast_enabled=True, autocast_dtype="bfloat16")
    assert config.describe() == "mode='max-autotune',autocast_enabled=True,autocast_dtype=torch.bfloat16"


def test_key_knows_no_order_of_options():
    """The key starts with the class's name and does not depend on the order of options."""
    options = {"epilogue_fusion": True, "max_autotune": True}
    one, other = (CompileConfig(options=dict(items)) for items in (options.items(), reversed(options.items())))
    assert one.key() == other.key()
    assert one.key().startswith("CompileConfig_")


def test_key_is_the_same_in_another_process():
    program = "import backend_kwargs as bk; print(bk.CompileConfig(options={'max_autotune': True}).key())"
    assert CompileConfig(options={"max_autotune": True}).key() == forks.run("-c", program).stdout.strip()


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({}, id="default"),
        pytest.param(
            {"autocast_enabled": True, "autocast_dtype": torch.bfloat16, "output_dtype": torch.float64}, id="dtypes"
        ),
        pytest.param({"mode": "max-autotune", "options": {"triton.cudagraphs": False}}, id="mode and options"),
        pytest.param({"backend": "tmpl-inductor:max_autotune", "options": {"max_autotune": True}}, id="template"),
        pytest.param({"backend": "eager", "dynamic": True, "tolerance": 0.01}, id="another backend"),
        pytest.param({"backend": bk.make_backend("tmpl-inductor:aten", epilogue_fusion=True)}, id="a Backend"),
    ],
)
def test_json_gives_it_back(tmp_path, fields):
    """A config read back from JSON is equal, including dtypes."""
    config = CompileConfig(**fields)
    config.to_json(tmp_path / "config.json")
    back = CompileConfig.from_json(tmp_path / "config.json")
    assert (back, back.key(), back.autocast_dtype) == (config, config.key(), config.autocast_dtype)
    assert pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize(
    ("data", "message"),
    [
        pytest.param(
            {"fulgraph": True}, "Unknown CompileConfig field 'fulgraph'. Did you mean 'fullgraph'?", id="field"
        ),
        pytest.param({"version": 2}, "Compile config version 2 is not 1 to 1; update backend-kwargs.", id="newer"),
        pytest.param(
            {"options": {"cpp.cxx": "evil"}},
            "Inductor option 'cpp.cxx' is code, which a file may set only if it is trusted: pass trust=True if you "
            "trust its author.",
            id="code",
        ),
    ],
)
def test_what_cannot_be_read_is_an_error(tmp_path, data, message):
    (tmp_path / "config.json").write_text(json.dumps(data))
    with pytest.raises(bk.BackendKwargsError) as raised:
        CompileConfig.from_json(tmp_path / "config.json")
    assert str(raised.value) == message


def test_a_file_that_is_no_json_is_an_error(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(
        bk.BackendKwargsError, match=r"^Cannot read a compile config from '.*config.json': JSONDecodeError"
    ):
        CompileConfig.from_json(tmp_path / "config.json")

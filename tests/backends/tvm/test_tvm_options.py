"""TVM's options are checked at once, and removed options are explained."""

from importlib.util import find_spec

import pytest

from backend_kwargs import BackendKwargsError, BackendKwargsWarning, backends, explain, make_backend
from backend_kwargs.backends.tvm import settings
from backend_kwargs.backends.tvm.settings import OPTIONS, TVMOptions, import_tvm, unfit
from backend_kwargs.options.machine import Machine

pytestmark = pytest.mark.skipif(bool(unfit()), reason=f"no TVM: {unfit()}")
SEARCH = "write scheduler='meta_schedule', trials=64"


def refusal(options):
    with pytest.raises(BackendKwargsError) as e:
        make_backend("tvm", options)
    return str(e.value)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="none"),
        pytest.param({"scheduler": "meta_schedule", "trials": 8, "max_trials_per_task": 4}, id="search"),
        pytest.param({"scheduler": "meta_schedule"}, id="search of the default length"),
        pytest.param({"scheduler": "meta_schedule", "trials": 0, "work_dir": "tuned"}, id="no more trials"),
        pytest.param({"work_dir": "tuned"}, id="reuse"),
        pytest.param({"target": {"kind": "llvm", "mcpu": "core-avx2", "mattr": ["+fma"], "num-cores": 2}}, id="target"),
        pytest.param({"target": "cuda"}, id="kind"),
        pytest.param({"aten_ops": ("mm", "convolution", "_softmax")}, id="ATen operators"),
        pytest.param({"pass_config": {"tirx.noalias": True, "tirx.UnrollLoop": {}}}, id="pass_config"),
        pytest.param({"pipeline": "default", "tir_pipeline": "s_tir", "exec_mode": "compiled"}, id="pipelines"),
        pytest.param({"fallback": "error", "freeze": True, "verify": True}, id="ours"),
    ],
)
def test_right_options(options):
    """A valid value is kept unchanged."""
    assert make_backend("tvm", options).options == options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"schedular": None}, "Unknown TVM option 'schedular'. Did you mean 'scheduler'?", id="name"),
        pytest.param(
            {"zzz": 1},
            "Unknown TVM option 'zzz'. `backend-kwargs explain tvm '*'` shows all.",
            id="name like none",
        ),
        pytest.param({"trials": "64"}, "TVM option 'trials' must be int of at least 0, got '64' (str).", id="type"),
        pytest.param({"freeze": 1}, "TVM option 'freeze' must be bool, got 1 (int).", id="flag"),
        pytest.param(
            {"scheduler": "meta_schedul"},
            "TVM option 'scheduler' must be 'meta_schedule' | 'dlight' | None, got 'meta_schedul' (str).",
            id="scheduler",
        ),
        pytest.param(
            {"cost_model": "transformer"},
            "TVM option 'cost_model' must be 'random' | 'xgb' | 'mlp', got 'transformer' (str).",
            id="choice like none",
        ),
        pytest.param(
            {"exec_mode": 2},
            "TVM option 'exec_mode' must be 'bytecode' | 'compiled', got 2 (int).",
            id="choice of a type",
        ),
        pytest.param({"trials": -1}, "TVM option 'trials' must be int of at least 0, got -1 (int).", id="negative"),
        pytest.param(
            {"num_trials_per_iter": 0},
            "TVM option 'num_trials_per_iter' must be int of at least 1, got 0 (int).",
            id="zero",
        ),
        pytest.param(
            {"aten_ops": ("mm", "linear")},
            "ATen operator 'linear' is taken apart before TVM sees a graph: name 'addmm' and 'mm' instead.",
            id="operator taken apart",
        ),
        pytest.param(
            {"aten_ops": ("hstack",)},
            "ATen operator 'hstack' is taken apart before TVM sees a graph: TORCH_LOGS=\"aot_graphs\" shows how.",
            id="operator taken apart, and no name in its place",
        ),
        pytest.param(
            {"aten_ops": ("add_",)},
            "ATen operator 'add_' writes in place, which no graph does that TVM sees.",
            id="operator that writes in place",
        ),
        pytest.param({"aten_ops": ("mmm",)}, "Unknown ATen operator 'mmm'. Did you mean 'mm'?", id="operator"),
        pytest.param(
            {"aten_ops": "mm"},
            "TVM option 'aten_ops' must be tuple[str, ...] | None, got 'mm' (str).",
            id="one operator",
        ),
        pytest.param({"template": "x"}, "Backend 'tvm' has no templates, got 'x'.", id="template"),
    ],
)
def test_wrong_options(options, message):
    """A mistake is one line, with the closest valid name."""
    assert refusal(options) == message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param(
            {"auto_scheduler": True},
            f"TVM option 'auto_scheduler' was removed from TVM; {SEARCH}.",
            id="auto_scheduler",
        ),
        pytest.param({"autotvm": True}, f"TVM option 'autotvm' was removed from TVM; {SEARCH}.", id="autotvm"),
        pytest.param(
            {"executor": "graph"},
            "TVM option 'executor' was removed from TVM with Relay; 'exec_mode' says how the VM runs.",
            id="executor",
        ),
        pytest.param(
            {"mode": "max-autotune"},
            "TVM option 'mode' is for Inductor; TVM has 'scheduler' and 'trials'.",
            id="mode",
        ),
    ],
)
def test_what_is_gone_is_explained(options, message):
    """The error for an option of older TVMs or of Inductor says what to write instead."""
    assert refusal(options) == message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param(
            {"trials": 64},
            "TVM option 'trials' needs a search: also write scheduler='meta_schedule'.",
            id="trials",
        ),
        pytest.param(
            {"trials": 64, "work_dir": "tuned"},
            "TVM option 'trials' needs a search: also write scheduler='meta_schedule'.",
            id="trials-and-work_dir",
        ),
        pytest.param(
            {"scheduler": "meta_schedule", "trials": 0},
            "TVM option 'trials' of 0 reuses what was tuned before: say where by work_dir='...'.",
            id="nothing-to-reuse",
        ),
    ],
)
def test_options_that_make_no_sense_together(options, message):
    """A combination of options of which one would be ignored raises."""
    assert refusal(options) == message


@pytest.mark.parametrize(
    ("given", "scheduler", "trials"),
    [
        pytest.param({}, None, 64, id="nothing"),
        pytest.param({"scheduler": "meta_schedule"}, "meta_schedule", 64, id="search"),
        pytest.param({"work_dir": "tuned"}, "meta_schedule", 0, id="work_dir alone"),
        pytest.param({"work_dir": "tuned", "trials": 0}, "meta_schedule", 0, id="no more trials"),
        pytest.param({"work_dir": "tuned", "scheduler": "dlight"}, "dlight", 64, id="dlight"),
    ],
)
def test_settings(given, scheduler, trials):
    """With only a work_dir, earlier tuning results are applied and nothing is tuned."""
    settings = TVMOptions.of(given)
    assert (settings.scheduler, settings.trials) == (scheduler, trials)


@pytest.mark.parametrize(
    "options", [pytest.param({}, id="work_dir alone"), pytest.param({"trials": 0}, id="no more trials")]
)
def test_nothing_to_reuse(options, tmp_path):
    """A work_dir without results is reported by explain and at the compile."""
    message = f"TVM option 'work_dir' cannot act fully here: {str(tmp_path)!r} contains no results of a search; "
    options = {"work_dir": str(tmp_path), **options}
    assert explain("tvm", options).notes == (f"{message}nothing is tuned.",)
    (tmp_path / "search").mkdir()
    (tmp_path / "search" / "database_workload.json").touch()
    assert explain("tvm", options).notes == ()


def test_list_of_operators():
    """A list is accepted for a tuple."""
    assert make_backend("tvm", aten_ops=["mm"]) == make_backend("tvm", aten_ops=("mm",))


ON_A_CPU = Machine()
INERT = [
    pytest.param({"cuda_graph": True}, ON_A_CPU, "no CUDA GPU is visible", id="cuda_graph without a GPU"),
    pytest.param(
        {"cuda_graph": True},
        Machine(gpu="H200"),
        "the installed apache-tvm is not a GPU build (it has no CUDA runtime)",
        id="cuda_graph without a GPU build",
    ),
    pytest.param({"target": "cuda"}, ON_A_CPU, "no CUDA GPU is visible", id="CUDA target"),
    pytest.param({"target": {"kind": "cuda"}}, ON_A_CPU, "no CUDA GPU is visible", id="CUDA target as a dict"),
    pytest.param({"opt_level": 3}, ON_A_CPU, "ignored by Relax", id="opt_level"),
    pytest.param(
        {"strategy": "replay-trace"}, ON_A_CPU, "it is read only under scheduler='meta_schedule'", id="search"
    ),
    pytest.param(
        {"scheduler": "meta_schedule", "cost_model": "xgb"},
        ON_A_CPU,
        "xgboost and psutil are not both importable",
        id="xgboost",
    ),
    pytest.param(
        {"scheduler": "meta_schedule", "trials": 0, "work_dir": "tuned", "seed": 1},
        ON_A_CPU,
        "trials=0 measures nothing",
        id="no trials",
    ),
    pytest.param({"scheduler": "dlight", "work_dir": "tuned"}, ON_A_CPU, "dlight's rules measure nothing", id="dlight"),
]


@pytest.mark.parametrize(("options", "machine", "reason"), INERT)
def test_inert(options, machine, reason, monkeypatch):
    """`explain` says why an option has no effect here."""
    monkeypatch.setattr(backends, "machine", lambda: machine)
    monkeypatch.setattr(settings, "has_cuda", lambda: False)
    assert explain("tvm", options).effects[-1].status == f"inert because {reason}"


def test_every_option_can_act(monkeypatch):
    """For a search on a GPU every option except opt_level has an effect."""
    whole = Machine(gpu="H200", packages=frozenset({"psutil", "xgboost"}))
    monkeypatch.setattr(backends, "machine", lambda: whole)
    monkeypatch.setattr(settings, "has_cuda", lambda: True)
    given = {**{name: option.default for name, option in OPTIONS.items()}, "scheduler": "meta_schedule"}
    given |= {"target": "cuda", "cuda_graph": True, "cost_model": "xgb"}
    assert set(make_backend("tvm", given).limits()) == {"opt_level"}


def test_fields_of_settings_have_defaults_of_their_type():
    """Every option has a doc and a default that passes its own check."""
    defaults = {name: option.default for name, option in OPTIONS.items() if name != "trials"}
    assert make_backend("tvm", defaults).options == defaults
    assert all(option.doc for option in OPTIONS.values())


def test_cost_models_and_strategies_are_tvms():
    """TVM can create each choice of a search."""
    import_tvm()
    from tvm.s_tir.meta_schedule.cost_model import CostModel
    from tvm.s_tir.meta_schedule.search_strategy import SearchStrategy

    models = ("random", "mlp", "xgb") if all(map(find_spec, ("xgboost", "psutil"))) else ("random", "mlp")
    assert all(CostModel.create(kind) for kind in models)
    assert all(SearchStrategy.create(kind) for kind in ("evolutionary", "replay-trace", "replay-func"))


def test_mode_of_torch_compile_is_refused(fresh_dynamo):
    """A mode given to torch.compile raises the same error as in make_backend."""
    import torch

    with pytest.raises(Exception, match="TVM option 'mode' is for Inductor; TVM has 'scheduler' and 'trials'"):
        torch.compile(lambda x: x + 1, backend="tmpl-tvm", mode="max-autotune")(torch.ones(2))


def test_warnings_of_inert_options():
    """Options without effect do not warn; explain lists them."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("error", BackendKwargsWarning)
        make_backend("tvm", opt_level=3).verify()

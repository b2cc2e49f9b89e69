"""The held-out models: their rows, the records of a run, and the bars."""

import json
from importlib.util import find_spec

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.analysis.held_out import Model, Records, bars, way_of
from benchmarks.cli import app
from benchmarks.execution.ways import ALL
from benchmarks.studies.held_out import places
from benchmarks.studies.regret import candidates_of, judged
from benchmarks.studies.regret import page as regret_page
from benchmarks.workloads.held_out import BY_NAME, HELD_OUT, ON_A_CPU, WITH_REWRITES

CPU = torch.device("cpu")
PACKAGES = ("timm", "torch_geometric", "transformers")
STAYING = ("default", "default again", "reduce-overhead+clone", "max-autotune+clone")


@pytest.mark.parametrize("row", HELD_OUT + WITH_REWRITES, ids=lambda row: row.name)
def test_each_model_builds_and_runs_on_a_cpu(row):
    """The tiny size of each row gives finite results, in training a loss with gradients."""
    missing = [package for package in PACKAGES if find_spec(package) is None]
    try:
        model, args = row.build(CPU, torch.float32, "tiny")
    except Exception as error:
        if missing and any(package in str(error) for package in missing):
            pytest.skip(f"needs {', '.join(missing)}")
        raise
    with torch.set_grad_enabled(row.training):
        out = model(*args)
    outputs = out if isinstance(out, tuple) else (out,)
    assert all(bool(torch.isfinite(each).all()) for each in outputs)
    if row.training:
        out.backward()
        assert any(parameter.grad is not None for parameter in model.parameters())


def test_the_rows_cover_all_kinds():
    """At least twelve models: inference, decoding, training, and a function of five graphs."""
    assert len(HELD_OUT) >= 12
    assert {row.kind for row in HELD_OUT} == {"inference", "decode", "training", "graphs"}
    assert [row.graphs for row in HELD_OUT if row.kind == "graphs"] == [5]
    assert len(BY_NAME) == len(HELD_OUT)
    assert set(ON_A_CPU) <= set(BY_NAME)


def test_calls_belong_to_their_ways():
    """Each call that is timed is found in the way that compiled it."""
    for way in ALL:
        assert {way_of(call) for call in way.calls(training=True)} == {way.name}


def test_a_cpu_is_one_place():
    """On a CPU one model is measured at a time, with all cores."""
    assert [place.gpu for place in places("cpu")] == [""]


# ---- records


def written(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return Records.read(path)


def compiled(way, seconds=10.0, status="pass", model="olmoe", *, cold=True):
    return {
        "record": "compile",
        "model": model,
        "way": way,
        "cold": cold,
        "status": status,
        "reason": "" if status == "pass" else "RuntimeError: no",
        "first_call_s": seconds,
        "races": [],
    }


def checked(way, status="pass", model="olmoe"):
    return {"record": "check", "model": model, "way": way, "status": status, "reason": ""}


def timed(samples, model="olmoe"):
    ways = list(dict.fromkeys(map(way_of, samples)))
    return {"record": "timing", "model": model, "samples": samples, "rounds": 5, "ways": ways}


def model(tmp_path, times, *others, name="olmoe"):
    """Return a model whose calls take `times` milliseconds, and were right."""
    ways = dict.fromkeys(map(way_of, times))
    records = [*(compiled(way, model=name) for way in ways), *(checked(way, model=name) for way in ways)]
    samples = {call: [ms / 1e3] * 5 for call, ms in times.items()}
    return Model.of(BY_NAME[name], written(tmp_path / "r.jsonl", *records, timed(samples, name), *others))


def test_a_model_is_done_when_all_ways_are_timed_or_have_failed(tmp_path):
    """A failed way is final; one that was never compiled is not."""
    path = tmp_path / "r.jsonl"
    records = written(path, compiled("eager"), compiled("auto", status="oom"), timed({"eager": [1.0]}))
    assert records.done("olmoe", ("eager", "auto"))
    assert not records.done("olmoe", ("eager", "auto", "default"))


def test_a_line_that_was_cut_is_left_out(tmp_path):
    """A run that was killed while it wrote can be continued."""
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps(compiled("auto")) + '\n{"record": "comp')
    assert Records.read(path).compiled("olmoe", "auto")


def test_only_a_cold_compile_gives_the_first_call(tmp_path):
    """A process that was started again from its caches says nothing of the first call."""
    path = tmp_path / "r.jsonl"
    found = Model.of(BY_NAME["olmoe"], written(path, compiled("auto", 30.0), compiled("auto", 4.0, cold=False)))
    assert found.first_s("auto") == 30.0


def test_the_best_mode_keeps_its_results(tmp_path):
    """The fastest of default and the modes with cloned results is the one to beat."""
    found = model(tmp_path, dict(zip(STAYING, (4.0, 4.0, 2.0, 3.0), strict=True)) | {"auto": 1.0})
    assert found.best == "reduce-overhead+clone"
    assert found.over_best("auto") == pytest.approx(2.0)


def test_a_mode_with_wrong_results_is_no_best(tmp_path):
    """A mode that failed the accuracy check has no time."""
    wrong = checked("reduce-overhead", "fail_accuracy")
    found = model(tmp_path, dict(zip(STAYING, (4.0, 4.0, 2.0, 3.0), strict=True)), wrong)
    assert found.best == "max-autotune+clone"


def test_there_is_no_best_until_all_modes_were_tried(tmp_path):
    """A run that ended before max-autotune does not make auto look better."""
    assert model(tmp_path, {"default": 4.0, "auto": 1.0}).best == ""


# ---- bars


def verdicts(models, version="2.11.0"):
    return {bar.text: (bar.met, bar.figure) for bar in bars(models, version)}


def test_bars_are_judged_by_the_records(tmp_path):
    """A model below the least ratio misses that bar alone, and is named; what was not timed is not measured."""
    slow = model(tmp_path, dict(zip(STAYING, (4.0, 4.0, 2.0, 3.0), strict=True)) | {"auto": 2.5})
    found = verdicts([slow])
    assert found["default settings, no interval below 0.97x of the best mode"] == (False, "olmoe 0.800 [0.800, 0.800]")
    assert found["default settings, geometric mean at least 1.05x"] == (False, "0.800x")
    full = 'effort="full", budget_s=120, geometric mean at least 1.10x'
    assert found[full] == (None, "")


@pytest.mark.parametrize(
    ("version", "met"), [pytest.param("2.11.0+cu130", True, id="2.11"), pytest.param("2.13.0", False, id="2.13")]
)
def test_a_training_step_is_held_against_what_its_torch_allows(tmp_path, version, met):
    """Before 2.13 the bar is reduce-overhead with cloned gradients, since then with raw ones."""
    times = {"reduce-overhead+clone": 3.0, "reduce-overhead+raw gradients": 2.0, "auto": 2.5}
    found = verdicts([model(tmp_path, times, name="gin_train")], version)
    words = "gradients cloned" if met else "raw gradients"
    assert found[f"training steps, at least 0.97x of reduce-overhead with {words}"][0] is met


def test_first_calls_have_two_bars(tmp_path):
    """One that three quarters must meet, and one for all, both over default's first call."""
    path = tmp_path / "r.jsonl"
    records = written(
        path,
        compiled("default", 15.0),
        compiled("auto", 50.0),
        compiled("default", 40.0, model="gin_train"),
        compiled("auto", 44.0, model="gin_train"),
    )
    found = verdicts([Model.of(BY_NAME[name], records) for name in ("olmoe", "gin_train")])
    assert found["first call, at most default's and 5 s for 75% of them"] == (False, "+35.0 s")
    assert found["first call, at most default's and 10 s for all"] == (False, "olmoe +35.0 s")


def test_the_page_has_a_line_for_each_model_and_failure(tmp_path):
    """No model is dropped: one without times is listed as such, a way that failed with its reason."""
    written(tmp_path / "held_out.jsonl", compiled("auto", status="oom"))
    assert CliRunner().invoke(app, ["held-out", "--out", str(tmp_path), "--page"]).exit_code == 0
    lines = (tmp_path / "held_out.md").read_text().splitlines()
    assert all(any(line.startswith(f"- {row.name}: ") for line in lines) for row in HELD_OUT)
    assert "  - auto: oom: RuntimeError: no" in lines


# ---- choosing


def flat(**seconds):
    return {name: [each] * 9 for name, each in seconds.items()}


def test_regret_is_that_of_the_median_winner():
    """Two of three races chose the best candidate, the third one that is slower beyond noise."""
    regret, flips = judged(["a", "a", "b"], flat(a=1.0, b=1.1, c=1.5))
    assert regret.median == 0.0
    assert flips == pytest.approx(1 / 3)


def test_the_best_may_be_one_that_no_race_chose():
    """The regret is over the best of all candidates, not of the winners."""
    assert judged(["a"], flat(a=1.5, b=1.0))[0].median == pytest.approx(0.5)


@pytest.mark.parametrize(
    "b", [pytest.param([1.01] * 9, id="little"), pytest.param([0.5, 2.0, 1.1] * 3, id="unsure, one way or the other")]
)
def test_another_choice_within_noise_is_no_flip(b):
    """A candidate that takes 1 % longer than the usual winner, or sometimes more and sometimes less, is as good."""
    assert judged(["a", "a", "b"], {"a": [1.0] * 9, "b": b})[1] == 0.0


def test_a_winner_without_a_time_has_no_regret():
    """If a winner could not be timed, nothing is said of the choice."""
    assert judged(["a"], flat(b=1.0)) == (None, None)


def test_models_without_a_regret_are_counted():
    """The page says how many models its figures are not of."""
    fine = {"model": "a", "status": "pass", "winners": ["x"], "names": {"x": "default"}, "samples": flat(x=1.0)}
    failed = {"model": "b", "status": "fail_to_run", "reason": "planted"}
    lines = [*regret_page([{**fine, "first_calls": [1.0]}, failed])]
    assert lines[-1] == "- 1 of 2 models are not among these: a race or a winner failed."


def test_candidates_without_a_turn_are_timed_too():
    """A candidate that was skipped for want of time may have been the best; one that could not gain is left out."""
    row = {"name": "cudagraphs", "options": {"triton.cudagraphs": True}, "compiler": "", "reason": ""}
    late = "it is predicted to exceed the budget: about 11 s of compiling, 9 s are left"
    rows = [{**row, "status": "skipped", "reason": late}]
    useless = {**row, "name": "padded", "options": {"force_shape_pad": True}, "status": "skipped", "reason": "no use"}
    names = candidates_of([{"winner": "default", "options": {}, "rows": [*rows, useless]}])
    assert list(names.values()) == ["eager", "default", "cudagraphs"]

"""MetaSchedule's search, with the real TVM: what is measured, stored, and reused."""

import gc
import inspect
import json
import logging
import re
import shutil
import subprocess
import sys
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

tvm = pytest.importorskip("tvm")

import torch  # noqa: E402 - TVM's tests are skipped whole where it is missing
from torch.testing import assert_close  # noqa: E402
from tvm import relax  # noqa: E402
from tvm.target import Target  # noqa: E402

from backend_kwargs import BackendKwargsWarning  # noqa: E402
from backend_kwargs.backends.tvm import tune  # noqa: E402
from backend_kwargs.backends.tvm.build import build  # noqa: E402
from backend_kwargs.backends.tvm.settings import TVMOptions  # noqa: E402
from backend_kwargs.backends.tvm.target import host  # noqa: E402
from backend_kwargs.backends.tvm.tune import _directory, _slow  # noqa: E402

CPU = torch.device("cpu")
HOST = host()


def product(rows=16):
    """Return a module with one product."""
    bb = relax.BlockBuilder()
    x, y = (relax.Var(name, relax.TensorType(shape, "float32")) for name, shape in (("x", (rows, 32)), ("y", (32, 16))))
    with bb.function("main", [x, y]):
        with bb.dataflow():
            result = bb.emit_output(relax.Tuple([bb.emit(relax.op.matmul(x, y))]))
        bb.emit_func_output(result)
    return bb.get()


def tuned(work_dir, trials=4, rows=16, **settings):
    settings = {"strategy": "replay-trace", "seed": 0, **settings}
    return build(
        product(rows), TVMOptions(scheduler="meta_schedule", trials=trials, work_dir=str(work_dir), **settings), CPU
    )


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A work_dir in which the product has been tuned."""
    work_dir = tmp_path_factory.mktemp("tuning")
    tuned(work_dir)
    return work_dir


def copied(kept: Path, to: Path) -> Path:
    """Copy a work_dir with one result, and return the result's path in the copy."""
    shutil.copytree(kept, to, dirs_exist_ok=True)
    (result,) = to.glob("*/*.json")
    return result


def test_a_tuned_product_is_right(kept):
    x, y = torch.randn(16, 32), torch.randn(32, 16)
    main = relax.VirtualMachine(tuned(kept).executable, tvm.cpu())["main"]
    assert_close(torch.from_dlpack(main(x, y)[0]), x @ y, rtol=1e-4, atol=1e-4)


def test_the_search_measures_its_trials_and_our_own_schedule(tmp_path):
    built = tuned(tmp_path, trials=3)
    assert (built.tuned, built.notes) == (1, ("measured 4 schedules",))


def test_what_was_tuned_is_not_tuned_again(kept):
    built = tuned(kept)
    assert (built.tuned, built.notes) == (1, ("measured 0 schedules",))


def test_more_trials_than_before_are_searched(kept, tmp_path):
    copied(kept, tmp_path)
    assert tuned(tmp_path, trials=5).notes != ("measured 0 schedules",)


def test_no_trials_reuse_only(tmp_path):
    built = tuned(tmp_path / "nothing", trials=0)
    assert (built.tuned, built.notes) == (0, ("measured 0 schedules",))
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize(
    "target", [HOST | {"num-cores": 3}, HOST | {"mcpu": "x86-64"}], ids=["other cores", "another CPU"]
)
def test_results_for_another_target_are_not_reused(kept, tmp_path, target):
    work_dir = copied(kept, tmp_path).parents[1]
    with pytest.warns(BackendKwargsWarning) as warned:
        assert tuned(work_dir, trials=0, target=target).tuned == 0
    why = f"{str(work_dir)!r} has no results of a search for this target, and nothing is tuned"
    remedy = "also write scheduler='meta_schedule', trials=64, once"
    assert [str(each.message) for each in warned] == [f"TVM option 'work_dir': {why}; {remedy}."]
    assert tuned(work_dir, trials=1, target=target).notes == ("measured 2 schedules",)
    assert tuned(work_dir, trials=0, target=target).tuned == 1


def test_a_named_target_and_the_default_share_their_results(kept):
    assert tuned(kept, trials=0, target=HOST).tuned == 1


@pytest.mark.parametrize("work_dir", [None, ""], ids=["None", "an empty text"])
def test_no_folder_of_results(work_dir):
    """Without a folder nothing is kept, and the current folder is not one."""
    assert _directory(TVMOptions(work_dir=work_dir), Target("llvm")) is None


def test_gpus_are_told_apart_and_their_hosts_are_not():
    """Results depend on the GPU and not on its host; needs no GPU."""

    def directory(arch, cores):
        target = Target({"kind": "cuda", "arch": arch}, host=HOST | {"num-cores": cores})
        return _directory(TVMOptions(work_dir="tuned"), target)

    assert directory("sm_80", 1) == directory("sm_80", 2) != directory("sm_90", 2)


def test_a_failed_search_keeps_no_candidates(tmp_path, monkeypatch):
    """Candidates that were built but not run are freed with the builder."""
    built = []

    def compiles(mod, target):
        code: set[Any] = set()
        built.append(weakref.ref(code))
        return code

    def fails(*, tasks, builder, **_):
        builder.build([tune.ms.builder.BuilderInput(task.mod, task.target) for task in tasks])
        raise RuntimeError("no luck")

    monkeypatch.setattr(tvm, "compile", compiles)
    monkeypatch.setattr(tune.ms, "tune_tasks", fails)
    with pytest.warns(BackendKwargsWarning, match="no luck"):
        tuned(tmp_path)
    gc.collect()
    assert [each() for each in built] == [None, None]


def test_what_a_failed_search_measured_is_used_and_searched_again(tmp_path, monkeypatch):
    """TVM's search fails at some functions: the kernel keeps our own schedule, which was measured first."""

    def fails(**_):
        raise RuntimeError("no luck")

    with monkeypatch.context() as patched:
        patched.setattr(tune.ms, "tune_tasks", fails)
        with pytest.warns(BackendKwargsWarning) as warned:
            built = tuned(tmp_path)
    assert (built.tuned, built.notes) == (1, ("measured 1 schedules",))
    message = "TVM's search failed, and what it had measured is used: RuntimeError: no luck."
    assert [str(each.message) for each in warned] == [message]
    assert tuned(tmp_path).notes == ("measured 5 schedules",)


def in_a_process(work_dir, call: str) -> subprocess.Popen:
    """Start a process that prints the result of `call` of `tuned`."""
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from tests.backends.tvm.test_tvm_tune import tuned\n"
        f"built = tuned(sys.argv[2], {call})\n"
        "print(built.tuned, *built.notes)"
    )
    command = [sys.executable, "-W", "ignore", "-c", program, str(Path(__file__).parents[3]), str(work_dir)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def error_text(process: subprocess.Popen) -> str:
    return process.communicate(timeout=300)[0].splitlines()[-1]


def test_a_later_process_reuses_without_tuning(kept):
    assert error_text(in_a_process(kept, "trials=0")) == "1 measured 0 schedules"


def test_two_processes_share_a_work_dir(tmp_path):
    processes = [in_a_process(tmp_path, f"trials=2, rows={rows}") for rows in (8, 16)]
    assert [error_text(each) for each in processes] == ["1 measured 3 schedules"] * 2
    assert [tuned(tmp_path, trials=0, rows=rows).tuned for rows in (8, 16)] == [1, 1]


def test_what_a_killed_process_measured_is_reused(tmp_path):
    """What it measured until then serves, and the kernel is searched again."""
    process = in_a_process(tmp_path, "trials=100000, num_trials_per_iter=4")
    while not [*tmp_path.rglob("*.json")]:
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()
    process.communicate(timeout=60)
    assert tuned(tmp_path, trials=0).tuned == 1
    assert tuned(tmp_path, trials=2).notes != ("measured 0 schedules",)


@pytest.mark.parametrize("broken", ["", "[", "null", "[7, [], 1]", "\x00\xff"], ids=repr)
def test_broken_results_are_passed_over(kept, tmp_path, broken):
    copied(kept, tmp_path).write_text(broken)
    with pytest.warns(BackendKwargsWarning, match="has no results of a search for this target"):
        assert tuned(tmp_path, trials=0).tuned == 0


def test_a_result_is_read_once(kept, tmp_path, monkeypatch):
    """Each part of a graph asks for all results of its target."""
    copied(kept, tmp_path)
    read = []
    from_json = tune.TuningRecord.from_json

    def reads(record, workload):
        read.append(record)
        return from_json(record, workload)

    monkeypatch.setattr(tune.TuningRecord, "from_json", reads)
    assert [tuned(tmp_path, trials=0).tuned for _ in range(2)] == [1, 1]
    assert len(read) == 1


def test_the_fastest_schedule_is_the_result(tmp_path):
    """A search that measures no faster schedule keeps the one that is known."""
    tuned(tmp_path, trials=2)
    (result,) = tmp_path.glob("*/*.json")
    workload, record, trials = json.loads(result.read_text())
    record[1] = [1e-12]
    result.write_text(json.dumps([workload, record, trials]))
    tuned(tmp_path, trials=4)
    assert json.loads(result.read_text()) == [workload, record, 4]


def test_what_a_later_search_measures_is_read_too(tmp_path):
    assert tuned(tmp_path, trials=0).tuned == 0
    tuned(tmp_path, trials=2)
    assert tuned(tmp_path, trials=0).tuned == 1


def test_a_search_on_a_full_disk_serves_this_process(tmp_path):
    """What was measured is used, with a warning, and is searched again."""
    from tests.full_disk import full_disk  # not in the processes that import this file

    with full_disk(0), pytest.warns(BackendKwargsWarning) as warned:
        made = tuned(tmp_path, rows=24)
    assert made.tuned == 1
    assert not [*tmp_path.glob("*/*.json")]
    messages = [re.sub("'/.+'", "FILE", str(each.message)) for each in warned]
    assert messages == ["TVM's results serve this process only: Cannot write FILE: File too large."]
    assert tuned(tmp_path, rows=24).notes == ("measured 5 schedules",)


def test_two_searches_in_one_work_dir_keep_apart(kept, tmp_path):
    """Two searches share a work_dir, and each function's results are found again."""
    copied(kept, tmp_path)
    tuned(tmp_path, trials=2, rows=8)
    assert [tuned(tmp_path, trials=0, rows=rows).tuned for rows in (8, 16)] == [1, 1]


def test_the_search_leaves_inspect_and_logging_as_they_were(tmp_path):
    stack, handlers = inspect.stack, list(logging.getLogger().handlers)
    tuned(tmp_path, trials=1)
    assert inspect.stack is stack
    assert logging.getLogger().handlers == handlers


def test_the_search_is_quiet_where_there_is_no_terminal(tmp_path, capfd):
    tuned(tmp_path, trials=1)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("strategy", ["evolutionary", "replay-trace", "replay-func"])
def test_every_strategy_searches(tmp_path, strategy):
    assert tuned(tmp_path, trials=1, strategy=strategy).tuned == 1


@pytest.mark.parametrize(
    ("seconds", "kept"),
    [
        pytest.param([1.0, 0.5, 0.001], [0, 1], id="small ones left"),
        pytest.param([1.0, None, 0.001], [0, 1], id="unknown kept"),
        pytest.param([None, None, None], [0, 1, 2], id="none known"),
    ],
)
def test_what_takes_no_time_is_not_searched(seconds, kept):
    tasks = [SimpleNamespace(weight=1) for _ in seconds]
    assert _slow(tasks, seconds) == [tasks[i] for i in kept]

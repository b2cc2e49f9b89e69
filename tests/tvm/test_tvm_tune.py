"""MetaSchedule's search, with the real TVM: what is measured, kept, and reused."""

import inspect
import logging
import subprocess
import sys
from pathlib import Path

import pytest

tvm = pytest.importorskip("tvm")

import torch  # noqa: E402 - TVM's tests are skipped whole where it is missing
from torch.testing import assert_close  # noqa: E402
from tvm import relax  # noqa: E402

from backend_kwargs.compilers.tvm.build import build  # noqa: E402
from backend_kwargs.compilers.tvm.settings import Settings  # noqa: E402

CPU = torch.device("cpu")


def product(rows=16):
    """Return a module of one product."""
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
        product(rows), Settings(scheduler="meta_schedule", trials=trials, work_dir=str(work_dir), **settings), CPU
    )


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A work_dir in which the product has been tuned."""
    work_dir = tmp_path_factory.mktemp("tuning")
    tuned(work_dir)
    return work_dir


def copied(kept: Path, to: Path) -> Path:
    (search,) = kept.iterdir()
    (to / search.name).mkdir(parents=True)
    for file in search.iterdir():
        (to / search.name / file.name).write_bytes(file.read_bytes())
    return to / search.name


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


def test_a_later_process_reuses_without_tuning(kept):
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from test_tvm_tune import tuned\n"
        "built = tuned(sys.argv[2], trials=0)\n"
        "print(built.tuned, *built.notes)"
    )
    command = [sys.executable, "-W", "ignore", "-c", program, str(Path(__file__).parent), str(kept)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.splitlines()[-1] == "1 measured 0 schedules"


def test_a_search_that_was_killed_keeps_its_whole_lines(kept, tmp_path):
    """Its last line is half written, and it never said that it ended."""
    search = copied(kept, tmp_path)
    (search / "finished").unlink()
    records = search / "database_tuning_record.json"
    records.write_text(records.read_text()[:-40])
    assert tuned(tmp_path, trials=0).tuned == 1


def test_a_search_that_was_killed_is_searched_again(kept, tmp_path):
    (copied(kept, tmp_path) / "finished").unlink()
    assert tuned(tmp_path, trials=2).notes != ("measured 0 schedules",)


@pytest.mark.parametrize("broken", ["", "[", "null", "[7, []]", "\x00\xff"], ids=repr)
def test_broken_records_are_passed_over(kept, tmp_path, broken):
    search = copied(kept, tmp_path)
    (search / "database_tuning_record.json").write_text(broken)
    assert tuned(tmp_path, trials=0).tuned == 0


def test_two_searches_in_one_work_dir_keep_apart(kept, tmp_path):
    """As two processes would: each function is found again by what the other wrote beside it."""
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

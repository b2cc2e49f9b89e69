"""`tune-plan --on local`: real processes, which are killed, interrupted and started again."""

import os
import re
import signal
import time

import pytest
import torch

import backend_kwargs as bk
from backend_kwargs.fleet.board import Unit, UnitClaims
from backend_kwargs.fleet.scheduling import Device, LocalPool, Queue, devices_here, drive
from backend_kwargs.page import read_document
from backend_kwargs.stores.folder import Folder
from backend_kwargs.stores.opening import opened
from tests.fleet.conftest import tuned_on
from tests.processes import ends


def wait_for(path, lines=1):
    """Wait until a file has so many lines, and return them."""
    until = time.monotonic() + 600
    while not path.exists() or len(found := path.read_text().splitlines()) < lines:
        assert time.monotonic() < until
        time.sleep(0.1)
    return found


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A plan that was tuned by two workers, and the process that ended."""
    return tuned_on(tmp_path_factory.mktemp("plan"), "local:2" if len(os.sched_getaffinity(0)) > 1 else "local:1")


def test_a_plan_is_tuned_once_and_serves(tuned):
    """Failed units are listed with reasons and exit code 1; what is done is skipped; its decision serves."""
    planned, ran = tuned
    assert ran.returncode == 1, ran.stdout + ran.stderr
    why = "Factory 'models.py:broken' failed: ValueError: no weights here."
    assert f"failed: models.py:broken  cpu  1 threads: {why}" in ran.stdout
    assert "devices covered: 0 of 1 (none of cpu)" in ran.stdout
    assert "A/A, the widest of a call beside itself: " in ran.stdout
    document = read_document(planned.folder / "out.json")
    assert {row.name: row.status == "failed" for row in document.speedups[0].rows} == {
        "models.py:small  cpu  1 threads": False,
        "models.py:broken  cpu  1 threads": True,
        "models.py:dies_once  cpu  1 threads": False,
        "models.py:hangs  cpu  1 threads": True,
    }
    again = planned.plan("small").run()
    assert again.returncode == 0, again.stdout + again.stderr
    assert "1 of 1 units are done already." in again.stderr
    assert "devices covered: 1 of 1 (cpu of cpu)" in again.stdout
    scope = {}
    exec((planned.folder / "models.py").read_text(), scope)
    model, x = scope["small"]()
    model.eval()
    options = {"race": "never", "match": "device", "candidates": ["no_size_asserts"]}
    options["store"] = bk.Store(planned.store, connect_s=60.0)  # beside other tests
    with torch.no_grad():
        compiled = torch.compile(model, backend=bk.make_backend("tmpl-inductor:auto", options), dynamic=False)
        assert torch.allclose(compiled(x), model(x), atol=1e-5)
    (graph,) = bk.report(compiled).graphs
    assert "a graph not raced" not in str(graph.race)


def test_a_killed_worker_loses_its_unit_alone(tuned):
    """A worker that dies by a signal costs one attempt of its unit, which ends, and no other."""
    planned, ran = tuned
    assert (planned.folder / "died").exists()
    assert len(re.findall("threads +raced ", ran.stdout)) == 2, ran.stdout + ran.stderr


def test_a_unit_that_hangs_is_killed(tuned):
    """A unit that takes longer than its limit fails with that reason, and all that it started is gone."""
    planned, ran = tuned
    why = "it took longer than 30 s, and was killed; limit_s in the plan gives a unit more"
    assert f"failed: models.py:hangs  cpu  1 threads: {why}" in ran.stdout
    assert [pid for pid in wait_for(planned.folder / "begun", 3) if not ends(pid)] == []


def test_an_interrupted_plan_goes_on(planned):
    """Ctrl-C ends the workers, keeps what ended, and exits with 130; started again, only the rest runs."""
    started = planned.plan("small", "long").start()
    (worker,) = wait_for(planned.folder / "begun")
    started.send_signal(signal.SIGINT)
    output, _ = started.communicate(timeout=300)
    assert started.returncode == 130, output
    assert "interrupted: what ended is kept, 1 of 2 units; start it again for the rest." in output
    assert ends(worker)
    again = planned.plan("small", "long", head="").start()
    assert "names no devices" in again.communicate(timeout=300)[0]
    again = planned.plan("small", "long").start()
    wait_for(planned.folder / "begun", 2)
    again.send_signal(signal.SIGTERM)
    output, _ = again.communicate(timeout=300)
    assert "1 of 2 units are done already." in output
    assert again.returncode == 128 + signal.SIGTERM or again.returncode == 130


def test_workers_end_with_a_killed_command(planned):
    """`kill -9` of the command ends its workers, so that no device stays busy."""
    started = planned.plan("long").start()
    (worker,) = wait_for(planned.folder / "begun")
    started.kill()
    started.communicate()
    assert ends(worker)


def test_shards_share_a_folder(planned):
    """Two shards without claims tune each its own, and together all."""
    planned.plan("small", "dies_once")
    shards = [planned.start("--shard", f"{number}/2") for number in (1, 2)]
    outputs = [each.communicate(timeout=900)[0] for each in shards]
    assert [each.returncode for each in shards] == [0, 0], outputs
    board = UnitClaims(opened(str(planned.store)).store, {"torch": torch.__version__.partition("+")[0]})
    assert [document.failed for document in board.known().values()] == ["", ""]
    assert sum(output.count("1 of 1: ") for output in outputs) == 2


def test_a_machine_that_starts_no_process_fails_no_unit(tmp_path):
    """The command ends, as where a disk is full, and the store has nothing of the units."""
    store, units = Folder(tmp_path), [Unit(model=f"m.py:f{at}", device="cpu") for at in range(2)]
    queue = Queue(units, UnitClaims(store, {}), time.monotonic)
    with pytest.raises(bk.BackendKwargsError) as raised:
        list(drive(queue, LocalPool([Device((0,))], tmp_path / "gone")))
    missing = f"FileNotFoundError: [Errno 2] No such file or directory: {tmp_path / 'gone'!r}"
    assert str(raised.value) == f"No process can be run for 'm.py:f0  cpu': {missing}."
    assert list(store.list("units/")) == []


def test_cores_are_divided():
    """Each CPU worker has cores of its own, and all of them together no more than this process."""
    usable = os.sched_getaffinity(0)
    for workers in (1, 2) if len(usable) > 1 else (1,):
        cores = [device.cores for device in devices_here(workers) if not device.gpu]
        assert len(cores) == workers
        assert len({core for each in cores for core in each}) == sum(map(len, cores)) <= len(usable)


@pytest.mark.parametrize(
    ("unit", "why"),
    [
        pytest.param(Unit(model="m", device="cpu", threads=2), "", id="a CPU"),
        pytest.param(
            Unit(model="m", device="cpu", threads=3),
            "it needs 3 threads, and a worker has 2 cores: use fewer, --on local:N",
            id="too many threads",
        ),
        pytest.param(Unit(model="m", device="cuda"), "", id="any GPU"),
        pytest.param(Unit(model="m", device="h100"), "", id="a GPU by a part of its name"),
        pytest.param(Unit(model="m", device="A100"), "this machine has no A100", id="another GPU"),
    ],
)
def test_what_a_machine_can_run(tmp_path, unit, why):
    """A unit runs where its device is, and where there are as many cores as it has threads."""
    pool = LocalPool([Device((0, 1)), Device((2, 3), "0", "NVIDIA H100 80GB HBM3")], tmp_path)
    assert pool.missing(unit) == why
    assert pool.fits(unit) == (not why)

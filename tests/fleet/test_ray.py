"""`tune-plan --on ray:...`: a real head and two workers of one CPU each."""

import importlib.util
import re
import signal

import pytest

from backend_kwargs.cli import decisions
from backend_kwargs.errors import BackendKwargsError
from backend_kwargs.fleet.worker import end_tree
from tests.fleet.clusters import wait_for
from tests.fleet.conftest import tuned_on
from tests.fleet.test_local import wait_for as wait_for_lines
from tests.processes import ends

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")


@pytest.fixture(scope="module")
def tuned(tmp_path_factory, ray_cluster):
    """A plan that was tuned on the cluster, and the process that ended."""
    return tuned_on(tmp_path_factory.mktemp("plan"), f"ray:{ray_cluster.address}")


def test_a_plan_on_a_cluster(tuned):
    """Units run in Ray's workers, a worker that dies has its unit run again, and failed ones have their reasons."""
    planned, ran = tuned
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert len(re.findall("threads +raced ", ran.stdout)) == 2, ran.stdout + ran.stderr
    assert (planned.folder / "died").exists()
    assert (
        "models.py:broken  cpu  1 threads: Factory 'models.py:broken' failed: ValueError: no weights here."
        in ran.stdout
    )


def test_a_unit_that_hangs_is_killed(tuned):
    """A unit that takes longer than its limit fails with that reason, with all that it started; the others go on."""
    planned, ran = tuned
    why = "it took longer than 30 s, and was killed; limit_s in the plan gives a unit more"
    assert f"failed: models.py:hangs  cpu  1 threads: {why}" in ran.stdout.splitlines()
    assert [pid for pid in wait_for_lines(planned.folder / "begun", 3) if not ends(pid)] == []


def test_a_cluster_without_what_a_unit_needs(planned, ray_cluster):
    """Units that no node can run are listed with the reason, and nothing waits for them."""
    head = 'devices = ["cpu", "cuda", "H100"]\nthreads = [64]\n'
    ran = planned.plan("small", head=head).run("--on", f"ray:{ray_cluster.address}")
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "not run here: 1 unit, since no node of the Ray cluster has 64 CPUs" in ran.stdout
    assert "not run here: 1 unit, since no node of the Ray cluster has a GPU" in ran.stdout
    assert "not run here: 1 unit, since no node of the Ray cluster has an H100" in ran.stdout


def test_ctrl_c_cancels_what_runs_elsewhere(planned, ray_cluster):
    """Ctrl-C ends the tasks on the cluster, whose CPUs are free again."""
    head = 'devices = ["cpu"]\nthreads = [1]\n[[models]]\nmodel = "models.py:long"\n'
    begun = planned.folder / "begun"
    models = planned.folder / "models.py"
    models.write_text(models.read_text().replace('"begun"', repr(str(begun))), encoding="utf-8")
    started = planned.plan(head=head).start("--on", f"ray:{ray_cluster.address}")
    (unit,) = wait_for_lines(begun)
    started.send_signal(signal.SIGINT)
    output, _ = started.communicate(timeout=600)
    assert started.returncode == 130, output
    assert ends(unit)
    ran = planned.plan("small").run("--on", f"ray:{ray_cluster.address}")
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_a_node_that_is_killed_loses_its_unit_alone(planned, ray_cluster):
    """`kill -9` of a node has its unit run again on another one."""
    begun, models = planned.folder / "begun", planned.folder / "models.py"
    source = models.read_text().replace('"begun"', repr(str(begun)))
    source += f"""
def slow_at_first():
    count = len(open({str(begun)!r}).readlines()) if os.path.exists({str(begun)!r}) else 0
    return long() if count < 1 else small()
"""
    models.write_text(source, encoding="utf-8")
    node = ray_cluster.add_worker(cpus=2)
    head = 'devices = ["cpu"]\nbudget_s = 600\ncandidates = ["no_size_asserts"]\nthreads = [2]\n'
    started = planned.plan("slow_at_first", head=head).start("--on", f"ray:{ray_cluster.address}")
    wait_for_lines(begun)
    alive = ray_cluster.alive()
    end_tree(node.pid)  # Ray's worker may outlive its node for a while, and tell what came of the unit
    node.wait()
    wait_for(ray_cluster.alive, alive - 1)
    ray_cluster.add_worker(cpus=2)
    output, _ = started.communicate(timeout=900)
    assert started.returncode == 0, output


def test_no_cluster(tmp_path):
    """An address where no cluster is ends the command at once, with the next step."""
    with pytest.raises(BackendKwargsError) as error, decisions._pool("ray:127.0.0.2:1", tmp_path):
        pass
    assert str(error.value) == (
        "No Ray cluster answers at '127.0.0.2:1': ConnectionRefusedError: [Errno 111] Connection refused. "
        "`ray start --head` starts one."
    )

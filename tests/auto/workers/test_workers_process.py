"""Worker processes start anywhere, and end with the process that has them, however it ends."""

import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import ExitStack, suppress
from functools import cache

import pytest
import torch

from backend_kwargs.auto.workers.pool import Workers
from tests.auto.workers.lowering import LONG_S, lowered
from tests.processes import ends, lives, state, waits

# A program with a worker, which lowers a graph, says the worker's id, and waits.
PROGRAM = """
import sys, time
import torch
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from backend_kwargs.auto.workers.graphs import packed
from backend_kwargs.auto.workers.pool import Workers

pool = Workers(1, nice=0)

def inner(gm, example_inputs, **kwargs):
    reply = pool.submit(packed(gm, example_inputs, kwargs), {"max_fusion_size": 7}).result(300)
    print(reply.key[:1], repr(reply.reason), *pool.processes(), flush=True)
    return compile_fx_inner(gm, example_inputs, **kwargs)

def backend(gm, example_inputs):
    return compile_fx(gm, example_inputs, inner_compile=inner)

class Squared(torch.nn.Module):
    def forward(self, x):
        return x @ x

torch.compile(Squared(), backend=backend)(torch.randn(4, 4))
"""
WAITING = """
try:
    print("waiting", flush=True)
    time.sleep(600)
except KeyboardInterrupt:
    print("interrupted", *pool.processes(), flush=True)
"""


def started(program, *command, **options):
    """Start a program that is given as its standard input; return it with the worker's id, which it has said."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, *(command or ("-",))], **pipes, **options)
    process.stdin.write(program)
    process.stdin.close()
    key, reason, worker = process.stdout.readline().split()
    assert (key, reason) == ("f", "''")
    return process, int(worker)


@pytest.fixture
def pool():
    """Yield a worker that has started."""
    pool = Workers(1, limit_s=LONG_S, nice=0)
    pool.start()
    while not pool.processes():
        time.sleep(0.01)
    yield pool
    pool.stop()


@cache
def plain():
    """Return a small graph as bytes, of which no C++ is made."""
    (graph,) = lowered(lambda x: x @ x, torch.randn(4, 4))
    return graph.graph


def test_a_program_with_many_open_files():
    """A worker answers through a descriptor above 1023, which select() does not know."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    pool = Workers(1, limit_s=LONG_S, nice=0)
    try:
        with ExitStack() as stack:
            for _ in range(1100):
                stack.enter_context(open(os.devnull))  # noqa: PTH123 - it is not a path
            assert pool.submit(plain(), {}).result(LONG_S).reason == ""
    finally:
        pool.stop()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_end_of_the_program():
    """A program on standard input has a worker, which ends with it."""
    process, worker = started(PROGRAM)
    with process:
        assert process.wait(LONG_S) == 0
    assert ends(worker)


def test_kill_9_of_the_program():
    """A worker ends where its program is killed."""
    process, worker = started(PROGRAM + WAITING)
    with process:
        assert lives(worker)
        process.kill()
    assert ends(worker)


def test_ctrl_c():
    """Ctrl-C at a terminal is for the program: its worker goes on until the program ends."""
    process, worker = started(PROGRAM + WAITING, start_new_session=True)
    with process:
        assert process.stdout.readline() == "waiting\n"
        os.killpg(process.pid, signal.SIGINT)
        assert process.stdout.readline().split() == ["interrupted", str(worker)]
    assert ends(worker)


def test_an_exception():
    """A program that fails ends its worker."""
    process, worker = started(PROGRAM + "\nraise SystemExit(3)\n")
    with process:
        assert process.wait(LONG_S) == 3
    assert ends(worker)


def test_a_script_runs_once(tmp_path):
    """A script without a guard round its body is not run again by its worker."""
    script = tmp_path / "script.py"
    script.write_text(f"print('begun', flush=True)\n{PROGRAM}")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=LONG_S, check=True)
    begun, answer = done.stdout.splitlines()
    assert begun == "begun"
    assert answer.startswith("f ''")


def test_a_prompt():
    """A program typed at a prompt has a worker."""
    lines = f"exec({PROGRAM!r})\n"
    process, worker = started(lines, "-i", "-q", stderr=subprocess.DEVNULL)
    with process:
        assert process.wait(LONG_S) == 0
    assert ends(worker)


def test_modules_of_the_present_folder(tmp_path):
    """A worker takes no modules from the folder in which the program happens to run."""
    (tmp_path / "queue.py").write_text("raise ImportError('not this one')")
    script = tmp_path / "elsewhere" / "script.py"
    script.parent.mkdir()
    script.write_text(PROGRAM)
    command = [sys.executable, script]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LONG_S, check=True)
    assert done.stdout.startswith("f ''")


def test_kill_9_of_the_worker(pool):
    """A worker that dies is named as the reason, and the next graph gets a new one."""
    graph = plain()
    assert pool.submit(graph, {}).result(LONG_S).reason == ""
    (worker,) = pool.processes()
    os.kill(worker, signal.SIGSTOP)
    ticket = pool.submit(graph, {"max_fusion_size": 7})
    os.kill(worker, signal.SIGKILL)
    assert ticket.result(LONG_S).reason == "the worker was killed by signal 9"
    assert pool.submit(graph, {"max_fusion_size": 7}).result(LONG_S).reason == ""


def test_a_worker_that_hangs():
    """A worker that does not answer in time is ended, and the next graph gets a new one."""
    graph, pool = plain(), Workers(1, nice=0)
    try:
        assert pool.submit(graph, {}).result(LONG_S).reason == ""
        (worker,) = pool.processes()
        os.kill(worker, signal.SIGSTOP)
        pool.limit_s = 0.2
        assert pool.submit(graph, {}).result(LONG_S).reason == "the worker took more than 0.2 s and was ended"
        assert ends(worker)
        pool.limit_s = LONG_S
        assert pool.submit(graph, {}).result(LONG_S).reason == ""
    finally:
        pool.stop()


def test_a_worker_that_does_not_start(monkeypatch):
    """A worker that cannot start says so, and is not tried again."""
    monkeypatch.setattr(sys, "executable", "/bin/false")
    pool = Workers(1, nice=0)
    assert pool.submit(plain(), {}).result(LONG_S).reason == "the worker ended with code 1"
    assert pool.submit(plain(), {}).result(0).reason == "the worker ended with code 1"
    pool.stop()


def test_idle():
    """A worker that has had nothing to do for a while ends; the next graph gets a new one."""
    graph, pool = plain(), Workers(1, idle_s=0.1, nice=0)
    try:
        assert pool.submit(graph, {}).result(LONG_S).reason == ""
        assert waits(lambda: pool.processes() == [])
        assert pool.submit(graph, {}).result(LONG_S).reason == ""
    finally:
        pool.stop()


def test_stop(pool):
    """Stopping ends the processes; what waits, and what comes later, is answered."""
    graph = plain()
    tickets = [pool.submit(graph, {}) for _ in range(3)]
    (worker,) = pool.processes()
    pool.stop()
    assert not lives(worker)
    tickets.append(pool.submit(graph, {}))
    assert {each.result(0).reason for each in tickets} == {"the workers were stopped"}


@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt], ids=str)
def test_paused(pool, error):
    """While something is timed, a worker gets no time of a core; it goes on also where the timing raises."""
    (worker,) = pool.processes()
    with suppress(RuntimeError, KeyboardInterrupt), pool.paused():
        assert waits(lambda: state(worker) == "T")
        if error:
            raise error
    assert waits(lambda: state(worker) != "T")
    assert pool.submit(plain(), {}).result(LONG_S).reason == ""


def test_limits():
    """A worker yields to others, and has the limits of the process that starts it."""
    pool = Workers(1, limit_s=LONG_S)
    pool.submit(plain(), {}).result(LONG_S)
    (worker,) = pool.processes()
    assert os.getpriority(os.PRIO_PROCESS, worker) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 10)
    assert resource.prlimit(worker, resource.RLIMIT_AS) == resource.getrlimit(resource.RLIMIT_AS)
    assert os.getpgid(worker) == worker
    pool.stop()


def test_less_memory():
    """A program whose memory is limited limits its workers."""
    limited = textwrap.dedent("""
        import resource
        resource.setrlimit(resource.RLIMIT_AS, (1 << 36, 1 << 36))
        """)
    report = "\nprint(*resource.prlimit(pool.processes()[0], resource.RLIMIT_AS))\n"
    process, _ = started(limited + PROGRAM + report)
    with process:
        assert process.stdout.read().split() == [str(1 << 36)] * 2

"""Processes that start with torch imported: forks of one that has done nothing else, since imports take seconds.

A fork has memory, variables, streams, signals and a folder of its own, and ends as an interpreter does. With other
forks it shares what is imported at its start, addresses, and the seed of hashes: a test of these needs `subprocess`.
"""

import atexit
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import socketserver
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

LIMIT_S = 600  # for a command that hangs
# Streams are buffered as for a user; scikit-learn and Ray set the next three when they are imported, and Inductor the
# last one, an address in this process, when it compiles.
NOT_HANDED_ON = {
    *("PYTEST_CURRENT_TEST", "PYTHONUNBUFFERED", "KMP_INIT_AT_FORK", "KMP_DUPLICATE_LIB_OK", "RAY_CLIENT_MODE"),
    "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR",
}


def _handed_on(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name not in NOT_HANDED_ON}


ENVIRONMENT = _handed_on(os.environ)  # no test has changed it yet
# Read when they are used. Another variable may be read when torch is imported: an interpreter of its own has it then.
READ_LATE = (
    *("BACKEND_KWARGS_", "PYTEST_", "RAY_ADDRESS", "TORCHINDUCTOR_CACHE_DIR", "CUDA_VISIBLE_DEVICES"),
    *("PYTHONPATH", "HOME", "TMPDIR", "COLUMNS", "NO_COLOR"),
)


class Fork(subprocess.Popen):
    """A `subprocess.Popen` of `python COMMAND`: `-c CODE`, `-m MODULE` or a file, with arguments."""

    def __init__(self, *command: Any, env: Mapping[str, str] | None = None, **settings: Any) -> None:
        variables = _handed_on(os.environ if env is None else env)
        differ = {name for name, _ in variables.items() ^ ENVIRONMENT.items()}
        self._forked = all(name.startswith(READ_LATE) for name in differ) and "preexec_fn" not in settings
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        super().__init__([sys.executable, *map(str, command)], env=variables, **pipes | settings)

    def completed(self) -> subprocess.CompletedProcess[str]:
        """Wait for its end; return how it ended and what it printed."""
        with self:
            printed = self.communicate(timeout=LIMIT_S)
            return subprocess.CompletedProcess(self.args, self.returncode, *printed)

    # What `subprocess` asks of the system: the same names and arguments from Python 3.11 to 3.14.
    def _execute_child(self, args: Any, *rest: Any) -> None:
        if not self._forked:
            super()._execute_child(args, *rest)
            return
        cwd, env, pipes, new_session = rest[4], rest[5], rest[9:15], rest[20]
        asked = {"command": args[1:], "cwd": str(cwd or Path.cwd()), "env": env, "new_session": new_session}
        streams = [own if own != -1 else at for at, own in enumerate((pipes[0], pipes[3], pipes[5]))]
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(_address())
            socket.send_fds(connection, [b"!"], streams)
            connection.sendall(json.dumps(asked).encode())
            connection.shutdown(socket.SHUT_WR)
            self._answers = connection.makefile("rb", buffering=0)
        self._close_pipe_fds(*pipes)
        self.pid = int(self._answers.readline())
        self._child_created = True

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if not self._forked:
            return super()._try_wait(wait_flags)
        if wait_flags and not select.select([self._answers], [], [], 0)[0]:
            return 0, 0
        with self._answers:
            return self.pid, int(self._answers.readline())

    def _internal_poll(self, *arguments: Any, **keywords: Any) -> int | None:
        if self._forked:
            keywords["_waitpid"] = lambda pid, flags: self._try_wait(flags)
        return super()._internal_poll(*arguments, **keywords)


def run(*command: Any, **settings: Any) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return Fork(*command, **settings).completed()


@functools.cache
def _address() -> str:
    """Start the process that is forked, and return the address at which it answers."""
    folder = tempfile.TemporaryDirectory()
    address = f"{folder.name}/socket"
    server = subprocess.Popen([sys.executable, __file__, address], env=ENVIRONMENT, stdout=subprocess.PIPE)
    assert server.stdout.readline() == b"ready\n"

    def end() -> None:
        server.terminate()
        server.communicate()
        folder.cleanup()

    atexit.register(end)
    return address


class _Server(socketserver.ForkingMixIn, socketserver.UnixStreamServer):
    """Answers each request in a fork, and ends with the process that started it."""

    parent = os.getppid()
    max_children = 1000

    def service_actions(self) -> None:
        super().service_actions()
        if os.getppid() != self.parent:
            os._exit(0)


class _Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        _, streams, _, _ = socket.recv_fds(self.connection, 1, 3)
        asked = json.load(self.rfile)
        child = os.fork()
        if not child:
            _become(asked, streams)
        for stream in streams:
            os.close(stream)
        self.wfile.write(b"%d\n" % child)
        self.wfile.write(b"%d\n" % os.waitpid(child, 0)[1])


def _become(asked: Mapping[str, Any], streams: list[int]) -> NoReturn:
    """Run a command as a new interpreter would, and end."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.closerange(3, 1024)
    if asked["new_session"]:
        os.setsid()
    os.environ.clear()
    os.environ.update(asked["env"])
    os.chdir(asked["cwd"])
    tempfile.tempdir = None
    importlib.invalidate_caches()
    ended = 1
    try:
        _run(*asked["command"])
        ended = 0
    except SystemExit as error:
        ended = error.code if isinstance(error.code, int) else int(error.code is not None)
        if ended and not isinstance(error.code, int):
            sys.stderr.write(f"{error.code}\n")
    except BaseException as error:  # noqa: BLE001 - as the interpreter prints what nobody caught
        traceback.print_exc()
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except OSError:
            ended = 120
        os._exit(ended & 0xFF)


def _run(kind: str, *words: str) -> None:
    first = {"-c": "", "-m": str(Path.cwd())}.get(kind, str(Path(kind).parent))
    sys.path[: 1 + len(_paths(ENVIRONMENT))] = [first, *_paths(os.environ)]
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    if kind == "-c":
        sys.argv = ["-c", *words[1:]]
        exec(compile(words[0], "<string>", "exec"), main.__dict__)
    elif kind == "-m":
        sys.argv = [*words]
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [kind, *words]
        runpy.run_path(kind, run_name="__main__")


def _paths(variables: Mapping[str, str]) -> list[str]:
    return [path for path in variables.get("PYTHONPATH", "").split(os.pathsep) if path]


def _import_all() -> None:
    """Import what a compile and the command line import, and compute what Inductor computes once for each process."""
    import torch
    from torch._inductor import codecache
    from torch._inductor.codegen.common import init_backend_registration
    from torch._inductor.cpu_vec_isa import pick_vec_isa
    from torch._inductor.fx_passes import joint_graph, post_grad
    from tqdm import tqdm

    import backend_kwargs.cli
    import backend_kwargs.entry_points
    import backend_kwargs.pipeline  # noqa: F401

    for late in ("sympy.combinatorics", "sympy.physics.units", "sympy.tensor.tensor", "torch.export._trace"):
        importlib.import_module(late)  # with the first kernel
    pick_vec_isa()  # compiles and loads a library for each set of vector instructions
    codecache.torch_key()  # reads all of torch's code
    codecache.CacheBase.get_system()  # reads all of Triton's code
    codecache.CppPythonBindingsCodeCache.load_pybinding([], 'extern "C" void kernel() {}')  # precompiles the header
    init_backend_registration()
    joint_graph.lazy_init(torch.device("cpu"))
    post_grad.lazy_init()
    if tqdm.monitor:  # a thread, which forks would miss
        tqdm.monitor.exit()
        tqdm.monitor = None


def _serve(address: str) -> None:
    _import_all()
    assert threading.active_count() == 1
    gc.collect()
    gc.freeze()  # else the first collection of each fork copies all pages
    with _Server(address, _Handler) as server:
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        server.serve_forever()


if __name__ == "__main__":
    _serve(sys.argv[1])

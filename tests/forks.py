"""Processes that start with torch imported, as forks of one that has done nothing else: an import takes seconds.

A test that looks at imports, or at variables that torch reads when it is imported, needs `subprocess`.
"""

import atexit
import functools
import json
import os
import runpy
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


class Fork:
    """A command that runs: `python COMMAND`, which is `-c CODE`, `-m MODULE` or a file, with arguments."""

    def __init__(self, *command: Any, cwd: Path | str | None = None, env: Mapping[str, str] | None = None) -> None:
        self._command = [str(word) for word in command]
        environment = dict(os.environ if env is None else env)
        environment.pop("PYTEST_CURRENT_TEST", None)
        asked = {"command": self._command, "cwd": str(cwd or Path.cwd()), "env": environment}
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(LIMIT_S)
            connection.connect(_address())
            connection.sendall(json.dumps(asked).encode())
            connection.shutdown(socket.SHUT_WR)
            self._answer = connection.makefile()

    def wait(self) -> subprocess.CompletedProcess[str]:
        """Return how it ended and what it printed."""
        with self._answer:
            return subprocess.CompletedProcess(self._command, **json.load(self._answer))


def run(
    *command: Any, cwd: Path | str | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return Fork(*command, cwd=cwd, env=env).wait()


@functools.cache
def _address() -> str:
    """Start the process that is forked, and return the address at which it answers."""
    folder = tempfile.TemporaryDirectory()
    address = f"{folder.name}/socket"
    server = subprocess.Popen([sys.executable, __file__, address], stdout=subprocess.PIPE)
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
        asked = json.load(self.rfile)
        pipes = [os.pipe() for _ in range(2)]
        child = os.fork()
        if not child:
            _become(asked, *(writing for _, writing in pipes))
        texts = ["", ""]

        def read(at: int) -> None:
            reading, writing = pipes[at]
            os.close(writing)
            with open(reading) as file:  # noqa: PTH123 - no path
                texts[at] = file.read()

        threads = [threading.Thread(target=read, args=(at,)) for at in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        returncode = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        answer = {"returncode": returncode, "stdout": texts[0], "stderr": texts[1]}
        self.wfile.write(json.dumps(answer).encode())


def _become(asked: Mapping[str, Any], out: int, err: int) -> NoReturn:
    """Run a command as a new interpreter would, and end."""
    for number, file in enumerate((os.open(os.devnull, os.O_RDONLY), out, err)):
        os.dup2(file, number)
    os.closerange(3, 1024)
    os.environ.clear()
    os.environ.update(asked["env"])
    os.chdir(asked["cwd"])
    ended = 1
    try:
        _run(*asked["command"])
        ended = 0
    except SystemExit as error:
        ended = error.code if isinstance(error.code, int) else int(error.code is not None)
        if ended and not isinstance(error.code, int):
            sys.stderr.write(f"{error.code}\n")
    except BaseException:  # noqa: BLE001 - as the interpreter prints what nobody caught
        traceback.print_exc()
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(ended)


def _run(kind: str, *words: str) -> None:
    sys.path[0] = {"-c": "", "-m": str(Path.cwd())}.get(kind, str(Path(kind).parent))
    sys.path[1:1] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
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


def _serve(address: str) -> None:
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    import backend_kwargs  # noqa: F401

    pick_vec_isa()  # compiles and loads a library for each set of vector instructions, once for all forks

    with _Server(address, _Handler) as server:
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        server.serve_forever()


if __name__ == "__main__":
    _serve(sys.argv[1])

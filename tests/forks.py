"""Processes that begin with torch imported, as forks of one that has done nothing else: an import takes seconds.

A command that looks at imports, or at variables that torch reads as it is imported, needs `subprocess.run`.
"""

import atexit
import functools
import json
import os
import runpy
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, NoReturn


def run(
    *command: Any, cwd: Path | str | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Return what `python COMMAND` prints and how it ends: `-c CODE`, `-m MODULE` or a file, with arguments."""
    server, words = _server(), [str(word) for word in command]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        written = [f"/proc/{os.getpid()}/fd/{file.fileno()}" for file in (out, err)]
        asked = {"command": words, "cwd": str(cwd or Path.cwd()), "env": dict(os.environ if env is None else env)}
        server.stdin.write(json.dumps(asked | {"written": written}) + "\n")
        server.stdin.flush()
        returncode = int(server.stdout.readline())
        return subprocess.CompletedProcess(words, returncode, *(_text(file) for file in (out, err)))


@functools.cache
def _server() -> Any:
    server = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(server.communicate)
    return server


def _text(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def _serve() -> None:
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    import backend_kwargs  # noqa: F401

    pick_vec_isa()  # compiles and loads a library for each set of vector instructions, once for all forks
    for line in sys.stdin:
        asked = json.loads(line)
        child = os.fork()
        if not child:
            _become(asked)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n")
        sys.stdout.flush()


def _become(asked: Mapping[str, Any]) -> NoReturn:
    """Run a command as a new interpreter would, and end."""
    for number, name in ((0, os.devnull), *enumerate(asked["written"], 1)):
        file = os.open(name, os.O_RDWR)
        os.dup2(file, number)
        os.close(file)
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


if __name__ == "__main__":
    _serve()

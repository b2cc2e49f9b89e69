"""The status of an exception: a word and a reason in one line."""

import subprocess
import traceback

import torch

from backend_kwargs.errors import NoCompilerError, shortened
from backend_kwargs.trial.accuracy import Status

LONGEST_REASON = 200
NO_COMPILER = "InvalidCxxCompiler"  # torch's error, also as the text of a LoweringException


def status_of(error: BaseException) -> tuple[Status, str]:
    """Return the status word of an exception and its reason in one line, looking through torch's own wrapping."""
    chain = chain_of(error)
    if lacking := without_compiler(error):
        return "unavailable", str(lacking)
    return _status(chain), shortened(_reason(chain[-1]), LONGEST_REASON)


def without_compiler(error: BaseException) -> NoCompilerError | None:
    """Return the error that no C++ compiler works here, if that is what Inductor's `error` means."""
    for each in reversed(chain_of(error)):
        if isinstance(each, NoCompilerError):
            return each
        if NO_COMPILER in f"{type(each).__name__}: {each}" or _of_a_start(each):
            return NoCompilerError(f"Inductor needs a C++ compiler: install g++, or set CXX to one ({_reason(each)}).")
    return None


def _of_a_start(error: BaseException) -> bool:
    """Return whether Inductor raised `error` when it started a compiler, or read what that printed."""
    if not isinstance(error, OSError | IndexError | subprocess.SubprocessError):
        return False
    if isinstance(error, subprocess.CalledProcessError) and b"error:" in (error.stdout or b""):
        return False  # a compiler that works says what is wrong with the code
    frames = traceback.extract_tb(error.__traceback__)
    return any(frame.filename.endswith("cpp_builder.py") or frame.name == "_precompile_header" for frame in frames)


def chain_of(error: BaseException) -> list[BaseException]:
    """Return the error and those inside it, the innermost last."""
    chain = [error]
    while (inner := getattr(chain[-1], "inner_exception", None) or chain[-1].__cause__) and inner not in chain:
        chain.append(inner)
    return chain


def _reason(error: BaseException) -> str:
    """Return an error as one line: its class and first line, or what a failed program printed."""
    if isinstance(error, subprocess.CalledProcessError) and (output := _said(error)):
        return output
    line = next((part.strip() for part in str(error).splitlines() if part.strip()), "")
    return f"{type(error).__name__}: {line}".rstrip(": ")


def _said(error: subprocess.CalledProcessError) -> str:
    """Return the error of a program, such as a compiler: its first line that mentions an error, else its last."""
    output = error.stderr or error.output or ""
    text = output.decode(errors="replace") if isinstance(output, bytes) else output
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line.lower()), lines[-1] if lines else "")


def _status(chain: list[BaseException]) -> Status:
    """Return the status word for an error and those inside it."""
    # The CPU's allocator raises a plain RuntimeError.
    full = (isinstance(e, RuntimeError) and "can't allocate memory" in str(e) for e in chain)
    if any(isinstance(e, MemoryError | torch.OutOfMemoryError) for e in chain) or any(full):
        return "oom"
    missing = any(isinstance(e, ImportError) or type(e).__name__ == "InvalidBackend" for e in chain)
    return "unavailable" if missing else "fail_to_run"

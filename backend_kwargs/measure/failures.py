"""The status of an exception: a word and a reason in one line."""

import subprocess

import torch

from backend_kwargs.measure.accuracy import Status

LONGEST_REASON = 200


def status_of(error: BaseException) -> tuple[Status, str]:
    """Return the status word of an exception and its reason in one line, looking through torch's own wrapping."""
    chain = [error]
    while (inner := getattr(chain[-1], "inner_exception", None) or chain[-1].__cause__) and inner not in chain:
        chain.append(inner)
    reason = _reason(chain[-1])
    return _status(chain), reason if len(reason) <= LONGEST_REASON else reason[: LONGEST_REASON - 3] + "..."


def _reason(error: BaseException) -> str:
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
    # The CPU's allocator raises a plain RuntimeError.
    full = (isinstance(e, RuntimeError) and "can't allocate memory" in str(e) for e in chain)
    if any(isinstance(e, MemoryError | torch.OutOfMemoryError) for e in chain) or any(full):
        return "oom"
    missing = any(isinstance(e, ImportError) or type(e).__name__ == "InvalidBackend" for e in chain)
    return "unavailable" if missing else "fail_to_run"

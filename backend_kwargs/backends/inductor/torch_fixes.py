"""Workarounds for faults of some torch releases, applied while Inductor compiles."""

from typing import Any

from backend_kwargs.errors import unknown

# torch's "max-autotune-no-cudagraphs" does not turn CUDA graphs off.
MODE_ADDITIONS = {"max-autotune-no-cudagraphs": {"triton.cudagraphs": False}}


def mode_options(mode: str) -> dict[str, Any]:
    """Return the options of `mode`: torch's table, corrected to do what the names say."""
    from backend_kwargs.torch_internals.compile_fx import list_mode_options

    modes = list_mode_options()
    if mode not in list(modes):  # a list, since `mode` may not be hashable
        raise unknown("mode", mode, modes, otherwise=f"Modes are {', '.join(modes)}.")
    return {**modes[mode], **MODE_ADDITIONS.get(mode, {})}

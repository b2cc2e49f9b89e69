"""What the threads of this process are at: where dynamo has them wait is one of its private names."""

import sys
import sysconfig
import threading
import traceback
from types import FrameType

# Where a thread waits for another one: for a lock, an item, data, or the end of dynamo's compile in this thread.
WAITS = frozenset(
    {
        *("threading", "queue", "selectors", "socket", "ssl", "subprocess", "concurrent.futures.thread"),
        *("multiprocessing.connection", "multiprocessing.pool", "torch._dynamo.convert_frame"),
    }
)
INSTALLED = ("site-packages", "dist-packages", sysconfig.get_path("stdlib"), "<frozen ")


def running_threads() -> list[str]:
    """Return the names of the other threads that may draw random numbers now.

    They run code that belongs neither to Python nor to an installed package, and wait for nobody. So a thread of a
    progress bar, a log or a pool does not count, nor one that waits until this thread ends a compile.
    """
    frames, own = sys._current_frames(), threading.get_ident()
    others = [(each.name, frames.get(each.ident or 0)) for each in threading.enumerate() if each.ident != own]
    return [name for name, frame in others if frame is not None and not _waits(frame) and _runs_users_code(frame)]


def _waits(frame: FrameType) -> bool:
    # `run` calls what it was given.
    return frame.f_globals.get("__name__") in WAITS and frame.f_code.co_name not in ("run", "is_set")


def _runs_users_code(frame: FrameType) -> bool:
    frames = (each for each, _ in traceback.walk_stack(frame))
    others = (each for each in frames if not str(each.f_globals.get("__name__")).startswith("backend_kwargs."))
    return any(not any(place in each.f_code.co_filename for place in INSTALLED) for each in others)

"""What a worker runs: `python -P -m backend_kwargs.auto.workers.child PARENT READ WRITE`, two pipes of its parent's.

It lowers graphs one after another, until the pipe is closed or its parent has ended.
"""

import ctypes
import os
import signal
import sys
import time
from typing import BinaryIO

from backend_kwargs.auto.workers.messages import Reply, Request, receive, send

DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


def end_with(parent: int) -> None:
    """Be killed when the thread of `parent` that started this process ends; Ctrl-C is for the parent alone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit  # it ended before the line above


def serve(requests: BinaryIO, replies: BinaryIO) -> None:
    """Answer requests until there are no more."""
    from backend_kwargs.torch_internals.lowering_alone import lower_alone

    lower_alone()
    send(replies, Reply().parts())  # torch is imported
    while parts := receive(requests):
        start = time.perf_counter()
        key, reason = lowered(Request.of(parts))
        send(replies, Reply(key, reason, time.perf_counter() - start).parts())


def lowered(request: Request) -> tuple[str, str]:
    """Lower the graph of a request and return its key in Inductor's cache, or else the reason why there is none."""
    from backend_kwargs.errors import error_text
    from backend_kwargs.rewrites.table import find_rewrite, resolved
    from backend_kwargs.torch_internals.lowered_graphs import received_graph, unpickled
    from backend_kwargs.torch_internals.lowering_alone import NeedsDeviceError, lower
    from backend_kwargs.torch_internals.lowering_state import entered

    try:
        for rewrite in map(find_rewrite, request.rewrites):
            resolved(rewrite.patterns or rewrite.traced or "")  # defines its operators
        state, changed = unpickled(request.state)
        with entered(state):
            graph = received_graph(request.graph)
            key = lower(graph.with_changed(changed), state["device"])
    except NeedsDeviceError:
        return "", "it is tuned while it is lowered, which the racing process does"
    except Exception as error:  # noqa: BLE001 - Inductor may raise anything: the racing process will see it too
        return "", error_text(error)
    return key or "", "" if key else "Inductor's cache did not take it"


if __name__ == "__main__":
    end_with(int(sys.argv[1]))
    os.nice(int(sys.argv[4]))
    with os.fdopen(int(sys.argv[2]), "rb") as requests, os.fdopen(int(sys.argv[3]), "wb") as replies:
        serve(requests, replies)

"""What is changed in this process for a while, and put back on every way out, a Ctrl-C at any line included."""

from collections.abc import Callable, Hashable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from threading import RLock
from typing import Any

# By mapping and key: the value from before, then one for each context that is entered, each in a list of its own.
_replaced: dict[tuple[int, Hashable], list[list[object]]] = {}
_lock = RLock()  # a context that the garbage collector ends may be in a thread that holds it already
_ABSENT = object()


@contextmanager
def undone() -> Iterator[ExitStack]:
    """Yield a stack whose callbacks run when the context is left, on any way.

    The stack is entered twice: where a Ctrl-C stops the inner exit, the outer one runs what remains.
    """
    with ExitStack() as stack, stack:
        yield stack


def restored_by(stack: ExitStack, undo: Callable[[], object]) -> None:
    """Register `undo` with `stack` before the change: it runs twice, so a Ctrl-C in its first run leaves nothing."""
    stack.callback(undo)
    stack.callback(undo)


@contextmanager
def replaced(owner: object, name: Hashable, value: object) -> Iterator[None]:
    """Replace an attribute of `owner`, or an item if it is a mapping, until the context is left. Not one of a class.

    One that was not there is removed. Threads may leave in any order: what was there before comes back with the last. A
    value replaced by itself comes back after others have changed it.
    """
    items: MutableMapping[Any, object] = owner if isinstance(owner, MutableMapping) else vars(owner)
    key, own = (id(items), name), [value]

    def put_back() -> None:
        with _lock:
            values = _replaced.get(key, [])
            values[:] = [each for each in values if each is not own]
            if values and values[-1][0] is _ABSENT:
                items.pop(name, None)
            elif values:
                items[name] = values[-1][0]
            if len(values) < 2:
                _replaced.pop(key, None)

    with undone() as stack:
        restored_by(stack, put_back)
        with _lock:
            _replaced.setdefault(key, [[items.get(name, _ABSENT)]]).append(own)
            items[name] = value
        yield

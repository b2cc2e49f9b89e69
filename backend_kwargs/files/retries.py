"""What is done again, since its error may pass: on a network disk, in a store, on a cluster that has just started."""

import time
from collections.abc import Callable, Iterable
from typing import TypeVar

Done = TypeVar("Done")


def retried(do: Callable[[], Done], passes: Callable[[Exception], bool], pauses_s: Iterable[float]) -> Done:
    """Return what `do` returns, done again after each pause as long as its error is one that `passes`."""
    for pause_s in pauses_s:
        try:
            return do()
        except Exception as error:
            if not passes(error):
                raise
        time.sleep(pause_s)
    return do()

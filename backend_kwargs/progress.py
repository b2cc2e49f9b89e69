"""How far something long is: one line on a terminal, with what is done now and the seconds left."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from backend_kwargs.errors import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

_shown: "list[Progress]" = []  # a terminal has room for one; what runs inside, such as a race of `compare`, adds a line


@contextmanager
def progress(what: str, first: str, console: "Console | None" = None) -> Iterator[Callable[[str, float], None]]:
    """Give what to call with what comes next and the fraction done; `first` is shown until then.

    Nothing is shown if standard error, or `console`, is no terminal.
    """
    if not _shown and not (console.is_terminal if console else getattr(sys.stderr, "isatty", bool)()):
        yield lambda text, fraction: None
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with ExitStack() as stack:
        if not _shown:
            _shown.append(Progress(*columns, console=console or Console(stderr=True), transient=True))
            stack.callback(_shown.clear)
            stack.enter_context(_shown[0])
        bar, done = _shown[0], 0.0
        task = bar.add_task(f"{what}: {first}", total=1.0)
        stack.callback(bar.remove_task, task)

        def tell(text: str, fraction: float) -> None:
            nonlocal done
            done = max(done, fraction)  # what is repeated does not go back
            bar.update(task, description=escape(printable(f"{what}: {text}")), completed=done)

        yield tell

"""Files that commands write: a page, its data or a summary, by the ending of the name."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from backend_kwargs.cli.console import console, say
from backend_kwargs.errors import BackendKwargsError, wrong_value
from backend_kwargs.files.atomic_write import check_writable, write_whole
from backend_kwargs.page import Document, changes, read_document, to_html, to_json
from backend_kwargs.page.markdown import to_markdown


def output_option(written: str) -> Any:
    """Return the flag for the files that a command writes, with what their endings mean."""
    return typer.Option("-o", "--output", metavar="FILE", help=written)


Output = Annotated[
    list[Path] | None,
    output_option("Write a page (.html), its data (.json) or a summary for a pull request (.md); repeatable."),
]
PAGES = (".html", ".json", ".md")


@dataclass(frozen=True, slots=True)
class Outputs:
    """The files that a command writes, and the older report that they are compared with."""

    files: Sequence[Path] = ()
    old: Document | None = None

    @classmethod
    def checked(
        cls, files: Sequence[Path] | None, also: Collection[str] = (), *, against: Path | None = None
    ) -> "Outputs":
        """Return the outputs, which may end in `also` too, with the older report read; raise now, not after minutes."""
        made = cls(files or ())
        endings = (*also, *PAGES)
        for path in made.files:
            if path.suffix.lower() not in endings:
                listed = f"{', '.join(endings[:-1])} or {endings[-1]}"
                raise wrong_value("Option '--output'", f"a file that ends in {listed}", str(path))
            check_writable(path)
        if against and not made:
            raise BackendKwargsError("--against needs a file to show the changes in: -o OUT.html, say.")
        return cls(made.files, read_document(against) if against else None)

    def __bool__(self) -> bool:
        return bool(self.ending(*PAGES))

    def ending(self, *suffixes: str) -> list[Path]:
        """Return the files whose names end so."""
        return [path for path in self.files if path.suffix.lower() in suffixes]

    def write(self, document: Document, data: str | None = None) -> None:
        """Write the document to each file, and say where the page is; `data` is what .json has in place of its own."""
        import msgspec

        if self.old:
            document = msgspec.structs.replace(document, changes=changes(self.old, document))
        writers: dict[str, Callable[[], str | bytes]] = {
            ".html": lambda: to_html(document),
            ".json": lambda: data or to_json(document),
            ".md": lambda: to_markdown(document),
        }
        for path in self.ending(*PAGES):
            write_whole(path, writers[path.suffix.lower()]())
            if path in self.ending(".html"):
                say(f"The page is {path}.", out=console(stderr=True))

"""`backend-kwargs page`, and the options of other commands that write a page or its data."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from backend_kwargs.cli.console import console, print_json, say
from backend_kwargs.errors import BackendKwargsError
from backend_kwargs.files.atomic_write import check_writable, write_whole
from backend_kwargs.page import Document, changes, read_document, to_html, to_json
from backend_kwargs.page.markdown import to_markdown

Html = Annotated[
    Path | None, typer.Option("--html", metavar="OUT.html", help="Write a page to look at, and to send to others.")
]
Json = Annotated[Path | None, typer.Option("--json", metavar="OUT.json", help="Write the data of the page alone.")]
Markdown = Annotated[
    Path | None, typer.Option("--markdown", metavar="OUT.md", help="Write a summary for a pull request.")
]
WithCode = Annotated[bool, typer.Option("--with-code", help="Put the generated code into the page and its data.")]
Against = Annotated[
    Path | None,
    typer.Option("--against", metavar="OLD.html|OLD.json", help="Show what differs from an older one."),
]


@dataclass(frozen=True, slots=True)
class Outputs:
    """The files that a command writes of a document, and the older one that it is compared with."""

    html: Path | None = None
    json: Path | None = None
    markdown: Path | None = None
    against: Path | None = None
    with_code: bool = False
    old: Document | None = None

    @classmethod
    def checked(
        cls,
        html: Path | None,
        json: Path | None = None,
        markdown: Path | None = None,
        *,
        against: Path | None = None,
        with_code: bool = False,
    ) -> "Outputs":
        """Return the outputs, with the older document read; raise now, not after minutes of work."""
        wanted = [path for path in (html, json, markdown) if path]
        for path in wanted:
            check_writable(path)
        if against and not wanted:
            raise BackendKwargsError("--against needs a file to show the changes in: --html OUT.html, say.")
        if with_code and not (html or json):
            raise BackendKwargsError("--with-code needs a file to put the code in: --html OUT.html, say.")
        return cls(html, json, markdown, against, with_code, read_document(against) if against else None)

    def __bool__(self) -> bool:
        return bool(self.html or self.json or self.markdown)

    def write(self, document: Document) -> None:
        """Write the document to each file, and say where the page is."""
        import msgspec

        if self.old:
            document = msgspec.structs.replace(document, changes=changes(self.old, document))
        if self.html:
            write_whole(self.html, to_html(document, with_code=self.with_code))
            say(f"The page is {self.html}.", out=console(stderr=True))
        if self.json:
            write_whole(self.json, to_json(document, with_code=self.with_code))
        if self.markdown:
            write_whole(self.markdown, to_markdown(document))


def print_document(document: Document) -> None:
    """Print a document as JSON, as a file that `page` reads."""
    import json

    print_json(json.loads(to_json(document)))


def page(
    file: Annotated[Path, typer.Argument(metavar="FILE.json|FILE.html", help="What --json or --html wrote.")],
    html: Html = None,
    json: Json = None,
    markdown: Markdown = None,
    against: Against = None,
    with_code: WithCode = False,
) -> None:
    """Make a page, its data or a summary again, from the data of an earlier page."""
    outputs = Outputs.checked(html, json, markdown, against=against, with_code=with_code)
    if not outputs:
        raise BackendKwargsError("Name what to write: --html OUT.html, --json OUT.json or --markdown OUT.md.")
    outputs.write(read_document(file))

"""`backend-kwargs list`: every backend and template, and whether each can work here."""

from collections.abc import Iterator

from backend_kwargs.backend import find_backend
from backend_kwargs.cli.arguments import AsJson
from backend_kwargs.cli.console import print_json, print_table
from backend_kwargs.errors import BackendKwargsError
from backend_kwargs.registry import PLAIN, list_backends, list_templates
from backend_kwargs.requirements import Limit


def show(json: AsJson = False) -> None:
    """List backends and templates, each with one line, and whether each can work here."""
    backends, templates = list(_backends()), list(_templates())
    if json:
        return print_json({"backends": backends, "templates": templates})
    for title, rows in (("backends", backends), (f"templates, as {PLAIN}:NAME", templates)):
        print_table(("name", "works here", "summary"), [tuple(row.values()) for row in rows], title)


def _backends() -> Iterator[dict[str, str]]:
    for name in list_backends():
        if not name.startswith(f"{PLAIN}:"):
            yield _row(name, name)


def _templates() -> Iterator[dict[str, str]]:
    for name in list_templates():
        yield _row(name, f"{PLAIN}:{name}")


def _row(name: str, spec: str) -> dict[str, str]:
    limits: list[Limit] = []
    try:
        backend = find_backend(spec)
        backend.verify(tell=limits.append)
    except BackendKwargsError as error:  # one broken plug-in must not hide the others
        return {"name": name, "works here": f"no: {error}", "summary": ""}
    return {"name": name, "works here": "; ".join(map(_word, limits)) or "yes", "summary": backend.summary}


def _word(limit: Limit) -> str:
    return f"{'partly' if limit.otherwise else 'no'}: {limit.reason}"

"""`backend-kwargs list`: every backend and template, and whether each can work here."""

import re

from backend_kwargs.backend import OURS
from backend_kwargs.cli.arguments import AsJson, judged
from backend_kwargs.cli.console import print_json, print_table
from backend_kwargs.explain import Verdict
from backend_kwargs.options.requirements import DYNAMO_BACKENDS
from backend_kwargs.registry import PLAIN, list_backends, list_templates

FOR_TESTS = re.compile("_TESTING_ONLY$|minifier")  # backends with which torch tests and debugs itself


def show(json: AsJson = False) -> None:
    """List backends and templates, each with one line, and whether each can work here."""
    hidden = [f"dynamo:{name}" for name in DYNAMO_BACKENDS if name in OURS]
    names = [name for name in [*hidden, *list_backends()] if not FOR_TESTS.search(name)]
    backends = [_row(name, name) for name in names if not name.startswith(f"{PLAIN}:")]
    templates = [_row(name, f"{PLAIN}:{name}") for name in list_templates()]
    if json:
        return print_json({"backends": backends, "templates": templates})
    for title, rows in (("backends", backends), (f"templates, as {PLAIN}:NAME", templates)):
        cells = [(row["name"], str(Verdict(row["works"], row["why"])), row["summary"]) for row in rows]
        print_table(("name", "works here", "summary"), cells, title)


def _row(name: str, spec: str) -> dict[str, str]:
    works, summary = judged(spec)
    return {"name": name, "works": works.word, "why": works.reason, "summary": summary}

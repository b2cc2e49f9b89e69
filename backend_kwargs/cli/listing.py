"""`backend-kwargs list`: every backend and template, and whether each can work here.

And `backend-kwargs doctor`: what this machine has, and which templates, backends and precisions work with it.
"""

import re
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import entry_points
from importlib.util import find_spec

from backend_kwargs.backend import OURS
from backend_kwargs.backends.others import COMPILERS, FORMER
from backend_kwargs.cli.console import AsJson, judged, judged_by_name, options_alone, print_json, print_table, say
from backend_kwargs.explain import Verdict, precision_verdict
from backend_kwargs.options import join_candidate, limits
from backend_kwargs.options.machine import DYNAMO_BACKENDS, machine
from backend_kwargs.options.precisions import PRECISIONS
from backend_kwargs.registry import PLAIN, list_templates
from backend_kwargs.torch_internals.backend_sources import own_backends

FOR_TESTS = re.compile("_TESTING_ONLY$|minifier")  # backends with which torch tests and debugs itself


@options_alone()
def show(json: AsJson = False) -> None:
    """List backends and templates, each with one line, and whether each can work here."""
    backends = [*(_row(name, name) for name in OURS if f"tmpl-{name}" not in OURS), *_others()]
    backends.sort(key=lambda row: row["name"])
    templates = [_row(name, f"{PLAIN}:{name}") for name in list_templates()]
    if json:
        return print_json({"backends": backends, "templates": templates})
    for title, rows in (("backends", backends), (f"templates, as {PLAIN}:NAME", templates)):
        cells = [(row["name"], str(Verdict(row["works"], row["why"])), row["summary"]) for row in rows]
        print_table(("name", "works here", "summary"), cells, title)


def _others() -> Iterator[dict[str, str]]:
    """Yield a row for each backend of dynamo's and of other packages, none of which is loaded."""
    docs = {name: doc or f"{name}, as dynamo has it" for name, doc in own_backends().items()}
    plugins = {each.name: each for each in entry_points(group="torch_dynamo_backends")}
    for name in {*docs, *plugins} - {f"tmpl-{name}" for name in FORMER}:
        ours = name in OURS or name.startswith(f"{PLAIN}:")
        if FOR_TESTS.search(name) or (ours and name not in DYNAMO_BACKENDS):
            continue
        verdict = judged_by_name(name)
        if (plugin := plugins.get(name)) and not ours:
            docs[name] = f"{plugin.value}, not loaded"
            if verdict.word == "works" and find_spec(plugin.module.partition(".")[0]) is None:
                verdict = Verdict("cannot", f"{plugin.module} is not importable")
        yield _as_row(f"dynamo:{name}" if ours else name, verdict, docs.get(name, ""))


def _row(name: str, spec: str) -> dict[str, str]:
    works, summary = judged(spec)
    short = name.removeprefix("tmpl-")
    return _as_row(name, works, f"{summary}; {short} is the same" if short != name else summary)


def _as_row(name: str, works: Verdict, summary: str) -> dict[str, str]:
    return {"name": name, "works": works.word, "why": works.reason, "summary": summary}


@options_alone()
def doctor(json: AsJson = False) -> None:
    """Show what this machine has, what works on it, how to make the rest work, and whether it is ready to compile."""
    facts = machine().facts() | {each.library: each(each.registered).installed() for each in COMPILERS}
    templates = {name: judged(f"{PLAIN}:{name}")[0] for name in list_templates()}
    backends = {
        join_candidate(each.registered, options): judged(each.registered, **options)[0]
        for each in COMPILERS
        for options in each.variants
    }
    backends |= {f"dynamo:{name}": judged_by_name(name) for name in DYNAMO_BACKENDS}
    precisions = {name: precision_verdict(name, machine()) for name in PRECISIONS}
    lacking = limits("torch.compile", ("triton",) if machine().gpu else ("cxx",))
    ready = Verdict("no", lacking[0].reason, lacking[0].remedy) if lacking else Verdict("yes")
    if json:
        judged_here = {"templates": templates, "backends": backends, "precisions": precisions}
        data = {kind: {name: asdict(v) for name, v in verdicts.items()} for kind, verdicts in judged_here.items()}
        return print_json({"ready": asdict(ready), "machine": facts, **data})
    print_table(("part", "found"), facts.items(), "machine")
    for title, verdicts in (
        (f"templates, as {PLAIN}:NAME", templates),
        ("other backends", backends),
        ("precisions, as precision=NAME", precisions),
    ):
        rows = [(name, v.word, v.reason, v.remedy) for name, v in verdicts.items()]
        print_table(("name", "verdict", "because", "to change it"), rows, title)
    say(f"ready: {ready}" + (f"; {ready.remedy}" if ready.remedy else ""))

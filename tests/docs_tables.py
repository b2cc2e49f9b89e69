"""The generated tables of the docs: `python -m tests.docs_tables` checks them, and `--write` rewrites them."""

import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import get_args

from backend_kwargs import stores
from backend_kwargs.auto import settings as auto
from backend_kwargs.auto.candidates import STEPS, Effort
from backend_kwargs.bundles.config import FIELDS
from backend_kwargs.options.option import Option, describe
from backend_kwargs.options.templates import BUILT_IN, Template
from backend_kwargs.rewrites import table as rewrites

ROOT = Path(__file__).parent.parent


def templates_table() -> str:
    """Return the built-in templates as a Markdown table."""
    rows = [
        f"| `{name}` | {t.summary} | {_options(t)} | {t.costs} | {', '.join(t.needs)} |" for name, t in BUILT_IN.items()
    ]
    return "\n".join(["| template | what it does | sets | costs | needs |", "|---|---|---|---|---|", *rows])


def _options(template: Template) -> str:
    options = {**template.options, **template.where_known}
    return "<br>".join(f"`{name}={value!r}`" for name, value in options.items())


def rewrites_table() -> str:
    """Return the built-in rewrites as a Markdown table."""
    rows = [f"| `{name}` | {r.summary} | {_in_a_race(r)} |" for name, r in rewrites.BUILT_IN.items()]
    return "\n".join(["| rewrite | what it does | in a race of `auto` |", "|---|---|---|", *rows])


class Anything:
    """Statistics of a graph that contains every operator."""

    def __init__(self, *, gpu: bool, training: bool) -> None:
        self.gpu, self.training, self.names = gpu, training, self

    def __contains__(self, name: str) -> bool:
        return True

    def __getattr__(self, name: str) -> int:
        return 2


def _in_a_race(rewrite: rewrites.Rewrite) -> str:
    if not rewrite.same_function:
        return "only if named"
    places = product((False, True), repeat=2)
    fitting = {(gpu, trains) for gpu, trains in places if rewrite.fitting(Anything(gpu=gpu, training=trains))}
    on, modes = ({each[at] for each in fitting} for at in (0, 1))
    where = ["on a GPU" if on == {True} else "on a CPU" if on == {False} else ""]
    where += ["in inference" if modes == {False} else ""]
    where += [f'under `objective="{rewrite.objective}"`' if rewrite.objective != "latency" else ""]
    return ", ".join(filter(None, where)) or "yes"


def options_table(options: Mapping[str, Option]) -> str:
    """Return `options` as a Markdown table."""
    rows = [
        f"| `{name}` | {describe(option.type).replace('|', 'or')} | `{option.default!r}` | {option.doc} |"
        for name, option in options.items()
    ]
    return "\n".join(["| option | type | default | meaning |", "|---|---|---|---|", *rows])


def steps_list() -> str:
    """Return the names of `auto`'s own steps, by the `effort` that they need."""
    quick, full = (
        dict.fromkeys(f"`{step.name}`" for step in STEPS if step.effort == each) for each in get_args(Effort)
    )
    return f'{", ".join(quick)}; with `effort="full"` also {", ".join(full)}.'


def reports_table() -> str:
    """Return the programs that plain torch.compile gets wrong as a Markdown table."""
    sys.path.insert(0, str(ROOT))  # before tests/, which has a folder of this name too
    from benchmarks.studies.public_reports import as_markdown

    return as_markdown()


def speed_table() -> str:
    """Return README's table of one run's speeds."""
    sys.path.insert(0, str(ROOT))  # as above
    from benchmarks.analysis.readme import table

    return table()


TABLES: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"speed": speed_table},
    "docs/rewrites.md": {"rewrites": rewrites_table},
    "docs/templates.md": {"templates": templates_table},
    "docs/auto-reference.md": {"auto": partial(options_table, auto.OPTIONS), "steps": steps_list},
    "docs/stores.md": {"store": partial(options_table, stores.FIELDS)},
    "docs/public-reports.md": {"public-reports": reports_table},
    "docs/bundle.md": {"compile-config": partial(options_table, FIELDS)},
}


def filled(file: str) -> str:
    """Return the text of `file` with its generated parts updated."""
    text = (ROOT / file).read_text(encoding="utf-8")
    for name, table in TABLES[file].items():
        part = rf"(<!-- generated: {name} -->\n).*?(<!-- end -->)"
        text = re.sub(part, lambda match, table=table: f"{match[1]}{table()}\n{match[2]}", text, flags=re.DOTALL)
    return text


def main() -> None:
    """Write the tables, or exit with the name of the file that is out of date."""
    for file in TABLES:
        if "--write" in sys.argv:
            (ROOT / file).write_text(filled(file), encoding="utf-8")
        elif filled(file) != (ROOT / file).read_text(encoding="utf-8"):
            sys.exit(f"{file} is out of date: python -m tests.docs_tables --write")


if __name__ == "__main__":
    main()

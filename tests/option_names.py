"""Inductor's options as types for editors: `python -m tests.option_names` checks them, `--write` rewrites them.

The names are a union over releases of torch: those that the file has already, those of the catalogue and of the torch
installed here, and those in other releases' `torch/_inductor/config.py`, given as arguments. Types are those of the
torch installed here.
"""

import keyword
import re
import sys
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Literal, Union, get_args, get_origin

from backend_kwargs.options import inductor_names
from backend_kwargs.options.catalogue import ADDED, inductor_options, read_notes
from backend_kwargs.options.option import INDUCTOR_DATA
from backend_kwargs.pipeline import OWN

FILE = Path(inductor_names.__file__).with_suffix(".pyi")
HEAD = '''"""The names of Inductor's options on torch 2.11 to 2.15, and of this package's, for editors. Generated.

`python -m tests.option_names --write` rewrites it. Values are checked when a backend is made, by the installed torch.
"""

from typing import Literal, TypedDict
'''
KEYWORDS = """
class InductorKeywords(TypedDict, total=False):
"""
IN_FILE = re.compile(r'^        "(.+?)": (.+),$', re.MULTILINE)
LONGEST = 60  # of a list of words
ALIKE = {bool: "bool", int: "int", float: "float", str: "str", NoneType: "None", None: "None"}
READ_BY_MAKE_BACKEND = {"template": "str", "mode": "str | None", "inductor_config": "object"}


def written(type_: object) -> str:
    """Return a type as code: of words and numbers as it is, `object` for any other."""
    origin, args = get_origin(type_), get_args(type_)
    if origin is Annotated:
        return written(args[0])
    if origin is Literal:
        words = f"Literal[{', '.join(map(repr, args))}]".replace("'", '"')
        return words if len(words) <= LONGEST else "str"
    if origin in (Union, UnionType):
        parts = list(map(written, args))
        return "object" if "object" in parts else " | ".join(dict.fromkeys(parts))
    return ALIKE.get(type_, "object") if isinstance(type_, type | None) else "object"


def types(others: Iterable[str] = ()) -> dict[str, str]:
    """Return the type of each option that is not private as code; `others` are names of other releases."""
    here = {name: written(option.type) for name, option in {**inductor_options(), **OWN}.items()}
    # A type that another release gave stays, so that the file is the same under each torch.
    before = dict(IN_FILE.findall(FILE.read_text(encoding="utf-8")))
    unknown = dict.fromkeys((*INDUCTOR_DATA, *chain(*ADDED.values()), *others), "object")
    known = {
        name: type_
        for name, type_ in (unknown | here | before).items()
        if "_" not in (name[0], name.partition(".")[0][0])
    }
    return dict(sorted((READ_BY_MAKE_BACKEND | known).items()))


def text(known: Mapping[str, str]) -> str:
    """Return the content of the file."""
    plain = {name: type_ for name, type_ in known.items() if name.isidentifier() and not keyword.iskeyword(name)}
    rows = "".join(f'        "{option}": {type_},\n' for option, type_ in known.items())
    options = f'\nInductorOptions = TypedDict(\n    "InductorOptions",\n    {{\n{rows}    }},\n    total=False,\n)\n'
    return HEAD + options + KEYWORDS + "".join(f"    {name}: {type_}\n" for name, type_ in plain.items())


def main() -> None:
    """Write the file, or exit with its name if it lacks an option of the torch installed here."""
    sources = [path for path in sys.argv[1:] if path != "--write"]
    others = {name for path in sources for name in read_notes(Path(path).read_text(encoding="utf-8"))}
    if "--write" in sys.argv:
        FILE.write_text(text(types(others)), encoding="utf-8")
    elif FILE.read_text(encoding="utf-8") != text(types(others)):
        sys.exit(f"{FILE.name} is out of date: python -m tests.option_names --write")


if __name__ == "__main__":
    main()

"""The syntax of a backend, `"backend[:template[+template]]"`, and of lists of backends with options."""

import re
from collections.abc import Mapping, Sequence
from string import whitespace

from backend_kwargs.errors import BackendKwargsError, shown, wrong_value

NAME = re.compile(r"[A-Za-z_][\w.-]*")
LONGEST = 10_000  # characters of a spec
# Matched from one comma to the next and without ambiguity: its time is linear in the length of any text.
CANDIDATE = re.compile(r"([^\[\],]+)(?:\[((?:[^\[\]]|\[[^\[\]]*\])+)\]\s*)?(?:,|\Z)")


def join_spec(backend: str, templates: Sequence[str]) -> str:
    """Return the spec of a backend and its templates, of which later ones take precedence."""
    return f"{backend}:{'+'.join(templates)}" if templates else backend


def split_templates(text: str) -> tuple[str, ...]:
    """Split `"a+b"` into names; raise if one is empty or not a valid name."""
    check_length("Template names", text)
    names = tuple(text.split("+")) if isinstance(text, str) else (text,)
    for name in names:
        check_name("A template", name)
    return names


def check_name(what: str, name: object) -> None:
    """Raise if `name` cannot be part of a spec."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise wrong_value(f"{what}'s name", "letters, digits and '_', '-', '.', a letter first", name)


def check_length(what: str, text: object) -> None:
    """Raise if `text` is longer than any spec, which may take hours to look up."""
    if isinstance(text, str) and len(text) > LONGEST:
        raise wrong_value(what, f"at most {LONGEST} characters long", text)


def split_candidates(text: str) -> list[tuple[str, dict[str, str]]]:
    """Split `"spec[name=value,...],spec"` at the commas outside brackets into specs and their options as text."""
    candidates: list[tuple[str, dict[str, str]]] = []
    rest, at = text.rstrip(f"{whitespace},"), 0
    while at < len(rest) or not candidates:
        match = CANDIDATE.match(rest, at)
        if not match or not (spec := match[1].strip()):
            raise BackendKwargsError(f"Cannot read backends {shown(text)}; write them 'a,b:template,c[option=value]'.")
        # A part after a comma without "name=" belongs to the value before it: "backends=ATEN,TRITON".
        assignments = re.split(r",\s*(?=[\w.\-]+\s*=)", match[2]) if match[2] else []
        candidates.append((spec, dict(map(split_assignment, assignments))))
        at = match.end()
    return candidates


def join_candidate(spec: str, options: Mapping[str, str]) -> str:
    """Write one of the candidates that `split_candidates` reads."""
    return f"{spec}[{','.join(f'{name}={value}' for name, value in options.items())}]" if options else spec


def split_outside(text: str) -> list[str]:
    """Split "a,b[x=1,y=2]" at the commas outside brackets."""
    return [part.strip() for part in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", text) if part.strip()]


def split_assignment(text: str) -> tuple[str, str]:
    """Split `"name=value"`."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise BackendKwargsError(f"Cannot read option {shown(text)}; write it 'name=value'.")
    return name.strip(), value.strip()

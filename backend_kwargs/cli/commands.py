"""Commands: `list`, `doctor`, `explain`, `pin`, and the arguments of `tune`, `audit` and `compare`.

What the last three do is in `measured`, which loads torch, for which no --help should wait.
"""

import math
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from fnmatch import fnmatchcase
from importlib.metadata import entry_points
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Annotated, Literal

import typer

from backend_kwargs.backend import OURS, Backend, find_backend
from backend_kwargs.backends.others import COMPILERS, FORMER
from backend_kwargs.cli.console import (
    As,
    AsJson,
    Assignments,
    MaybeModel,
    Model,
    Output,
    Outputs,
    assigned,
    backend_from_text,
    output_option,
    print_config,
    print_json,
    print_table,
    say,
)
from backend_kwargs.cli.decisions import Where, store_of
from backend_kwargs.errors import BackendKwargsError, BrokenPluginError, warn_once, wrong_value
from backend_kwargs.explain import COLUMNS, Verdict, explain, precision_verdict, verdict
from backend_kwargs.facts.decision import EAGER
from backend_kwargs.fleet.board import AUTO, BUDGET_S
from backend_kwargs.harness.models import folder_of_model, importable, model_of, spec_of, with_cause
from backend_kwargs.options import CannotWorkError, join_candidate, limits
from backend_kwargs.options.catalogue import documented, inductor_options, usual_options
from backend_kwargs.options.machine import DYNAMO_BACKENDS, machine
from backend_kwargs.options.option import Option, describe, split_candidates
from backend_kwargs.options.precisions import PRECISIONS
from backend_kwargs.page import read_document
from backend_kwargs.pinning import pin
from backend_kwargs.registry import PLAIN, list_templates
from backend_kwargs.torch_internals.backend_sources import own_backends

FOR_TESTS = re.compile("_TESTING_ONLY$|minifier")  # backends with which torch tests and debugs itself


@contextmanager
def options_alone() -> Iterator[None]:
    """Let a command that compiles nothing read Inductor's options without dynamo: three seconds sooner."""
    from backend_kwargs.torch_internals.inductor_config import config_alone

    with config_alone() as alone:
        inductor_options()
    try:
        yield
    finally:
        if alone:  # their types name classes that are loaded again
            inductor_options.cache_clear()
            usual_options.cache_clear()


def judged_by_name(name: str) -> Verdict:
    """Return the verdict on a backend of dynamo's by what is known of its name: it is not loaded."""
    lacking = limits(name, DYNAMO_BACKENDS.get(name, ()))
    return Verdict("cannot", lacking[0].reason, lacking[0].remedy) if lacking else Verdict("works")


def judged(spec: str, **options: object) -> tuple[Verdict, str]:
    """Return the verdict on `spec` on this machine, and its summary; a broken plug-in must not hide the others."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a package's own, when its backend is imported
            backend = find_backend(spec).bind("judged", options)
        return verdict(backend), backend.summary
    except CannotWorkError as error:
        (limit,) = error.args
        return Verdict("cannot", limit.reason, limit.remedy), ""
    except BackendKwargsError as error:
        if isinstance(error, BrokenPluginError):
            warn_once(error)
        return Verdict("cannot", str(error)), ""


@options_alone()
def list_backends(json: AsJson = False) -> None:
    """List backends and templates, each with one line, and whether each can work here."""
    backends = [*(_row(name, name) for name in OURS if f"tmpl-{name}" not in OURS), *_others()]
    backends.sort(key=lambda row: row[0])
    templates = [_row(name, f"{PLAIN}:{name}") for name in list_templates()]
    if json:
        listed = {"backends": backends, "templates": templates}
        keys = ("name", "works", "why", "summary")
        data = {what: [(name, v.word, v.reason, about) for name, v, about in rows] for what, rows in listed.items()}
        return print_json({what: [dict(zip(keys, row, strict=True)) for row in rows] for what, rows in data.items()})
    for title, rows in (("backends", backends), (f"templates, as {PLAIN}:NAME", templates)):
        print_table(("name", "works here", "summary"), rows, title)


def _others() -> Iterator[tuple[str, Verdict, str]]:
    """Yield a row for each backend of dynamo's and of other packages, none of which is loaded."""
    docs = {name: doc or f"{name}, as dynamo has it" for name, doc in own_backends().items()}
    plugins = {each.name: each for each in entry_points(group="torch_dynamo_backends")}
    for name in {*docs, *plugins} - {f"tmpl-{name}" for name in FORMER}:
        ours = name in OURS or name.startswith(f"{PLAIN}:")
        if FOR_TESTS.search(name) or (ours and name not in DYNAMO_BACKENDS):
            continue
        works = judged_by_name(name)
        if (plugin := plugins.get(name)) and not ours:
            docs[name] = f"{plugin.value}, not loaded"
            if works.word == "works" and find_spec(plugin.module.partition(".")[0]) is None:
                works = Verdict("cannot", f"{plugin.module} is not importable")
        yield f"dynamo:{name}" if ours else name, works, docs.get(name, "")


def _row(name: str, spec: str) -> tuple[str, Verdict, str]:
    works, summary = judged(spec)
    short = name.removeprefix("tmpl-")
    return name, works, f"{summary}; {short} is the same" if short != name else summary


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
    kinds = {
        "templates": (f"templates, as {PLAIN}:NAME", templates),
        "backends": ("other backends", backends),
        "precisions": ("precisions, as precision=NAME", precisions),
    }
    if json:
        data = {kind: {name: asdict(v) for name, v in verdicts.items()} for kind, (_, verdicts) in kinds.items()}
        return print_json({"ready": asdict(ready), "machine": facts, **data})
    print_table(("part", "found"), facts.items(), "machine")
    for title, verdicts in kinds.values():
        rows = [(name, v.word, v.reason, v.remedy) for name, v in verdicts.items()]
        print_table(("name", "verdict", "because", "to change it"), rows, title)
    say(f"ready: {ready}" + (f"; {ready.remedy}" if ready.remedy else ""))


Pattern = Annotated[
    str | None,
    typer.Argument(help="Show the options that SPEC takes instead: a glob of names, or a word in a name or doc."),
]


def explain_options(
    spec: Annotated[str, typer.Argument(help="Such as tmpl-inductor:max_autotune+freezing.")],
    pattern: Pattern = None,
    option: Assignments = None,
    json: AsJson = False,
    as_: As = None,
) -> None:
    """Show each option of a backend: its value, the layer that set it, its default, whether it has an effect here.

    With PATTERN, such as '*tma*' or '*', search the options that it takes: type, default, doc.
    """
    if pattern is not None:
        return _search(spec, find_backend(spec_of(spec)), pattern, json)
    backend = backend_from_text(spec, assigned(option))
    if as_:
        return print_config(backend.inductor_config(ahead_of_time=as_ == "aoti-config"))
    explanation = explain(backend)
    if json:
        return print_json(explanation.to_dict())
    say(explanation.backend, *([] if explanation.effects else ["No option is set."]))
    print_table(COLUMNS, explanation.rows())
    if explanation.notes:
        say(*explanation.notes)


def _search(spec: str, backend: Backend, pattern: str, json: bool) -> None:
    known, unchecked = list(backend.known_options().values()), backend.unchecked_options()
    if backend.takes_inductor_options:
        known = [documented(option) for option in known]
    matching = [option for option in known if _matches(pattern, option)]
    if known and not matching and not unchecked:
        raise BackendKwargsError(
            f"No option of {spec} matches {pattern!r}; try a shorter word or a glob such as '*tma*'."
        )
    if json:
        return print_json([_option_row(option) for option in matching])
    header = ("option", "type", "default", "environment", "doc")
    print_table(header, [tuple(_option_row(option).values()) for option in matching])
    if unchecked or not known:
        taken = f"takes {unchecked}, unchecked" if unchecked else "takes no options"
        say(f"Backend {spec!r} {taken}.")


def _matches(pattern: str, option: Option) -> bool:
    if any(sign in pattern for sign in "*?["):
        return fnmatchcase(option.name, pattern.replace("-", "_"))
    return pattern.lower() in option.name.lower() or pattern.lower() in option.doc.lower()


def _option_row(option: Option) -> dict[str, str]:
    deprecated = [f"Deprecated: {option.deprecated}."] if option.deprecated else []
    alias = [f"Another name of {option.alias}."] if option.alias else []
    return {
        "option": option.name,
        "type": describe(option.type),
        "default": repr(option.default),
        "environment": " ".join((*option.env, *(f"{name} (forces)" for name in option.env_force))),
        "doc": " ".join([*deprecated, *alias, *option.doc.split()]),
    }


def pin_model(
    model: Model,
    lock: Annotated[Path, typer.Option("--lock", metavar="FILE", help="The file to write.")],
    backend: Annotated[str, typer.Option("--backend", help="The backend to pin.")] = AUTO,
    option: Assignments = None,
    train: Annotated[bool, typer.Option("--train", help="Pin the backward pass too.")] = False,
    dynamic: Annotated[bool, typer.Option("--dynamic", help="Pin code for sizes that vary.")] = False,
    add: Annotated[bool, typer.Option("--add", help="Keep what FILE has, and add what it lacks.")] = False,
) -> None:
    """Race a model, and write what timing chose into a lock, under which nothing is timed."""
    import torch

    module, inputs = model_of(model)
    if isinstance(module, torch.nn.Module):
        module.train(train)
    with torch.set_grad_enabled(train):
        chosen = backend_from_text(backend, assigned(option))
        try:
            served = pin(module, inputs, lock=lock, backend=chosen, dynamic=dynamic or None, add=add)
        except BackendKwargsError:
            raise
        except Exception as error:  # of the model
            raise BackendKwargsError(f"{model} cannot be pinned: {with_cause(error)}.") from error
    say(f"{lock} is written. Commit it, and serve with:", "")
    sizes = ", dynamic=True" if dynamic else ""
    say("import backend_kwargs as bk", f"torch.compile(model, backend=bk.{served!r}{sizes})")


DECISIONS = ".toml"
# Options that the command sets itself, and how.
SET_HERE: Mapping[str, str] = {
    "auto": "always races",
    "race": "always races",
    "process_budget_s": "races every size",
    "most_races": "races every size",
}


Decisions = Annotated[
    list[Path] | None,
    output_option("Write the decisions (.toml), and a page (.html), its data (.json) or a summary (.md)."),
]
Shapes = Annotated[
    list[str] | None,
    typer.Option(help="Sizes to race one after the other, such as batch=1,8,32; may be given several times."),
]
Further = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        metavar="NAME=VALUE",
        help=f"An option of auto, such as effort=full, candidates=a,b, freezing=true, or budget_s={BUDGET_S:g} "
        "(the default, since no call waits for it); may be given several times.",
    ),
]


def tune_model(model: Model, output: Decisions = None, shapes: Shapes = None, option: Further = None) -> None:
    """Race a model for inference at each of the sizes, print what won, and write a file of decisions to ship.

    Ctrl-C keeps the sizes that were raced before it. `backend-kwargs decisions import FILE` puts the file into the
    store of the machine that serves.
    """
    outputs = Outputs.checked(output, [DECISIONS])
    given = assigned(option)
    for name in filter(SET_HERE.__contains__, given):
        raise BackendKwargsError(f"--option {name} has no effect, since tune {SET_HERE[name]}.")
    backend = backend_from_text(AUTO, given)
    backend.verify()
    budget_s = backend.options.get("budget_s", BUDGET_S)
    files = outputs.ending(DECISIONS)
    if len(files) != 1:
        raise BackendKwargsError("Name one file for the decisions: -o FILE.toml.")
    from backend_kwargs.cli.measured import tune

    tune(model, sizes_of(shapes or []), backend, budget_s, files[0], outputs)


def sizes_of(shapes: list[str]) -> list[dict[str, int]]:
    """Return every combination of sizes such as "name=1,8,32", and one empty combination without any."""
    named: dict[str, dict[int, None]] = {}
    for text in shapes:
        name, equals, values = text.partition("=")
        numbers = [value.strip() for value in values.split(",")]
        if not equals or not name.strip().isidentifier() or not all(n.isdecimal() and int(n) > 0 for n in numbers):
            raise BackendKwargsError(f"Option '--shapes' must be name=1,2,3 with whole numbers above 0, got {text!r}.")
        named.setdefault(name.strip(), {}).update(dict.fromkeys(map(int, numbers)))
    return [dict(zip(named, each, strict=True)) for each in product(*named.values())]


MANIFEST = "manifest.json"  # of a bundle
Subject = Annotated[
    str | None,
    typer.Argument(
        metavar="[MODEL|BUNDLE]",
        help="What makes the graphs: FILE_OR_MODULE:FACTORY, timm:NAME, transformers:CLASS. Or a bundle that was built "
        "under auto. None: the models that the store's documents name.",
    ),
]
Maker = Annotated[
    str | None, typer.Argument(metavar="[FACTORY]", help="What makes a bundle's model: FILE_OR_MODULE:FACTORY.")
]
Trust = Annotated[
    bool,
    typer.Option("--trust", help="Import the models that a store's documents name; use code in a bundle's config."),
]
Made = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        metavar="NAME=VALUE",
        help="An option that the decisions were made with, such as effort=full or candidates=a,b; may be given several "
        "times.",
    ),
]
Quick = Annotated[bool, typer.Option("--quick", help="No fresh races, and a fifth of the rounds.")]
Update = Annotated[
    bool, typer.Option("--update", help="Store what was found: today's times, and the best where one has lost.")
]
FindingFiles = Annotated[
    list[Path] | None,
    output_option("Write the findings (.json: docs/audit-schema.json), a page (.html) or a summary (.md)."),
]


def audit_decisions(
    subject: Subject = None,
    factory: Maker = None,
    store: Where = None,
    trust: Trust = False,
    shapes: Annotated[list[str] | None, typer.Option(help="Sizes of the model, as for tune: batch=1,8,32.")] = None,
    dynamic: Annotated[
        bool, typer.Option("--dynamic", help="Also the graph whose sizes vary: with those of --shapes.")
    ] = False,
    option: Made = None,
    quick: Quick = False,
    update: Update = False,
    output: FindingFiles = None,
) -> None:
    """Time stored decisions beside default, the runner-up and what fresh races choose, in turn and at length.

    It says of each whether it is still right. Exits with 1 if one has surely lost by more than 2 %, or fails.
    """
    outputs = Outputs.checked(output)
    backend = backend_from_text(AUTO, assigned(option))
    backend.verify()
    asked = bool(shapes or dynamic or option)
    sizes = sizes_of(shapes or [])
    from backend_kwargs.cli import measured

    if subject is not None and (Path(subject) / MANIFEST).is_file():
        chosen = measured.of_bundle(subject, factory, store, trust, asked)
    else:
        model = measured.model_named(subject, factory)
        chosen = measured.of_store(model, store_of(store), backend, sizes, trust, asked=asked, dynamic=dynamic)
    measured.audit(chosen, outputs, quick=quick, update=update)


# ---- compare

TEMPLATES = ("auto", "freezing", "cpp_wrapper", "max_autotune")
BACKENDS = ",".join(["eager", "inductor", *(f"{PLAIN}:{each}" for each in TEMPLATES)])
QUICK_RACE_S = 10.0

Backends = Annotated[
    str,
    typer.Option(
        help="Separated by commas; options of one in brackets: a,b\\[x=1,y=2]. "
        f"Default: {BACKENDS.replace(',', ', ')}.",
        show_default=False,
    ),
]
From = Annotated[
    Path | None,
    typer.Option("--from", metavar="FILE", help="Compare nothing: make a page, data or summary of an earlier -o FILE."),
]
MaxError = Annotated[
    float | None, typer.Option(help="Largest relative RMSE to float64 to accept, where numbers are beyond --tolerance.")
]
Tolerance = Annotated[
    float | None, typer.Option(help="Absolute and relative tolerance; default 1e-3, in training 1e-2.")
]
Quickly = Annotated[
    bool,
    typer.Option(
        "--quick",
        help="End in about a minute: short races, Inductor's cache as it is, no compile that may take longer.",
    ),
]
Against = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Show what differs from an earlier -o OLD.html or OLD.json.")
]
FailBelow = Annotated[
    str | None,
    typer.Option(
        "--fail-below",
        metavar="[NAME=]RATIO",
        help="Exit with 3 if the speedup of the fastest candidate over NAME (default: torch.compile without a mode) is "
        "not surely so high: the lower end of its interval counts.",
    ),
]
Mode = Annotated[Literal["inference", "training"], typer.Option(help="Forward alone, or forward and backward.")]
OF_FILES = ("from_", "output", "against")


def _gate(text: str) -> tuple[str, float]:
    """Read "1.05" or "eager=1.05": what the fastest is to be faster than, and how much."""
    name, _, ratio = text.rpartition("=")
    with suppress(ValueError):
        if 0 < (least := float(ratio)) < math.inf:
            return name or "default", least
    raise wrong_value("Option '--fail-below'", "a ratio above 0, such as 1.05, or eager=1.05", text)


def compare_backends(
    context: typer.Context,
    factory: MaybeModel = None,
    from_: From = None,
    backends: Backends = BACKENDS,
    mode: Mode = "inference",
    device: Annotated[str | None, typer.Option(help="Where to run; default: where the factory put the model.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Timing rounds; each round times every candidate.")] = 30,
    tolerance: Tolerance = None,
    max_error: MaxError = None,
    quick: Quickly = False,
    output: Output = None,
    against: Against = None,
    fail_below: FailBelow = None,
) -> None:
    """Compare one model under several backends, check the results, time them interleaved, and print a table.

    A FILE.py and its factory can import the files next to it, as with `python FILE.py`.
    """
    outputs = Outputs.checked(output, against=against)
    if from_:
        return _again(context, from_, outputs)
    if factory is None:
        raise BackendKwargsError("Name what to compare: MODEL, or --from FILE, an earlier page or its data.")
    gate = None if fail_below is None else _gate(fail_below)
    with importable(folder_of_model(factory)):  # a backend may be a module next to the model
        wanted = [
            (join_candidate(spec, own), None if spec == EAGER else backend_from_text(spec, own))
            for spec, own in split_candidates(backends)
        ]
    wanted = [_quickly(*each) for each in wanted] if quick else wanted
    from backend_kwargs.cli.measured import compared

    compared(
        factory,
        wanted,
        outputs,
        gate,
        mode=mode,
        device=device,
        rounds=rounds,
        tolerance=tolerance,
        max_error=max_error,
        quick=quick,
    )


def _quickly(label: str, backend: Backend | None) -> tuple[str, Backend | None]:
    """Return a candidate whose races, if it has any, are short unless it says how long they may be."""
    if backend is None or not backend.options.get("auto") or "budget_s" in backend.options:
        return label, backend
    return f"{label}[budget_s={QUICK_RACE_S:g}]", backend.bind("--quick", {"budget_s": QUICK_RACE_S})


def _again(context: typer.Context, earlier: Path, outputs: Outputs) -> None:
    """Write the outputs from the data of an earlier page; raise for what only a comparison uses."""
    for name in context.params:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE" and name not in OF_FILES:
            shown = "MODEL" if name == "factory" else f"--{name.replace('_', '-')}"
            raise BackendKwargsError(f"{shown} has no effect with --from, which compares nothing.")
    if not outputs:
        raise BackendKwargsError("Name what to write: -o OUT.html, OUT.json or OUT.md.")
    outputs.write(read_document(earlier))

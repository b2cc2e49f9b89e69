"""`backend-kwargs audit`: race stored decisions again, and say which are still right; exit with 1 if one has lost."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import typer
from rich.markup import escape

from backend_kwargs.auto.machine import machine
from backend_kwargs.auto.store import Catalogue
from backend_kwargs.backend import Backend
from backend_kwargs.cli.arguments import assigned, backend_from_text
from backend_kwargs.cli.audited import COLUMNS, notes_of, page_of, row_of
from backend_kwargs.cli.console import console, print_table, quiet, say, waiting
from backend_kwargs.cli.decisions import Signing, Trusted, Where
from backend_kwargs.cli.pages import Html, Outputs
from backend_kwargs.cli.tune import sizes_of
from backend_kwargs.errors import BackendKwargsError, printable
from backend_kwargs.facts.decision import Decision
from backend_kwargs.files.atomic_write import check_writable, write_whole
from backend_kwargs.fleet import audit, findings
from backend_kwargs.fleet.findings import Audited, Finding
from backend_kwargs.fleet.racing import AUTO
from backend_kwargs.harness.models import model_of, split_factory
from backend_kwargs.options.option import convert
from backend_kwargs.options.spec import split_outside
from backend_kwargs.page.values import environment_of
from backend_kwargs.stores.opening import URL, opened
from backend_kwargs.stores.signing import private_key, public_key

if TYPE_CHECKING:
    from backend_kwargs.auto.audit import Effort as Measuring

LOST, NOTHING, INTERRUPTED = 1, 2, 130  # exit codes
MANIFEST = "manifest.json"  # of a bundle
OF_A_MODEL = "--shapes, --dynamic, --option, --effort and --candidates"
WITHOUT = "no graph of it has the key of a decision there"  # of one of several sizes
Subject = Annotated[
    str | None,
    typer.Argument(
        metavar="STORE|BUNDLE|FACTORY",
        help="A store of decisions, a bundle that was built under auto, or a model whose decisions are in the default "
        "store; none: the default store.",
    ),
]


ModelName = Annotated[
    str | None,
    typer.Option(metavar="MODEL", help="What makes the graphs: FILE_OR_MODULE:FACTORY, timm:NAME, transformers:CLASS."),
]
Trust = Annotated[
    bool,
    typer.Option("--trust", help="Import the models that a store's documents name; use code in a bundle's config."),
]
Asked = Annotated[
    Literal["quick", "full"] | None,
    typer.Option(help="As for tune, which the decisions were made with; default: quick, and what a plan says."),
]
Candidates = Annotated[str | None, typer.Option(help="The candidates that were raced, if they were named.")]
Assignments = Annotated[
    list[str] | None,
    typer.Option("--option", metavar="NAME=VALUE", help="An option that the decisions were made with; repeatable."),
]
Update = Annotated[
    bool, typer.Option("--update", help="Store what was found: today's times, and the best where one has lost.")
]
Json = Annotated[
    Path | None, typer.Option("--json", metavar="OUT.json", help="Write the findings: docs/audit-schema.json.")
]


def show(
    subject: Subject = None,
    store: Where = None,
    model: ModelName = None,
    trust: Trust = False,
    shapes: Annotated[list[str] | None, typer.Option(help="Sizes of the model, as for tune: batch=1,8,32.")] = None,
    dynamic: Annotated[
        bool, typer.Option("--dynamic", help="Also the graph whose sizes vary: with those of --shapes.")
    ] = False,
    effort: Asked = None,
    candidates: Candidates = None,
    option: Assignments = None,
    flips: Annotated[int, typer.Option(min=0, help="Fresh races of each graph, of --flip-s seconds.")] = 3,
    flip_s: Annotated[float, typer.Option(min=0.1, help="Seconds of each fresh race.")] = 10.0,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, in each of which every candidate is timed.")] = 240,
    timing_s: Annotated[float, typer.Option(min=0.0, help="Seconds after which no further round starts.")] = 20.0,
    update: Update = False,
    signing_key: Signing = None,
    trusted_key: Trusted = None,
    json: Json = None,
    html: Html = None,
) -> None:
    """Time stored decisions beside default, the runner-up and what fresh races choose, in turn and at length.

    It says of each whether it is still right. Exits with 1 if one has surely lost by more than 2 %, or fails.
    """
    from backend_kwargs.auto.audit import Effort as Measuring

    outputs = Outputs.checked(html)
    if json:
        check_writable(json)
    backend = _backend(effort or "quick", candidates, assigned(option))
    asked = bool(shapes or dynamic or option or effort) or candidates is not None
    keys = Keys(signing_key and private_key(signing_key), tuple(map(public_key, trusted_key or ())))
    subject, model = _in_store(store, subject, model)
    chosen = _chosen(subject, model, backend, sizes_of(shapes or []), trust, keys, asked=asked, dynamic=dynamic)
    if update:
        _check_update(chosen)
    measuring = Measuring(flips, flip_s, rounds, timing_s)
    audited, others, stopped = _audited(chosen, measuring)
    if all(each.why == WITHOUT for each in audited):
        raise _nothing(chosen)
    found, heres = findings.judged(audited), [each.here for each in audited if each.here]
    _print(found, others)
    document = findings.document_of(chosen.what, environment_of(*heres) if heres else machine(), found)
    if json:
        write_whole(json, findings.as_json(document))
    if outputs:
        outputs.write(page_of(document))
    if update and chosen.catalogue:  # last: where the store may not be written, nothing else is lost
        _update(chosen.catalogue, audited, found)
    if stopped:
        raise typer.Exit(INTERRUPTED)
    if any(each.failed for each in found):
        raise typer.Exit(LOST)
    if all(each.verdict == "not audited" for each in found):
        raise typer.Exit(NOTHING)


class Keys(NamedTuple):
    """What signs the decisions that are written, and whose signature those that are read must have."""

    signing: object = None
    trusted: tuple[object, ...] = ()


@dataclass(frozen=True, slots=True)
class Chosen:
    """What is audited: its name, the models, the decisions by key, and the store that has them, if it is one."""

    what: str
    targets: Sequence[audit.Target]
    decisions: Mapping[str, Sequence[Decision]]
    catalogue: Catalogue | None = None


def _check_update(chosen: Chosen) -> None:
    """Raise if what is found could not be stored, before minutes of measuring."""
    if chosen.catalogue is None:
        raise BackendKwargsError("--update is for stores: build a bundle again, and its graphs are decided anew.")
    chosen.catalogue.check_replaces()


def _backend(effort: str, candidates: str | None, option: dict[str, str]) -> Backend:
    """Return the backend whose decisions are audited."""
    backend = backend_from_text(AUTO, {**option, "effort": effort})
    if candidates is not None:
        backend = backend.bind("command line", {"candidates": split_outside(candidates)}, convert)
    backend.verify()
    return backend


def _chosen(
    subject: str | None,
    model: str | None,
    backend: Backend,
    sizes: Sequence[Mapping[str, int]],
    trust: bool,
    keys: "Keys",
    *,
    asked: bool,
    dynamic: bool,
) -> Chosen:
    """Return what the arguments name; `asked`: the user has given sizes or options, which then count."""
    if subject is not None and (Path(subject) / MANIFEST).is_file():
        if asked:
            raise BackendKwargsError(f"{OF_A_MODEL} are not for a bundle, which has its own.")
        if model is None:  # as for `run`: not the one that the manifest names
            raise BackendKwargsError("Pass --model FILE_OR_MODULE:FACTORY, the function that makes the bundle's model.")
        target, decided = audit.bundle_target(Path(subject), partial(model_of, model), model, trust=trust)
        return Chosen(subject, [target], decided)
    if subject is not None and subject.endswith(".py"):
        split_factory(subject)  # a file without its function
    if subject is not None and _is_model(subject):
        if model is not None:
            raise BackendKwargsError(f"{subject!r} is a model already; pass a store to audit with --model {model}.")
        subject, model = None, subject
    kept = opened(subject, must_exist=True)
    catalogue = Catalogue(subject, signing_key=keys.signing, trusted_keys=keys.trusted)
    with waiting(f"reading {catalogue.label}"), kept.doing("read") as store:
        decisions, documents = audit.by_key(catalogue), audit.units_of(store, keys.trusted)
    if not decisions:
        raise BackendKwargsError(f"No decisions in {catalogue.label!r}; compile with tmpl-inductor:auto, or tune.")
    if asked and model is None:
        raise BackendKwargsError(f"{OF_A_MODEL} are of a model: name it with --model.")
    units = audit.consented(documents, model, trust=trust, label=catalogue.label)
    targets = [] if asked else audit.targets_of(units)
    if model is not None and not targets:
        targets = [*_targets(model, sizes, backend, dynamic=dynamic)]
    return Chosen(catalogue.label, targets, decisions, catalogue)


def _targets(
    model: str, sizes: Sequence[Mapping[str, int]], backend: Backend, *, dynamic: bool
) -> Iterator[audit.Target]:
    """Yield a model at each size; if `dynamic`, also with all of them as sizes that vary."""
    makes = [partial(model_of, model, each) for each in sizes]
    for each, make in zip(sizes, makes, strict=True):
        yield audit.Target("  ".join((model, *_words(each))), make, backend)
    if dynamic:
        how = None if len(makes) > 1 else True
        yield audit.Target(f"{model}  sizes that vary", makes[0], backend, dynamic=how, others=tuple(makes[1:]))


def _words(sizes: Mapping[str, int]) -> list[str]:
    return [f"{name}={value}" for name, value in sizes.items()]


def _in_store(store: str | None, subject: str | None, model: str | None) -> tuple[str | None, str | None]:
    """Return the subject and the model; where `--store` names the store, it is the subject, the argument a model."""
    if store is None or subject is None:
        return subject or store, model
    if model is not None or not _is_model(subject):
        raise BackendKwargsError(
            f"With --store {store} the argument is a model, FILE_OR_MODULE:FACTORY, got {subject!r}."
        )
    return store, subject


def _is_model(subject: str) -> bool:
    """Return whether a text names a model, and no store: it has a colon, and is no URL, variable or folder."""
    is_store = URL.match(subject) or subject.startswith("env:") or Path(subject).is_dir()
    return ":" in subject and not is_store


def _audited(chosen: Chosen, measuring: "Measuring") -> tuple[list[Audited], int, bool]:
    """Return what was audited, how many decisions for this device were not, and whether Ctrl-C came before the last."""
    with quiet(), _progress() as tell:
        auditor = audit.Auditor(chosen.decisions, measuring, tell)
        try:
            for at, target in enumerate(chosen.targets, 1):
                tell(f"{target.label} ({at} of {len(chosen.targets)})")
                _audit(auditor, target, alone=len(chosen.targets) == 1)
        except KeyboardInterrupt:
            if not auditor.found:
                raise
            say(f"interrupted: {len(auditor.found)} decisions were audited before.", out=console(stderr=True))
            return auditor.found, auditor.left(), True
    return auditor.found, auditor.left(), False


def _audit(auditor: audit.Auditor, target: audit.Target, *, alone: bool) -> None:
    """Audit a model; one of several that fails, or has no decision, is noted beside the others."""
    try:
        has_some = auditor.audit(target)
    except BackendKwargsError as error:
        if alone:
            raise
        auditor.leave_out(target, str(error))
    else:
        if not (has_some or alone or target.decisions):
            auditor.leave_out(target, WITHOUT)


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Give what shows what is being done: in one line on a terminal, else in a line for each step."""
    out = console(stderr=True)
    if not out.is_terminal:
        yield lambda text: say(text, out=out)
        return
    with out.status("") as status:
        yield lambda text: status.update(escape(printable(text)))


def _nothing(chosen: Chosen) -> BackendKwargsError:
    """Return the error that no graph has a decision, with the options that such graphs may lack."""
    models = ", ".join(dict.fromkeys(target.label for target in chosen.targets)) or "the documents on this device"
    count = sum(map(len, chosen.decisions.values()))
    fixed = [each.fixed for several in chosen.decisions.values() for each in several if each.fixed]
    hint = f" Some were made with options: --option {_words(fixed[0])[0]}, say." if fixed else ""
    return BackendKwargsError(
        f"No graph of {models} has the key of one of the {count} decisions in {chosen.what!r}: they are of other "
        f"models, devices, sizes (--shapes, --dynamic) or options (--option, --effort, --candidates).{hint}"
    )


def _print(found: Sequence[Finding], others: int) -> None:
    print_table(COLUMNS, map(row_of, found))
    for line in notes_of(found):
        say(line)
    if others:
        say(
            f"{others} more for this device {'was' if others == 1 else 'were'} not audited: of other models, sizes "
            "(--shapes, --dynamic) or options."
        )


def _update(catalogue: Catalogue, audited: Sequence[Audited], found: Sequence[Finding]) -> None:
    """Store what was found as a new generation of each decision that was measured."""
    renewed = [findings.renewed(*each) for each in zip(audited, found, strict=True)]
    kept = [each for each in renewed if each and catalogue.takes(each)]
    catalogue.add(*kept)
    changed = sum(finding.failed and new is not None for finding, new in zip(found, renewed, strict=True))
    say(f"{len(kept)} stored in {catalogue.label!r} as new generations, {changed} with another winner.")

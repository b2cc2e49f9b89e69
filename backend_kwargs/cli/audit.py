"""`backend-kwargs audit`: race stored decisions again, and say which are still right; exit with 1 if one has lost."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from backend_kwargs.auto.machine import machine
from backend_kwargs.auto.store import Catalogue
from backend_kwargs.backend import Backend
from backend_kwargs.cli.arguments import assigned, backend_from_text
from backend_kwargs.cli.audited import COLUMNS, notes_of, page_of, row_of
from backend_kwargs.cli.console import Outputs, console, output_option, print_table, quiet, say
from backend_kwargs.cli.decisions import Where, store_of
from backend_kwargs.cli.tune import sizes_of
from backend_kwargs.errors import BackendKwargsError, printable
from backend_kwargs.facts.decision import Decision
from backend_kwargs.fleet import audit, findings
from backend_kwargs.fleet.findings import Audited, Finding
from backend_kwargs.fleet.units import AUTO
from backend_kwargs.harness.models import model_of, split_factory
from backend_kwargs.page.figures import environment_of
from backend_kwargs.progress import progress
from backend_kwargs.stores import Store
from backend_kwargs.stores.opening import opened
from backend_kwargs.stores.urls import URL

if TYPE_CHECKING:
    from backend_kwargs.auto.audit import Effort as Measuring

LOST, NOTHING, INTERRUPTED = 1, 2, 130  # exit codes
# Fresh races of each graph and the seconds of one; rounds of timing, and the seconds after which none starts.
AT_LENGTH, QUICK = (3, 10.0, 240, 20.0), (0, 0.0, 48, 5.0)
MANIFEST = "manifest.json"  # of a bundle
OF_A_MODEL = "--shapes, --dynamic and --option"
WITHOUT = "no graph of it has the key of a decision there"  # of one of several sizes
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
Output = Annotated[
    list[Path] | None,
    output_option("Write the findings (.json: docs/audit-schema.json), a page (.html) or a summary (.md)."),
]


def show(
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
    output: Output = None,
) -> None:
    """Time stored decisions beside default, the runner-up and what fresh races choose, in turn and at length.

    It says of each whether it is still right. Exits with 1 if one has surely lost by more than 2 %, or fails.
    """
    from backend_kwargs.auto.audit import Effort as Measuring

    outputs = Outputs.checked(output)
    backend = backend_from_text(AUTO, assigned(option))
    backend.verify()
    asked = bool(shapes or dynamic or option)
    sizes = sizes_of(shapes or [])
    if subject is not None and (Path(subject) / MANIFEST).is_file():
        chosen = _bundle(subject, factory, store, trust, asked)
    else:
        chosen = _chosen(_model(subject, factory), store_of(store), backend, sizes, trust, asked=asked, dynamic=dynamic)
    if update and chosen.catalogue is None:
        raise BackendKwargsError("--update is for stores: build a bundle again, and its graphs are decided anew.")
    if update and chosen.catalogue:  # now, not after minutes of measuring
        chosen.catalogue.check_replaces()
    audited, others, stopped = _audited(chosen, Measuring(*(QUICK if quick else AT_LENGTH)))
    if all(each.why == WITHOUT for each in audited):
        raise _nothing(chosen)
    found, heres = findings.judged(audited), [each.here for each in audited if each.here]
    _print(found, others)
    document = findings.document_of(chosen.what, environment_of(*heres) if heres else machine(), found)
    if outputs:
        outputs.write(page_of(document), findings.as_json(document))
    if update and chosen.catalogue:  # last: where the store may not be written, nothing else is lost
        _update(chosen.catalogue, audited, found)
    if stopped:
        raise typer.Exit(INTERRUPTED)
    if any(each.failed for each in found):
        raise typer.Exit(LOST)
    if all(each.verdict == "not audited" for each in found):
        raise typer.Exit(NOTHING)


@dataclass(frozen=True, slots=True)
class Chosen:
    """What is audited: its name, the models, the decisions by key, and the store that has them, if it is one."""

    what: str
    targets: Sequence[audit.Target]
    decisions: Mapping[str, Sequence[Decision]]
    catalogue: Catalogue | None = None


def _bundle(subject: str, factory: str | None, store: str | None, trust: bool, asked: bool) -> Chosen:
    """Return the decisions in a bundle."""
    if asked or store:
        raise BackendKwargsError(f"{OF_A_MODEL}, and --store, are not for a bundle, which has its own.")
    if factory is None:  # as for `bundle run`: not the one that the manifest names
        raise BackendKwargsError("Pass FACTORY too, the function that makes the bundle's model: MODULE_OR_FILE:NAME.")
    target, decided = audit.bundle_target(Path(subject), partial(model_of, factory), factory, trust=trust)
    return Chosen(subject, [target], decided)


def _model(subject: str | None, factory: str | None) -> str | None:
    """Return the model that the arguments name, if they do; raise if they name something else."""
    if subject is None:
        return None
    if URL.match(subject) or subject.startswith("env:") or Path(subject).is_dir():
        raise BackendKwargsError(f"{subject!r} is neither a bundle nor a model; a store is --store {subject}.")
    if factory is not None:
        raise BackendKwargsError(f"{subject!r} is no bundle, which {factory!r} could make the model of.")
    split_factory(subject)
    return subject


def _chosen(
    model: str | None,
    of: Store,
    backend: Backend,
    sizes: Sequence[Mapping[str, int]],
    trust: bool,
    *,
    asked: bool,
    dynamic: bool,
) -> Chosen:
    """Return the decisions in a store; `asked`: the user has given sizes or options, which then count."""
    kept = opened(of, must_exist=True)
    catalogue = Catalogue(of)
    with progress("audit", f"reading {catalogue.label}", console(stderr=True)), kept.doing("read") as store:
        decisions, documents = audit.by_key(catalogue), audit.units_of(store, of.trusted_keys)
    if not decisions:
        raise BackendKwargsError(f"No decisions in {catalogue.label!r}; compile with tmpl-inductor:auto, or tune.")
    if asked and model is None:
        raise BackendKwargsError(f"{OF_A_MODEL} are of a model: name it, as FILE_OR_MODULE:FACTORY.")
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


def _audited(chosen: Chosen, measuring: "Measuring") -> tuple[list[Audited], int, bool]:
    """Return what was audited, how many decisions for this device were not, and whether Ctrl-C came before the last."""
    with quiet(), _progress() as tell:
        places = chosen.catalogue.places() if chosen.catalogue else {}
        auditor = audit.Auditor(chosen.decisions, measuring, tell, places)
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
        f"models, devices, sizes (--shapes, --dynamic) or options (--option).{hint}"
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

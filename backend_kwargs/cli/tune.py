"""`backend-kwargs tune`: race one model at the sizes that it will serve, and write the decisions to a file."""

import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated

import typer

from backend_kwargs.backend import Backend
from backend_kwargs.cli.arguments import Model, assigned, backend_from_text
from backend_kwargs.cli.console import console, print_table, say
from backend_kwargs.cli.pages import Outputs, output_option
from backend_kwargs.cli.pasting import pasted
from backend_kwargs.cli.tuned import document_of
from backend_kwargs.errors import BackendKwargsError
from backend_kwargs.fleet.racing import AUTO, Tuned, left_out, racing, tuned, why_not_raced
from backend_kwargs.fleet.units import BUDGET_S
from backend_kwargs.harness.models import model_of
from backend_kwargs.stores.opening import given_place

COLUMNS = ("sizes", "graph", "winner", "race", "eager call", "compiled call", "speedup")
DECISIONS = ".toml"
STOPPED, INTERRUPTED = 2, 130  # exit codes, as for a wrong argument and for Ctrl-C, if some sizes were raced before
# Options that the command sets itself, and how.
SET_HERE: Mapping[str, str] = {
    "auto": "always races",
    "race": "always races",
    "process_budget_s": "races every size",
    "most_races": "races every size",
}


Output = Annotated[
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


def show(model: Model, output: Output = None, shapes: Shapes = None, option: Further = None) -> None:
    """Race a model for inference at each of the sizes, print what won, and write a file of decisions to ship.

    Ctrl-C keeps the sizes that were raced before it. `backend-kwargs decisions import FILE` puts the file into the
    store of the machine that serves.
    """
    outputs = Outputs.checked(output, [DECISIONS])
    backend = _backend(assigned(option))
    budget_s = backend.options.get("budget_s", BUDGET_S)
    files = outputs.ending(DECISIONS)
    if len(files) != 1:
        raise BackendKwargsError("Name one file for the decisions: -o FILE.toml.")
    _tune(model, shapes or [], backend, budget_s, files[0], outputs)


def _backend(option: dict[str, str]) -> Backend:
    """Return the backend that the options of the command line describe; raise if it cannot work."""
    for name in filter(SET_HERE.__contains__, option):
        raise BackendKwargsError(f"--option {name} has no effect, since tune {SET_HERE[name]}.")
    backend = backend_from_text(AUTO, option)
    backend.verify()
    return backend


def _tune(model: str, shapes: list[str], backend: Backend, budget_s: float, output: Path, outputs: Outputs) -> None:
    """Race the model at each size, and write the decisions and the page."""
    sizes = sizes_of(shapes)
    raced, stopped = _raced(partial(model_of, model), sizes, backend, budget_s)
    kept = _write(model, raced, output)
    slower = [each for each in raced if each.calls_itself]
    lines_for = partial(_lines, backend, fixed_sizes=bool(shapes))
    lines = [] if len(slower) == len(raced) else lines_for(output)
    serve = " On the machine that serves the model:" if lines else ""
    say(f"{kept} decision{'' if kept == 1 else 's'} written to {output}.{serve}")
    if lines:
        say("", *lines)
    for each in slower:
        ratio = each.speedup.as_ratio() if each.speedup else ""
        say(f"Call the model itself ({each.label}): the compiled call is {ratio} as fast.")
    if outputs:
        outputs.write(document_of(model, raced, "\n".join(lines and lines_for(Path(output.name)))))
    if stopped:
        raise typer.Exit(stopped)


def _write(model: str, raced: Sequence[Tuned], output: Path) -> int:
    """Print what was raced, write the decisions that may be used again, and return their number; raise if it is 0."""
    decisions = [decision for of_size in raced for decision in of_size.decisions]
    if not any(decision.rows for decision in decisions):
        raise BackendKwargsError(f"No graph of {model!r} was raced: {why_not_raced(decisions)}.")
    print_table(COLUMNS, [row for of_size in raced for row in _rows(of_size)])
    kept = {decision.key: decision for of_size in raced for decision in of_size.kept}
    if why := left_out(decisions):
        if not kept:
            raise BackendKwargsError(f"Nothing is written: {why}.")
        say(f"Left out: {why}.")
    from backend_kwargs.auto.decisions_toml import write_decisions

    write_decisions(kept.values(), output)
    return len(kept)


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


def _raced(
    make: Callable[[Mapping[str, int]], tuple[Callable[..., object], object]],
    sizes: list[dict[str, int]],
    backend: Backend,
    budget_s: float,
) -> tuple[list[Tuned], int]:
    """Return the decisions for each size, raced again with a separate store, and the exit code if not all were raced.

    What was raced before a Ctrl-C, or before a size that fails, is kept.
    """
    from backend_kwargs.torch_internals.dynamo import reset  # loads torch, for which no --help should wait

    raced, err, began = [], console(stderr=True), time.perf_counter()
    with racing(backend, budget_s) as own:
        for at, size in enumerate(sizes):
            label = ", ".join(f"{name}={value}" for name, value in size.items()) or "as given"
            spent = time.perf_counter() - began
            left = f", about {spent / at * (len(sizes) - at):.0f} s left" if at else ""
            say(f"racing {label} ({at + 1} of {len(sizes)}){left}", out=err)
            try:
                model, inputs = make(size)
                reset()
                raced.append(tuned(label, model, inputs, own))
            except (BackendKwargsError, KeyboardInterrupt) as error:
                if not raced:
                    raise
                why = "interrupted" if isinstance(error, KeyboardInterrupt) else f"error: {error}"
                say(why, f"{at} of {len(sizes)} sizes are kept.", out=err)
                return raced, INTERRUPTED if isinstance(error, KeyboardInterrupt) else STOPPED
    return raced, 0


def _lines(backend: Backend, output: Path, *, fixed_sizes: bool) -> list[str]:
    """Return the lines that serve with the decisions: a command, and code."""
    store = given_place(backend.options.get("store"))
    command = [
        "backend-kwargs",
        "decisions",
        "import",
        str(output),
        *(["--store", store] if isinstance(store, str) else []),
    ]
    own = {name: value for name, value in backend.options.items() if name not in ("auto", "budget_s")}
    dynamic = ", dynamic=False" if fixed_sizes else ""
    return [
        shlex.join(command),
        "",
        "import backend_kwargs as bk",
        "",
        pasted(f"backend = bk.make_backend({AUTO!r}, { ({**own, 'race': 'never'})!r})"),
        f"torch.compile(model, backend=backend{dynamic})  # called in eval mode, under torch.no_grad()",
    ]


def _rows(raced: Tuned) -> Iterator[tuple[str, ...]]:
    """Yield a row for each graph; the times are those of the call, with all of its graphs."""
    times = _times(raced)
    for decision in raced.decisions:
        yield raced.label, decision.subject, decision.winner, f"{decision.seconds:.0f} s", *times
        times = ("", "", "")


def _times(raced: Tuned) -> tuple[str, ...]:
    if (ratio := raced.speedup) is None:
        return "", "", ""
    from backend_kwargs import trial

    medians = (trial.percentile(samples, 0.5) for samples in (raced.eager_s, raced.compiled_s))
    return *(f"{each * 1e3:.3g} ms" for each in medians), ratio.as_ratio()

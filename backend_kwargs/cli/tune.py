"""`backend-kwargs tune`: race one model at the sizes that it will serve, and write the decisions to a file."""

import shlex
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from backend_kwargs.backend import Backend
from backend_kwargs.backends import CapturedGraph, Inputs
from backend_kwargs.cli.arguments import Model, assigned, backend_from_text
from backend_kwargs.cli.console import console, print_table, say
from backend_kwargs.cli.models import model_of
from backend_kwargs.cli.pages import Against, Html, Json, Outputs
from backend_kwargs.cli.tuned import Tuned, document_of
from backend_kwargs.errors import BackendKwargsError, error_text
from backend_kwargs.facts import Call
from backend_kwargs.files.atomic_write import check_writable
from backend_kwargs.options import precisions
from backend_kwargs.options.option import convert
from backend_kwargs.options.spec import split_outside
from backend_kwargs.torch_internals.dynamo import reset

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from backend_kwargs import measure
    from backend_kwargs.facts.decision import Decision

AUTO = "tmpl-inductor:auto"
COLUMNS = ("sizes", "graph", "winner", "race", "eager call", "compiled call", "speedup")
ROUNDS, MOST_TIMING_S = 30, 20.0
HOUR = 3600.0
STOPPED, INTERRUPTED = 2, 130  # exit codes, as for a wrong argument and for Ctrl-C, if some sizes were raced before
# Options that the command sets itself, and how.
SET_HERE: Mapping[str, str] = {
    "auto": "always races",
    "race": "always races",
    "budget_s": "takes --budget-s",
    "effort": "takes --effort",
    "process_budget_s": "races every size",
    "most_races": "races every size",
}


def show(
    model: Model,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE.toml", help="Where to write the decisions.")],
    shapes: Annotated[
        list[str] | None,
        typer.Option(help="Sizes to race one after the other, such as batch=1,8,32; may be given several times."),
    ] = None,
    effort: Annotated[Literal["quick", "full"], typer.Option(help="A few candidates, or all that can gain.")] = "quick",
    candidates: Annotated[
        str | None, typer.Option(help="Candidates to race instead of the built-in ones, separated by commas.")
    ] = None,
    freezing: Annotated[
        bool, typer.Option("--freezing", help="Make parameters constants: changes of them compile again.")
    ] = False,
    precision: Annotated[
        str | None,
        typer.Option(metavar="NAME[,NAME]", help="Lower precisions that may win, such as bf16,int8-dynamic."),
    ] = None,
    max_error: Annotated[
        float | None, typer.Option(help="The largest relative RMSE to float64 to accept; --precision needs it.")
    ] = None,
    budget_s: Annotated[float, typer.Option(min=0.0, help="Seconds for each graph's race.")] = 300.0,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", metavar="NAME=VALUE", help="A further option; may be given several times."),
    ] = None,
    html: Html = None,
    json: Json = None,
    against: Against = None,
) -> None:
    """Race a model for inference at each of the sizes, print what won, and write a file of decisions to ship.

    Ctrl-C keeps the sizes that were raced before it.

    `backend-kwargs decisions import FILE` puts it into the store of the machine that serves.
    """
    check_writable(output)
    outputs = Outputs.checked(html, json, against=against)
    sizes = _sizes(shapes or [])
    if max_error is not None and not precision:
        raise BackendKwargsError("--max-error needs --precision, the lower precisions that may win: bf16, say.")
    given = {**_further(assigned(option)), "effort": effort, **({"freezing": "true"} if freezing else {})}
    backend = backend_from_text(AUTO, given)
    asked = {
        "candidates": None if candidates is None else split_outside(candidates),
        "precision": precisions.named(precision) or None,
        "max_error": max_error,
    }
    backend = backend.bind("command line", {name: value for name, value in asked.items() if value is not None}, convert)
    backend.verify()
    raced, stopped = _raced(partial(model_of, model), sizes, backend, budget_s)
    kept = _write(model, raced, output)
    lines = _lines(backend, output, fixed_sizes=bool(shapes))
    say(f"{kept} decision{'' if kept == 1 else 's'} written to {output}. On the machine that serves the model:")
    say("", *lines)
    if outputs:
        outputs.write(document_of(model, raced, "\n".join(lines)))
    if stopped:
        raise typer.Exit(stopped)


def _write(model: str, raced: Sequence[Tuned], output: Path) -> int:
    """Print what was raced, write the decisions that may be used again, and return their number; raise if it is 0."""
    decisions = [decision for tuned in raced for decision in tuned.decisions]
    if not any(decision.rows for decision in decisions):
        raise BackendKwargsError(f"No graph of {model!r} was raced: {_why_none(decisions)}.")
    print_table(COLUMNS, [row for tuned in raced for row in _rows(tuned)])
    kept = {decision.key: decision for decision in decisions if decision.rows and decision.lasting}
    if not kept:
        raise BackendKwargsError("Nothing is written: default could not run here, so the winner is not one to ship.")
    from backend_kwargs.auto.decisions_toml import write_decisions

    write_decisions(kept.values(), output)
    return len(kept)


def _further(options: dict[str, str]) -> dict[str, str]:
    """Return the options of `--option`; raise if the command sets one of them itself."""
    for name in filter(SET_HERE.__contains__, options):
        raise BackendKwargsError(f"--option {name} has no effect, since tune {SET_HERE[name]}.")
    return options


def _sizes(shapes: list[str]) -> list[dict[str, int]]:
    """Return every combination of sizes such as "name=1,8,32", and one empty combination without any."""
    combined: list[dict[str, int]] = [{}]
    for text in shapes:
        name, equals, values = text.partition("=")
        numbers = [value.strip() for value in values.split(",")]
        if not equals or not name.strip().isidentifier() or not all(n.isdecimal() and int(n) > 0 for n in numbers):
            raise BackendKwargsError(f"Option '--shapes' must be name=1,2,3 with whole numbers above 0, got {text!r}.")
        combined = [{**held, name.strip(): int(number)} for held in combined for number in dict.fromkeys(numbers)]
    return combined


def _raced(
    make: Callable[[Mapping[str, int]], tuple[Callable[..., object], object]],
    sizes: list[dict[str, int]],
    backend: Backend,
    budget_s: float,
) -> tuple[list[Tuned], int]:
    """Return the decisions for each size, raced again with a separate store, and the exit code if not all were raced.

    What was raced before a Ctrl-C, or before a size that fails, is kept.
    """
    from backend_kwargs.auto.decide import nothing_decided

    raced, err, began = [], console(stderr=True), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, nothing_decided():
        limits = {"budget_s": budget_s, "process_budget_s": 100 * HOUR, "most_races": 1000}
        racing = backend.bind("tune", {**limits, "race": "always", "store": str(Path(folder) / "tune.sqlite")})
        for at, size in enumerate(sizes):
            label = ", ".join(f"{name}={value}" for name, value in size.items()) or "as given"
            spent = time.perf_counter() - began
            left = f", about {spent / at * (len(sizes) - at):.0f} s left" if at else ""
            say(f"racing {label} ({at + 1} of {len(sizes)}){left}", out=err)
            try:
                model, inputs = make(size)
                reset()
                raced.append(_tuned(label, model, inputs, racing))
            except (BackendKwargsError, KeyboardInterrupt) as error:
                if not raced:
                    raise
                why = "interrupted" if isinstance(error, KeyboardInterrupt) else f"error: {error}"
                say(why, f"{at} of {len(sizes)} sizes are kept.", out=err)
                return raced, INTERRUPTED if isinstance(error, KeyboardInterrupt) else STOPPED
    return raced, 0


def _tuned(label: str, model: Callable[..., object], inputs: object, backend: Backend) -> Tuned:
    """Return the decisions for the graphs of one call, and its times beside eager's."""
    import torch

    from backend_kwargs import measure
    from backend_kwargs.harness.study import arguments_of

    decisions: list[Decision] = []

    def noting(gm: "GraphModule", example_inputs: Inputs) -> Call:
        compiled = backend.compile(CapturedGraph(gm, example_inputs))
        if compiled.facts.decision:
            decisions.append(compiled.facts.decision)
        return compiled.call

    compiled = torch.compile(model, backend=noting, dynamic=False)
    positional, keywords = arguments_of(inputs)
    if isinstance(model, torch.nn.Module):
        model.eval()
    with torch.no_grad():
        state = _state_of_calls(model, positional, keywords)
        calls = {
            name: measure.Served(partial(call, *positional, **keywords), state)
            for name, call in (("eager", model), ("compiled", compiled))
        }
        calls["compiled"]()
        if not any(decision.rows for decision in decisions):
            return Tuned(label, decisions)
        tensors = [*positional, *keywords.values(), *getattr(model, "parameters", tuple)()]
        devices = (tensor.device for tensor in tensors if isinstance(tensor, torch.Tensor))
        # Both in each round: the race timed each candidate beside another one, eager long before the winner.
        samples = measure.interleave(
            calls, rounds=ROUNDS, device=next(devices, torch.device("cpu")), budget_s=MOST_TIMING_S
        )
    return Tuned(label, decisions, samples["eager"], samples["compiled"])


def _state_of_calls(
    model: Callable[..., object], positional: tuple[object, ...], keywords: Mapping[str, object]
) -> "measure.State":
    """Return what a call of the model changes, and puts back before the next one; raise if it fails in eager."""
    from backend_kwargs import measure

    def call(tree: Any) -> object:
        own, args, kwargs = tree
        return own(*args, **kwargs)

    try:
        return measure.Changes.of(call, (model, positional, keywords)).on((model, positional, keywords), timed=True)
    except measure.CopyError as error:
        raise BackendKwargsError(f"tune copies the model and its inputs, which failed: {error}.") from error
    except Exception as error:
        raise BackendKwargsError(f"The model fails on its example inputs in eager: {error_text(error)}.") from error


def _why_none(decisions: list["Decision"]) -> str:
    return decisions[0].facts.removeprefix("a graph not raced: ") if decisions else "torch.compile found no graph"


def _lines(backend: Backend, output: Path, *, fixed_sizes: bool) -> list[str]:
    """Return the lines that serve with the decisions: a command, and code."""
    store = backend.options.get("store")
    command = ["backend-kwargs", "decisions", "import", str(output), *(["--store", store] if store else [])]
    own = {name: value for name, value in backend.options.items() if name != "auto"}
    dynamic = ", dynamic=False" if fixed_sizes else ""
    return [
        shlex.join(command),
        "",
        "import backend_kwargs as bk",
        "",
        f"backend = bk.make_backend({AUTO!r}, { ({**own, 'race': 'never'})!r})",
        f"torch.compile(model, backend=backend{dynamic})  # called in eval mode, under torch.no_grad()",
    ]


def _rows(tuned: Tuned) -> Iterator[tuple[str, ...]]:
    """Yield a row for each graph; the times are those of the call, with all of its graphs."""
    times = _times(tuned)
    for decision in tuned.decisions:
        yield tuned.label, decision.facts, decision.winner, f"{decision.seconds:.0f} s", *times
        times = ("", "", "")


def _times(tuned: Tuned) -> tuple[str, ...]:
    if (ratio := tuned.speedup) is None:
        return "", "", ""
    from backend_kwargs import measure

    medians = (measure.percentile(samples, 0.5) for samples in (tuned.eager_s, tuned.compiled_s))
    return *(f"{each * 1e3:.3g} ms" for each in medians), f"{ratio.median:.2f}x [{ratio.low:.2f}, {ratio.high:.2f}]"

"""`backend-kwargs bundle`: build a bundle, look at it, and serve it in another process."""

import shlex
import time
from collections.abc import Sized
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from backend_kwargs.bundles.config import FIELDS, CompileConfig
from backend_kwargs.bundles.module import CompiledModule
from backend_kwargs.cli.console import Assignments, assigned, checked_model, print_table, quiet, say
from backend_kwargs.errors import BackendKwargsError, shown
from backend_kwargs.harness.models import built as made_by
from backend_kwargs.harness.models import spec_of
from backend_kwargs.options.option import convert
from backend_kwargs.registry import PLAIN, make_backend

if TYPE_CHECKING:
    import torch

    from backend_kwargs.bundles.disk.place import Part
    from backend_kwargs.bundles.samples import Args, Kwargs
    from backend_kwargs.trial import State

ROUNDS = 30  # timed calls
NO_CODE = "It holds no compiled code: its graphs are compiled here."
MOST_SHOWN = 100  # rows of a table, since a manifest may be anybody's
Bundle = Annotated[Path, typer.Argument(metavar="BUNDLE", help="A bundle's folder.")]
Trust = Annotated[bool, typer.Option("--trust", help="Run the bundle's code; with --key, only if it is signed by it.")]
Keys = Annotated[list[Path] | None, typer.Option("--key", metavar="PUBLIC.pem", help="Trust bundles signed by it.")]


app = typer.Typer(help="Compiled modules that are served elsewhere without compiling.")


@app.command("build")
def build(
    factory: Annotated[
        str,
        typer.Argument(
            metavar="MODULE_OR_FILE:FACTORY", help="Returns (model, example_inputs).", callback=checked_model
        ),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="BUNDLE", help="The folder to write.")],
    backend: Annotated[str, typer.Option("-b", "--backend", help="What compiles.")] = PLAIN,
    option: Assignments = None,
    dynamic: Annotated[bool | None, typer.Option("--dynamic/--static", help="Dynamic or static shapes.")] = None,
    sign: Annotated[Path | None, typer.Option(metavar="PRIVATE.pem", help="Sign with this Ed25519 key.")] = None,
) -> None:
    """Compile a model, check its results, and write a bundle that is served elsewhere without compiling."""
    from backend_kwargs.bundles.disk.contents import check_save, check_state, save

    check_save(output, sign)
    spec = spec_of(backend)
    read = make_backend(spec).bind("command line", assigned(option), convert).options
    own = {name.replace("-", "_"): read[name.replace("-", "_")] for name in assigned(option)}
    fields: dict[str, Any] = {"backend": spec, "options": own or None}
    config = CompileConfig(**fields, dynamic=dynamic)
    model, example_inputs = made_by(factory)
    check_state(model)
    compiled = CompiledModule(config)
    with quiet():
        compiled.build(model, [example_inputs])
    built, _ = compiled.serving()
    save(built, output, sign, factory=factory)
    say(*compiled.describe().splitlines())
    print_table(("first call", "seconds"), [("compiling", f"{built.cold_s or 0.0:.2f}")])
    say(f"Serve it: {shlex.join(['backend-kwargs', 'bundle', 'run', str(output), factory, '--trust'])}")


@app.command("inspect")
def inspect(bundle: Bundle, key: Keys = None) -> None:
    """Show what a bundle contains, which machine it was built for, and what differs here; its code is not run."""
    from backend_kwargs.bundles.disk.contents import inspected

    manifest, signed = inspected(bundle, key or ())
    # The config is not read as one, only shown.
    changed = (
        f"{name}={shown(value)}"
        for name, value in manifest.config.items()
        if name in FIELDS and value != FIELDS[name].default
    )
    say(f"CompiledModule({','.join(changed)}) of {manifest.module}, {signed}, made {manifest.made}")
    rows: list[tuple[str, Part | None]] = [("weights", manifest.weights)]
    rows += [(f"graph {graph.key[:12]}", graph.code) for graph in manifest.graphs]
    rows += [(f"library {part.sha256[:12]}", part) for graph in manifest.graphs for part in graph.libraries]
    rows += [(place.rpartition("/")[2], part) for place, part in manifest.extensions.items()]
    parts = [(name, part) for name, part in rows if part]
    print_table(("part", "bytes", "sha256"), [(name, part.size, part.sha256[:16]) for name, part in parts[:MOST_SHOWN]])
    _say_more(parts)
    print_table(("built with", ""), sorted(manifest.environment.items())[:MOST_SHOWN])
    _say_more(manifest.environment)
    chosen = (f"auto chose {graph.winner} for graph {graph.key[:12]}" for graph in manifest.graphs if graph.winner)
    if lines := [*chosen, *manifest.notes]:
        say(*lines[:MOST_SHOWN])
        _say_more(lines)
    import torch

    from backend_kwargs.bundles.disk.place import differences, fingerprint

    device = "cuda" if manifest.device == "cuda" and torch.cuda.is_available() else "cpu"
    differ = differences(manifest.environment, fingerprint(torch.device(device)))
    held = "Its code can be used on this machine." if any(graph.code for graph in manifest.graphs) else NO_CODE
    say(f"It is compiled again here: {'; '.join(differ)}." if differ else held)


@app.command("run")
def run(
    bundle: Bundle,
    factory: Annotated[
        str,
        typer.Argument(metavar="MODULE_OR_FILE:FACTORY", help="Returns (model, example_inputs), as for `build`."),
    ] = "",
    trust: Trust = False,
    key: Keys = None,
) -> None:
    """Load a bundle, and show the time of its first call next to that of compiling it."""
    from backend_kwargs.bundles.disk.contents import inspected

    manifest, _ = inspected(bundle, key or ())  # and its signature, before the factory makes the model
    if not factory:
        # Not the one that the manifest names: its source is no part of the bundle, whoever signed that.
        built_with = f" It was built with {shown(manifest.factory)}." if manifest.factory else ""
        raise BackendKwargsError(f"Pass FACTORY, the function that makes the model: MODULE_OR_FILE:NAME.{built_with}")
    model, example_inputs = made_by(factory)
    from backend_kwargs.bundles.running import import_compiler
    from backend_kwargs.bundles.samples import sample_of
    from backend_kwargs.trial import RestoringCall, interleave, median_interval, synchronize

    args, kwargs = sample_of(example_inputs)
    importing = time.perf_counter()
    import_compiler()
    began = time.perf_counter()
    loaded = CompiledModule.load(bundle, model, trust=trust, trusted_keys=key or ())
    loaded.deploy(None)
    ready = time.perf_counter()
    loaded(*args, **kwargs)
    device = loaded.device
    assert device  # a deployed one has it
    synchronize(device)
    first_s, ready_s, cold_s = time.perf_counter() - ready, ready - began, manifest.cold_s
    total_s = ready_s + first_s
    restoring = RestoringCall(partial(loaded, *args, **kwargs), _state_of(model, args, kwargs))
    call = median_interval(interleave({"call": restoring}, rounds=ROUNDS, device=device)["call"])
    rows = [
        ("compiling, when it was built", f"{cold_s:.2f}" if cold_s else "", ""),
        ("importing torch's compiler, also part of building", f"{began - importing:.2f}", ""),
        ("load and deploy", f"{ready_s:.2f}", ""),
        ("first call", f"{first_s:.2f}", ""),
        ("load, deploy and first call", f"{total_s:.2f}", f"{total_s / cold_s:.3f}" if cold_s else ""),
    ]
    print_table(("first call", "seconds", "of compiling"), rows)
    say(f"a call: {call.median * 1e3:.3g} ms, 95 % {call.low * 1e3:.3g} to {call.high * 1e3:.3g}")
    say(*loaded.describe().splitlines())


def _say_more(rows: Sized) -> None:
    """Say how many rows are not shown."""
    if len(rows) > MOST_SHOWN:
        say(f"… and {len(rows) - MOST_SHOWN} more")


def _state_of(model: "torch.nn.Module", args: "Args", kwargs: "Kwargs") -> "State":
    """Return what calls change, to be put back before each; nothing if the module cannot be copied or run in eager."""
    import torch

    from backend_kwargs.trial import Changes, State

    try:
        with torch.no_grad():
            return Changes.of_calls(model, args, kwargs)
    except Exception:  # noqa: BLE001 - the bundle serves it all the same
        return State()

"""Under `reproducible="pinned"`: what timing chose before is read from a lock, and nothing is timed."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch

from backend_kwargs.auto.lock import check_machine, pinned_machine, read_lock
from backend_kwargs.auto.machine import machine
from backend_kwargs.backends import CapturedGraph, CompileFn, CompileInner
from backend_kwargs.errors import BackendKwargsError, shown
from backend_kwargs.facts import Call, Compiled, PinnedKernel, Pins
from backend_kwargs.graphs.determinism import check_deterministic, check_no_atomics
from backend_kwargs.graphs.freezing import UNCACHED
from backend_kwargs.graphs.spelling import card_of, devices_of
from backend_kwargs.keys import digest, key
from backend_kwargs.options.catalogue import inductor_options
from backend_kwargs.options.option import Options
from backend_kwargs.torch_internals.caches import forget_loaded
from backend_kwargs.torch_internals.choices import Configuration, Site, chosen_by, configuration_of

REPRODUCIBLE = "reproducible"
# What else Inductor times is not done: it would be timed in places that a lock cannot name.
UNTIMED: Options = {
    "shape_padding": False,
    "benchmark_fusion": False,
    "benchmark_combo_kernel": False,
    "benchmark_epilogue_fusion": False,  # so that a kernel is chosen when its product is lowered, and no later
    "pipeline_max_autotune_gemm": False,
    "autotune_in_subproc": False,
    "incremental_autotune": False,
    "dynamic_scale_rblock": False,
    "triton.multi_kernel": 0,
    "aten_distributed_optimizations.collective_estimator": "analytical",
    "aten_distributed_optimizations.compute_estimator": "analytical",
    # A configuration in a lock is the same each time, so that more than one may be tried while it is written. It also
    # makes kernels' code unlike that of other compiles, whose configurations this process may have loaded.
    "write_are_deterministic_algorithms_enabled": False,
}
EVERY_GRAPH: Options = {"most_races": 1000, "process_budget_s": math.inf}  # is raced for a lock, if it has no decision
IN_THIS_PROCESS: Options = {"compile_threads": 1}  # Triton kernels: torch's workers would not know of the lock


def compile_pinned(graph: CapturedGraph, options: Options, following: CompileFn) -> Compiled:
    """Compile a graph by what a lock pins, or note what is chosen for it where `graph.pins` says so."""
    pins = read_lock(options["lock"]) if graph.pins is None else graph.pins
    devices = devices_of(graph.example_inputs)
    here = machine(devices, card_of(graph.example_inputs))
    if pins.phase != "serving" and not pins.machine:
        pins.machine = pinned_machine(here)
    check_machine(pins, here, devices)
    rest, graph = {name: value for name, value in options.items() if name != REPRODUCIBLE}, replace(graph, pins=pins)
    if pins.deciding:
        del rest["lock"]
        return following(graph, {**rest, **EVERY_GRAPH})
    chooser = PinnedChooser(pins, strict=pins.strict or bool(options.get("strict")), reloads="cuda" in devices)
    graph = graph.wrap_inner_compile(chooser.wrap_inner_compile)
    if graph.compile_fx:  # a bundle's, which loads kernels too
        graph = replace(graph, compile_fx=partial(chooser.calling, graph.compile_fx))
    return following(graph, rest)


def untimed(graph: CapturedGraph, options: Options) -> Options:
    """Return the options under which Inductor compiles a graph by its lock: those that time nothing precede all."""
    rest = {name: value for name, value in options.items() if name != "lock"}
    if graph.pins is None:
        return rest
    extra = {**UNTIMED, **(IN_THIS_PROCESS if "cuda" in devices_of(graph.example_inputs) else {})}
    known = {name: value for name, value in extra.items() if name in inductor_options()}
    # A bundle keeps what the caches would: what other locks have chosen is another entry.
    caches = {} if graph.compile_fx else UNCACHED
    return {**rest, **known, **caches, **entry_of(graph.pins)}


def entry_of(pins: Pins) -> dict[str, Any]:
    """Return the option by which what is compiled by a lock is a cache's entry of its own."""
    content = [pins.decisions.keys(), pins.kernels.items(), pins.configurations.items()]
    return {"autotune_lookup_table": {f"lock {digest([sorted(each, key=repr) for each in content])}": {}}}


@dataclass(frozen=True)
class PinnedChooser:
    """Chooses what a lock pins; what it lacks is timed and noted while one is written, else never timed.

    If it `reloads`, Triton kernels that this process has loaded are loaded anew: torch finds them by their code, and
    another lock may have chosen another configuration.
    """

    pins: Pins
    strict: bool = False
    reloads: bool = False

    @contextmanager
    def _choosing(self) -> Iterator[None]:
        if self.reloads:
            forget_loaded()
        with chosen_by(self):
            yield

    def wrap_inner_compile(self, inner_compile: CompileInner) -> CompileInner:
        """Return `inner_compile`, which chooses by the lock, and refuses graphs whose bits would differ anyway."""

        def compile_one(gm: torch.fx.GraphModule, *args: object, **kwargs: object) -> Call:
            check_deterministic(gm)
            with self._choosing():
                compiled = inner_compile(gm, *args, **kwargs)
            check_no_atomics(str(getattr(compiled, "source_code", "")))
            return compiled

        return compile_one

    def calling(self, compile_fx: Call, *args: object, **kwargs: object) -> Call:
        """Call what stands in place of Inductor's compile_fx, while the lock chooses."""
        with self._choosing():
            return compile_fx(*args, **kwargs)  # type: ignore[no-any-return]

    def kernel_at(self, site: Site) -> int | None:
        """Return the kernel of the lock; the library's where it has none."""
        pinned = self.pins.kernels.get(_key(site))
        if pinned is None:
            what = f"kernel for {', '.join(site.inputs)}, out of {', '.join(site.kernels)}"
            return None if self._times(what) else site.library
        if pinned.kernel not in site.kernels:
            raise BackendKwargsError(
                f"Lock {self.pins.label!r} names kernel {shown(pinned.kernel)} for {', '.join(site.inputs)}, which has "
                f"{', '.join(site.kernels)}: pin again."
            )
        return site.kernels.index(pinned.kernel)

    def was_timed(self, site: Site, at: int) -> None:
        """Note the kernel in the lock."""
        self.pins.kernels[_key(site)] = PinnedKernel(site.kernels[at], site.inputs, site.output, len(site.kernels))

    def configuration(self, key: str, name: str, given: Sequence[Configuration]) -> Configuration | None:
        """Return the configuration of the lock; the first of torch's heuristic where it has none."""
        pinned = self.pins.configurations.get(key)
        if pinned is None:
            return None if self._times(f"configuration for {name}") else given[0]
        if not {*pinned} <= {name for each in given for name in each}:
            raise BackendKwargsError(
                f"Lock {self.pins.label!r} has a configuration that {name} does not take: {shown(dict(pinned))}."
            )
        return cast(Configuration, dict(pinned))

    def was_made(self, key: str, name: str, autotuner: object) -> None:
        """Keep the wrapper until its kernel was called."""
        self.pins.uncalled.append((key, name, autotuner))

    def must_not_time(self) -> str:
        """Return why nothing may be timed, unless a lock is written."""
        if self.pins.phase == "timing":
            return ""
        return f"Inductor would time kernels that lock {self.pins.label!r} cannot name: leave out what asks for it."

    def _times(self, what: str) -> bool:
        """Return whether what the lock lacks is timed; if not, raise under `strict`."""
        if self.pins.phase == "timing":
            return True
        if self.strict:
            raise BackendKwargsError(f"Lock {self.pins.label!r} has no {what}: pin again, or leave out 'strict'.")
        return False


def _key(site: Site) -> str:
    return key("kernel", inputs=site.inputs, output=site.output, kernels=site.kernels)


def note_configurations(pins: Pins) -> list[str]:
    """Note what Triton kernels chose at their first calls; return the names of those that were never called."""
    found = [(key, name, configuration_of(autotuner)) for key, name, autotuner in pins.uncalled]
    pins.uncalled.clear()
    pins.configurations.update({key: chosen for key, _, chosen in found if chosen is not None})
    return [name for _, name, chosen in found if chosen is None]

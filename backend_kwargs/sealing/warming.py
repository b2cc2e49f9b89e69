"""Warming up: compile for all declared sizes, compare results with eager's, and call until nothing is compiled.

What serves then, `Sealed`, runs compiled code where a call fits what was declared, and eager's otherwise.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from backend_kwargs.backends.inductor.cudagraph_outputs import (
    make_thread_ready,
    no_other_replays,
    one_at_a_time,
    with_copies_of_managed,
)
from backend_kwargs.bundles.running import import_compiler
from backend_kwargs.bundles.samples import Sample
from backend_kwargs.errors import BackendKwargsError, printable, shortened
from backend_kwargs.facts import Call
from backend_kwargs.sealing.calls import Apart, Calls, Checks, Padding, Target, apart_of
from backend_kwargs.sealing.declared import Declared, Point, Reader, UndeclaredError, places_of, shown_point
from backend_kwargs.torch_internals import cudagraphs, sealing
from backend_kwargs.torch_internals.cudagraphs import CUDAGraphTreeManager
from backend_kwargs.torch_internals.tensors import modes_of_thread
from backend_kwargs.trial import generators, synchronize, tensors_of

log = logging.getLogger("backend_kwargs.sealing")
MOST_REASONS = 100  # that are logged and counted apart, since a guard's words may hold any value
LONGEST_REASON = 300
OTHERS = "others"


class SealedError(BackendKwargsError):
    """A sealed function was called with what was not declared, under on_miss="raise"."""


class Sealed:
    """A compiled function that compiles nothing; `seal` makes it.

    Attributes:
        name: the function's or the module's class's name.
        notes: what `seal` found out.
        copying: what runs, and copies results in CUDA graphs' memory, once several threads call; None without graphs.

    """

    def __init__(
        self,
        target: Target,
        reader: Reader,
        padding: Padding,
        apart: Apart | None,
        managers: Iterable[CUDAGraphTreeManager] | None = None,
    ) -> None:
        self.name = target.name
        self.notes: list[str] = []
        self._reader, self._padding, self._apart, self._eager = reader, padding, apart, target.eager
        self._here = threading.local()
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()
        self._run = self._plain = target.serving(self._guard_failed)
        # With CUDA graphs: a thread calls once it is ready, and if several are, results are copied.
        self.copying: Callable[..., Any] | None = None
        self._several = False
        if managers is not None:
            self.copying = with_copies_of_managed(self._plain, managers)
            self._run = one_at_a_time(self._in_turn, {each.device_index for each in managers})
            self._here.ready = True
        self._on_miss: str | None = None
        self._warm: Callable[[], None] = lambda: None

    @torch.compiler.disable  # type: ignore[untyped-decorator] # in a function that is being compiled it is a graph break, and its own code runs
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run compiled code if the call was declared, else eager's."""
        here = self._here
        here.missed = False
        try:
            found, padded = self._reader(args, kwargs)
            self._check_thread()
            if self._apart is not None:
                self._apart(args, kwargs)
            run = self._padding.around(self._run, found, padded) if padded else self._run
            result = run(*args, **kwargs)
        except UndeclaredError as miss:
            self._count_miss(str(miss), miss.got)
            result = self._eager(*args, **kwargs)
        else:
            if not here.missed:
                with self._lock:
                    self._counts["padded" if padded else "compiled"] += 1
        return result

    @property
    def counters(self) -> dict[str, int]:
        """How many calls ran compiled code, padded or not, and how many ran in eager or raised."""
        with self._lock:
            return {name: self._counts[name] for name in ("compiled", "padded", "missed")}

    @property
    def misses(self) -> dict[str, int]:
        """How many calls were not declared, by the reason; after many reasons, further ones are counted together."""
        with self._lock:
            return dict(self._reasons)

    def warm(self) -> None:
        """Let this thread call too where there are CUDA graphs, of which all threads share the one recording.

        Each declared size is called here once more, in the modes of the seal. From then on results are copied, and
        calls take turns; results from before are overwritten, as by any next call.
        """
        if self.copying is not None and not hasattr(self._here, "ready"):
            self._several = True  # before that: a call that waits meanwhile is one of several
            self._warm()
            self._here.ready = True

    def describe(self) -> str:
        """Return what is declared, the counters and the reasons of misses, one fact per line."""
        declared = self._reader.declared
        counts = ", ".join(f"{name} {count}" for name, count in self.counters.items())
        lines = [f"sealed {self.name}: {counts}"]
        for name in declared.names:
            values = declared.sizes[name]
            known = str(values) if isinstance(values, range) else str([*values])
            padded = f", padded to {[*declared.buckets[name]]}" if name in declared.buckets else ""
            lines.append(f"{name}: {shortened(known, 80)}{padded}")
        lines += [f"note: {note}" for note in self.notes]
        lines += [f"missed {count}: {reason}" for reason, count in self.misses.items()]
        return "\n".join(map(printable, lines))

    def __repr__(self) -> str:
        return f"<sealed {self.name}: {', '.join(self._reader.declared.names) or 'one call'}>"

    def __reduce__(self) -> Any:
        raise TypeError(
            "A sealed function cannot be copied or pickled: its code is this process's. Seal it again there."
        )

    def serve(self, on_miss: str, warm: Callable[[], None]) -> None:
        """Log and count misses from now on, or raise; let `warm()` do this."""
        self._on_miss, self._warm = on_miss, warm

    def _check_thread(self) -> None:
        if self.copying is not None and not hasattr(self._here, "ready"):
            raise UndeclaredError("its CUDA graphs are recorded in another thread: call warm() in this one first")

    def _in_turn(self, *args: Any, **kwargs: Any) -> Any:
        return (self.copying if self._several and self.copying else self._plain)(*args, **kwargs)

    def _guard_failed(self, reason: str) -> None:
        """Count a frame that runs in eager, once for each call."""
        if not getattr(self._here, "missed", False):
            self._here.missed = True
            self._count_miss(reason)

    def _count_miss(self, reason: str, got: str = "") -> None:
        """Count a miss by its reason and log a new reason, or raise."""
        reason = printable(shortened(" ".join(reason.split()), LONGEST_REASON))
        with self._lock:
            self._counts["missed"] += 1
            key = reason if reason in self._reasons or len(self._reasons) < MOST_REASONS else OTHERS
            self._reasons[key] += 1
            first = self._reasons[key] == 1
        said = f"{reason}: {got}" if got else reason
        if self._on_miss == "raise":
            raise SealedError(
                f"Sealed {self.name!r} was called with what was not declared, {said}. Declare it in seal(), or pass "
                "on_miss='eager'."
            )
        if first and self._on_miss == "eager":
            log.warning("Sealed %r runs in eager: %s.", self.name, said)


MOST_CALLED = 64  # combinations of sizes that are called; of more, those whose guards can be asked are only asked
MOST_RECORDED = 256  # combinations of sizes with CUDA graphs, each of which is recorded
MOST_CODES = 128  # pieces of compiled code
MOST_TRIED = 1000  # sizes, for one that no other dimension has
ROUNDS = 6  # of calls until nothing is compiled
PLANS = 2  # calls of each size with copies: the first one plans them
WARM_UPS = 3  # calls of each size: CUDA graphs run once, then record
MAPS = Path("/proc/self/maps")


def warmed(
    target: Target,
    declared: Declared,
    example: Sample,
    tell: Callable[[str, float], None],
    *,
    on_miss: str,
    check: bool,
    tol: float | None,
) -> Sealed:
    """Return the sealed function, once its compiled code is there, right, and compiles nothing more."""
    import_compiler()
    if torch.cuda.is_available():
        cudagraphs.trees_of_thread()  # torch 2.11 makes none in threads that a user has started
    places = places_of(declared, target.leaves(example))
    reader = Reader(declared, places)
    work = _Warming(target, declared, example, places, tell)
    checks = Checks(target.name, partial(work.call, target.eager), tol)
    with work.kept(), generators.kept():
        work.refuse_compiled_parts(on_miss)
        work.compile_all()
        points = work.points()
        work.record(points)
        if work.managers:
            points = work.all_points()
            work.record(points)
        if check:
            work.compare(checks, points)
        padding = Padding.of(declared, places, work, checks, check=check)
        if work.managers:
            make_thread_ready()
        buffers = [*target.module.buffers()] if target.module is not None else []
        in_eager = lambda sample: work.call(target.eager, sample, points[0])  # noqa: E731
        apart = apart_of(in_eager, work.inputs(points[0]), buffers)
        work.settle(Sealed(target, reader, padding, apart), points)
    sealed = Sealed(target, reader, padding, apart, work.managers or None)
    sealed.notes += work.notes
    modes, has_gradients = modes_of_thread(), work.has_gradients
    devices = {each.device_index for each in work.managers}

    def warm() -> None:
        if has_gradients:
            raise BackendKwargsError(
                f"{target.name!r} was sealed with its backward pass, whose CUDA graphs serve one thread: seal under "
                "torch.no_grad(), or compile without CUDA graphs."
            )
        # Not drawing apart, since other threads draw from the same generators.
        with no_other_replays(devices), modes(), work.kept():
            work.settle(Sealed(target, reader, padding, apart), points, compiles=False)
            if sealed.copying is not None:
                for _ in range(PLANS):
                    work.round(sealed.copying, points)

    sealed.serve(on_miss, warm)
    return sealed


@dataclass
class _Warming(Calls):
    """The steps of one `seal`."""

    tell: Callable[[str, float], None]
    notes: list[str] = field(default_factory=list)
    managers: set[CUDAGraphTreeManager] = field(default_factory=set)  # of the CUDA graphs that calls replay

    def _told(self, points: Iterable[Point], what: str, count: int, done: float) -> Iterator[Point]:
        """Yield the combinations, with their number on a terminal; `done` is the fraction of `seal` before them."""
        for at, point in enumerate(points):
            self.tell(f"{what}, {at + 1} of {count} sizes", done + 0.3 * at / count)
            yield point

    # ---- compiling

    def refuse_compiled_parts(self, on_miss: str) -> None:
        """Raise if something would compile where a call runs in eager."""
        if on_miss != "eager":
            return
        parts = [*sealing.compiled_parts(self.target.module)] if self.target.module is not None else []
        before = sealing.compile_events()
        self.call(self.target.eager, self.inputs(next(self.declared.points())))
        if parts or sealing.compile_events() != before:
            raise BackendKwargsError(
                f"{self.target.name!r} calls compiled code of its own{f' ({parts[0]})' if parts else ''}, which would "
                "compile where a call runs in eager: compile only the whole, or pass on_miss='raise'."
            )

    def compile_all(self) -> None:
        """Compile until some code fits each declared combination of sizes."""
        with self.compiling():
            for point in self._seeds():
                if self._unfit(point) != "":
                    self._compile(point)
            codes = 0
            asked = self._told(self.declared.points(), "compiling", self.declared.count, 0.0)
            for point in asked:
                if not (why := self._unfit(point)):
                    continue
                self._compile(point)
                codes += 1
                if codes > MOST_CODES:
                    raise BackendKwargsError(
                        f"Sealing {self.target.name!r} would take more than {MOST_CODES} compiled graphs, the last for "
                        f"{shown_point(point)} since {why}: declare fewer sizes, or buckets."
                    )
                if why := self._unfit(point):
                    raise BackendKwargsError(
                        f"{self.target.name!r} cannot be sealed for {shown_point(point)}: no code is kept, since {why}."
                    )

    def _seeds(self) -> Iterator[Point]:
        """Yield the combinations to compile first: each list's sizes, and of each range a large one of its own.

        dynamo takes sizes that are equal in the first call for one size.
        """
        declared, codes = self.declared, dict(self.declared.codes)
        taken = {size for tensor in tensors_of(tuple(self.example)) for size in tensor.shape}
        taken |= {size for name, each in codes.items() if name not in declared.dynamic for size in each}
        for name in declared.dynamic:
            falling = sorted(codes[name], reverse=True)[:MOST_TRIED]
            free = next((size for size in falling if size > 1 and size not in taken), falling[0])
            taken.add(free)
            codes[name] = (free,)
        yield from Declared(declared.dims, codes, {}, {}).points()

    def _unfit(self, point: Point) -> str | None:
        """Return why no code fits these sizes, "" if some does, None if there is no frame."""
        sample = self.inputs(point, values=False)
        return self.target.look(*sample.args, **sample.kwargs)

    def _compile(self, point: Point) -> None:
        self.call(self.target.compiling, self.inputs(point, marked=True), point)

    # ---- calling

    def points(self) -> list[Point]:
        """Return the combinations of sizes that are called."""
        chosen = self.declared.spread(MOST_CALLED)
        if len(chosen) < self.declared.count:
            self.notes = [f"called and compared for {len(chosen)} of {self.declared.count} combinations of sizes"]
        return chosen

    def all_points(self) -> list[Point]:
        """Return all combinations of sizes, since a CUDA graph is recorded for each."""
        if self.declared.count > MOST_RECORDED:
            raise BackendKwargsError(
                f"CUDA graphs are recorded for each of {self.declared.count} combinations of sizes, at most "
                f"{MOST_RECORDED}: declare `buckets`, or compile without CUDA graphs."
            )
        self.notes = ["CUDA graphs are recorded in one thread: call warm() in each other one that serves"]
        return [*self.declared.points()]

    def record(self, points: Sequence[Point]) -> None:
        """Call as often for each combination as CUDA graphs take."""
        with self.compiling(), cudagraphs.noting_managers() as called:
            for _ in range(WARM_UPS):
                self.round(self.target.compiling, points)
        self.managers |= called

    def round(self, call: Call, points: Sequence[Point]) -> None:
        """Call for each combination."""
        for point in self._told(points, "calling", len(points), 0.3):
            self.call(call, self.inputs(point, marked=call is self.target.compiling), point)
        for device in {tensor.device for tensor in tensors_of(tuple(self.example))}:
            synchronize(device)

    def compare(self, checks: Checks, points: Sequence[Point]) -> None:
        """Compare the results for each combination with eager's."""
        for point in self._told(points, "comparing", len(points), 0.6):
            make = partial(self.inputs, point)
            checks.compare(self.call(self.target.compiling, make(), point), make, point)
        if checks.random:
            self.notes.append("it draws random numbers, so results were not compared with eager's")

    def settle(self, sealed: Sealed, points: Sequence[Point], *, compiles: bool = True) -> None:
        """Call as in service until a round compiles, records and loads nothing; compile what is missing in between."""
        for _ in range(ROUNDS):
            before, missed = self._state(), sealed.counters["missed"]
            self.round(sealed, points)
            happened = [name for name, count in self._state().items() if count != before[name]]
            if sealed.counters["missed"] != missed:
                happened = [f"no code fits, since {[*sealed.misses][-1]}"]
                if compiles:
                    with self.compiling():
                        self.round(self.target.compiling, points)
            if not happened:
                return
        raise BackendKwargsError(
            f"{self.target.name!r} cannot be sealed: after {ROUNDS} rounds of calls {happened[0]}."
        )

    def _state(self) -> dict[str, object]:
        """Return what a call in service must leave as it is."""
        libraries: Callable[[], object] = lambda: frozenset(  # noqa: E731
            line.split(maxsplit=5)[-1] for line in MAPS.read_text(errors="replace").splitlines() if ".so" in line
        )
        return {
            "something is still compiled": sealing.compile_events(),
            "CUDA graphs are still recorded": cudagraphs.recorded_count(self.managers),
            "libraries are still loaded": libraries() if MAPS.is_file() else None,
        }

"""A sealed function: it runs compiled code where a call fits what was declared, and eager's otherwise."""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch

from backend_kwargs.backends.inductor.cudagraph_outputs import one_at_a_time, with_copies_of_managed
from backend_kwargs.errors import BackendKwargsError, printable, shortened
from backend_kwargs.sealing.calls import Apart, Target
from backend_kwargs.sealing.declared import Reader, UndeclaredError
from backend_kwargs.sealing.padding import Padding
from backend_kwargs.torch_internals.cudagraphs import CUDAGraphTreeManager

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

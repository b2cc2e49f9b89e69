"""Which version of a model's code does a backward pass: the one that did its forward pass, whatever serves now."""

import threading
import weakref
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from backend_kwargs.auto.background.pacing import Gate
from backend_kwargs.backends.inductor.lowered import Lowered, Version
from backend_kwargs.facts import Call


@dataclass
class Versions:
    """The version that serves by the graphs of the first call, `lowered`, which is None before it and after the race.

    `pending` are forward passes whose backward passes may follow, of what serves; `earlier` are those of versions that
    served before. In a slice (`slicing`) candidates are called, whose passes need no mark.
    """

    gate: Gate
    lowered: Lowered | None = None
    version: Version | None = None
    slicing: bool = False
    pending: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    earlier: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    unmarked: list[tuple[Any, object]] = field(default_factory=list)

    def switch(self) -> None:
        """Let another version serve, or none; those before still do the backward passes of their forward passes."""
        self.earlier |= self.pending
        self.pending, self.version = weakref.WeakSet(), None

    def awaited_elsewhere(self) -> bool:
        """Return whether the backward pass of another thread's forward pass may come.

        On a GPU autograd has one thread for those of all threads: one that waited for the end of a slice there would
        keep the slice's own backward passes waiting.
        """
        here = threading.get_ident()
        return any(ctx.served_in != here for ctx in (*self.pending, *self.earlier))

    def place(self) -> None:
        """Let dynamo's code run the version that serves."""
        if self.lowered is not None and self.version is not None:
            self.lowered.place(self.version)

    def mark_forward_passes(self) -> None:
        """Let each backward pass be done by the version that did its forward pass."""
        assert self.lowered is not None
        for function in self.lowered.functions:
            self.unmarked.append((function, vars(function)["forward"]))
            function.forward = staticmethod(partial(self._forward, function.forward))
        self.lowered.around_backward = self._around_backward

    def settle(self) -> bool:
        """Leave dynamo's code with the version that serves; return whether that is done now, and was possible."""
        if self.earlier or self.lowered is None:
            return False
        for function, forward in self.unmarked:
            function.forward = forward
        self.lowered.around_backward = lambda backward: backward
        if self.version is not None:
            self.lowered.settle(self.version)
        self.lowered, self.unmarked = None, []
        return True

    def _forward(self, forward: Call, ctx: Any, *inputs: Any) -> Any:
        if not self.slicing:
            ctx.served_by, ctx.served_in = self.version, threading.get_ident()
            self.pending.add(ctx)
        return forward(ctx, *inputs)

    def _around_backward(self, backward: Any) -> object:
        def run(ctx: Any, *grads: Any) -> Any:
            version = getattr(ctx, "served_by", None)
            if version is None:  # of a candidate, in a slice
                return backward(ctx, *grads)
            with self.gate.call():
                if version is self.version or self.lowered is None:
                    return backward(ctx, *grads)
            with self.gate.alone(wait=True):
                self.lowered.place(version)
                try:
                    (own,) = version.backwards
                    return own(ctx, *grads)
                finally:
                    self.place()

        return staticmethod(run)

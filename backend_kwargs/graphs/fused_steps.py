"""Steps of fused optimizers: they change parameters, but not the versions by which a change is noticed."""

import threading
import weakref
from collections.abc import Iterable

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

_lock = threading.Lock()
_copies: "weakref.WeakSet[CopyOfParameters]" = weakref.WeakSet()
_hooks: list[object] = []


class CopyOfParameters:
    """Something made of parameters, which is `stale` once a fused optimizer has changed one of them."""

    def watch(self, parameters: Iterable[torch.Tensor]) -> None:
        """Watch the steps of fused optimizers of these parameters, instead of others."""
        self.stale = False
        self.ids = frozenset(map(id, parameters))
        with _lock:
            _copies.add(self)
            if not _hooks:
                _hooks.append(register_optimizer_step_post_hook(_note_step))


@torch.compiler.disable  # type: ignore[untyped-decorator,unused-ignore]
def _note_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    fused = (group["params"] for group in optimizer.param_groups if group.get("fused"))
    changed = {id(parameter) for parameters in fused for parameter in parameters}
    if changed:
        with _lock:
            for each in _copies:
                each.stale = each.stale or not changed.isdisjoint(each.ids)

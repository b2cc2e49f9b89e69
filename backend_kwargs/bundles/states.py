"""The states of a CompiledModule: which call is allowed in which state, and the next state, as in AITune."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Literal

from backend_kwargs.errors import BackendKwargsError

Call = Literal["build", "activate", "deactivate", "deploy", "infer", "save", "to_dict"]


class State(Enum):
    """A state of a CompiledModule."""

    INIT = "init"
    ACTIVE = "active"
    INACTIVE = "inactive"
    CHECKPOINT_LOADED = "checkpoint_loaded"
    DEPLOYED = "deployed"


class StateError(BackendKwargsError, RuntimeError):
    """A call that is not allowed in the CompiledModule's state."""


@dataclass(frozen=True, slots=True)
class Cell:
    """The effect of one call in one state.

    `to` is the next state (the same state: the call has no effect), None if it raises `error`. `seed` quotes AITune's
    Backend; `why` is the reason for a deviation from it, "" if there is none.
    """

    to: State | None
    error: str = ""
    seed: str = ""
    why: str = ""


ONCE = "Cannot build {name} again: make another CompiledModule."
ONLY_ONCE = 'build: raise RuntimeError(f"Backend {self.name} build should be called only once")'
UNBUILT = "Cannot {call} {name} before it is built: call build() or load() first."
LEADS = "if self.state == BackendState.INIT: ... self.state = BackendState.ACTIVE"
ACTIVATES = "if self.state == BackendState.INACTIVE or self.state == BackendState.CHECKPOINT_LOADED: self._activate()"
INERT = "neither raises nor acts: no branch of it names this state"
LOADED_ONLY = (
    "if self.state != BackendState.CHECKPOINT_LOADED: raise RuntimeError(... should be loaded from a checkpoint)"
)
ONLY_LOADED = "Cannot deploy {name} in state {state!r}: save it, load the bundle, and deploy what load() returns."
NOT_READY = "if self.state != BackendState.ACTIVE and self.state != BackendState.DEPLOYED: raise RuntimeError"
READY = "After activating, the backend should be ready to do inference."
KEPT = "to_dict: if not self._orig_module: raise RuntimeError(... Please call build() first.)"
NO_SAVE = "AITune has no save(): its checkpoint is to_dict(), and save() is allowed where that is"
INIT, ACTIVE, INACTIVE, LOADED, DEPLOYED = State

TABLE: Mapping[Call, Mapping[State, Cell]] = MappingProxyType(
    {
        "build": {
            INIT: Cell(ACTIVE, seed=LEADS),
            ACTIVE: Cell(None, ONCE, ONLY_ONCE),
            INACTIVE: Cell(None, ONCE, ONLY_ONCE),
            LOADED: Cell(None, ONCE, ONLY_ONCE),
            DEPLOYED: Cell(None, ONCE, ONLY_ONCE),
        },
        "activate": {
            INIT: Cell(None, UNBUILT, "Cannot activate backend {self.name}, backend should be built first"),
            ACTIVE: Cell(ACTIVE, seed=INERT),
            INACTIVE: Cell(ACTIVE, seed=ACTIVATES),
            LOADED: Cell(ACTIVE, seed=ACTIVATES),
            DEPLOYED: Cell(
                None,
                "Cannot activate {name}: it is deployed, and ready as it is.",
                "Cannot activate backend {self.name}, backend is already deployed",
            ),
        },
        "deactivate": {
            INIT: Cell(None, UNBUILT, "Cannot deactivate backend {self.name}, backend should be built first"),
            ACTIVE: Cell(INACTIVE, seed="if self.state == BackendState.ACTIVE: ... self.state = BackendState.INACTIVE"),
            INACTIVE: Cell(INACTIVE, seed=INERT),
            LOADED: Cell(
                None,
                "Cannot deactivate {name}: it was loaded and not yet activated.",
                "Cannot deactivate backend {self.name}, backend has already been deployed",
                "raises too, but with the right reason: in this state nothing was deployed",
            ),
            DEPLOYED: Cell(
                None,
                "Cannot deactivate {name}: it is deployed, for good.",
                "After deploying ... Backend cannot be deactivated anymore.",
            ),
        },
        "deploy": {
            INIT: Cell(None, ONLY_LOADED, LOADED_ONLY),
            ACTIVE: Cell(None, ONLY_LOADED, LOADED_ONLY),
            INACTIVE: Cell(None, ONLY_LOADED, LOADED_ONLY),
            LOADED: Cell(DEPLOYED, seed="self._set_device(device) self._deploy() self.state = BackendState.DEPLOYED"),
            DEPLOYED: Cell(None, ONLY_LOADED, LOADED_ONLY),
        },
        "infer": {
            INIT: Cell(None, UNBUILT, NOT_READY),
            ACTIVE: Cell(ACTIVE, seed=READY),
            INACTIVE: Cell(None, "Cannot run {name}: it is inactive; call activate() first.", NOT_READY),
            LOADED: Cell(None, "Cannot run {name}: it is loaded; call activate() or deploy() first.", NOT_READY),
            DEPLOYED: Cell(DEPLOYED, seed="After deploying, the backend is ready to do inference."),
        },
        "to_dict": {
            INIT: Cell(None, UNBUILT, KEPT),
            ACTIVE: Cell(ACTIVE, seed=KEPT),
            INACTIVE: Cell(INACTIVE, seed=KEPT),
            LOADED: Cell(LOADED, seed=KEPT),
            DEPLOYED: Cell(DEPLOYED, seed=KEPT),
        },
        "save": {
            INIT: Cell(None, UNBUILT, KEPT, NO_SAVE),
            ACTIVE: Cell(ACTIVE, seed=KEPT, why=NO_SAVE),
            INACTIVE: Cell(INACTIVE, seed=KEPT, why=NO_SAVE),
            LOADED: Cell(LOADED, seed=KEPT, why=NO_SAVE),
            DEPLOYED: Cell(DEPLOYED, seed=KEPT, why=NO_SAVE),
        },
    }
)


def after(call: Call, state: State, name: str) -> State:
    """Return the next state of `call` in `state`; raise StateError if it is not allowed."""
    cell = TABLE[call][state]
    if cell.to is None:
        raise StateError(cell.error.format(call=call, name=name, state=state.value))
    return cell.to

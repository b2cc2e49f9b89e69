"""The states of a CompiledModule: which call is allowed in which state, and the next state, as in AITune."""

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import Literal

from backend_kwargs.errors import BackendKwargsError

Call = Literal["build", "activate", "deactivate", "deploy", "infer", "save"]


class State(Enum):
    """A state of a CompiledModule."""

    INIT = "init"
    ACTIVE = "active"
    INACTIVE = "inactive"
    CHECKPOINT_LOADED = "checkpoint_loaded"
    DEPLOYED = "deployed"


class StateError(BackendKwargsError, RuntimeError):
    """A call that is not allowed in the CompiledModule's state."""


ONCE = "Cannot build {name} again: make another CompiledModule."
UNBUILT = "Cannot {call} {name} before it is built: call build() or load() first."
ONLY_LOADED = "Cannot deploy {name} in state {state!r}: save it, load the bundle, and deploy what load() returns."
INIT, ACTIVE, INACTIVE, LOADED, DEPLOYED = State
ANY_BUILT = {state: state for state in (ACTIVE, INACTIVE, LOADED, DEPLOYED)}

# The next state of each call in each state (the same state: the call has no effect on it), or the error that it raises.
TABLE: Mapping[Call, Mapping[State, State | str]] = MappingProxyType(
    {
        "build": {INIT: ACTIVE, ACTIVE: ONCE, INACTIVE: ONCE, LOADED: ONCE, DEPLOYED: ONCE},
        "activate": {
            INIT: UNBUILT,
            ACTIVE: ACTIVE,
            INACTIVE: ACTIVE,
            LOADED: ACTIVE,
            DEPLOYED: "Cannot activate {name}: it is deployed, and ready as it is.",
        },
        "deactivate": {
            INIT: UNBUILT,
            ACTIVE: INACTIVE,
            INACTIVE: INACTIVE,
            LOADED: "Cannot deactivate {name}: it was loaded and not yet activated.",
            DEPLOYED: "Cannot deactivate {name}: it is deployed, for good.",
        },
        "deploy": {
            INIT: ONLY_LOADED,
            ACTIVE: ONLY_LOADED,
            INACTIVE: ONLY_LOADED,
            LOADED: DEPLOYED,
            DEPLOYED: ONLY_LOADED,
        },
        "infer": {
            INIT: UNBUILT,
            ACTIVE: ACTIVE,
            INACTIVE: "Cannot run {name}: it is inactive; call activate() first.",
            LOADED: "Cannot run {name}: it is loaded; call activate() or deploy() first.",
            DEPLOYED: DEPLOYED,
        },
        "save": {INIT: UNBUILT, **ANY_BUILT},
    }
)


def after(call: Call, state: State, name: str) -> State:
    """Return the next state of `call` in `state`; raise StateError if it is not allowed."""
    to = TABLE[call][state]
    if isinstance(to, str):
        raise StateError(to.format(call=call, name=name, state=state.value))
    return to

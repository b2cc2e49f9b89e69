"""The states of a CompiledModule, cell by cell of its table, on real modules."""

import pytest

import backend_kwargs as bk
from backend_kwargs.bundles.module import TABLE, State, StateError

CELLS = [(call, state) for call in TABLE for state in State]
# What AITune's Backend does in each state, in its own words, in the order of State.
ACTIVATES = "if self.state == BackendState.INACTIVE or self.state == BackendState.CHECKPOINT_LOADED: self._activate()"
INERT = "neither raises nor acts: no branch of it names this state"
ONLY_ONCE = 'build: raise RuntimeError(f"Backend {self.name} build should be called only once")'
LOADED_ONLY = (
    "if self.state != BackendState.CHECKPOINT_LOADED: raise RuntimeError(... should be loaded from a checkpoint)"
)
NOT_READY = "if self.state != BackendState.ACTIVE and self.state != BackendState.DEPLOYED: raise RuntimeError"
KEPT = "to_dict: if not self._orig_module: raise RuntimeError(... Please call build() first.)"
AITUNE = {
    "build": ["if self.state == BackendState.INIT: ... self.state = BackendState.ACTIVE", *[ONLY_ONCE] * 4],
    "activate": [
        "Cannot activate backend {self.name}, backend should be built first",
        INERT,
        ACTIVATES,
        ACTIVATES,
        "Cannot activate backend {self.name}, backend is already deployed",
    ],
    "deactivate": [
        "Cannot deactivate backend {self.name}, backend should be built first",
        "if self.state == BackendState.ACTIVE: ... self.state = BackendState.INACTIVE",
        INERT,
        # Ours says the right reason: in this state nothing was deployed.
        "Cannot deactivate backend {self.name}, backend has already been deployed",
        "After deploying ... Backend cannot be deactivated anymore.",
    ],
    "deploy": [
        *[LOADED_ONLY] * 3,
        "self._set_device(device) self._deploy() self.state = BackendState.DEPLOYED",
        LOADED_ONLY,
    ],
    "infer": [
        NOT_READY,
        "After activating, the backend should be ready to do inference.",
        NOT_READY,
        NOT_READY,
        "After deploying, the backend is ready to do inference.",
    ],
    "save": [KEPT] * 5,  # it has no save(): its checkpoint is to_dict(), and save() is allowed where that is
}


@pytest.fixture
def in_state(module, x, bundle_of_eager):
    """Return a function that makes a CompiledModule of the backend eager in a given state."""

    def make(state):
        if state in (State.CHECKPOINT_LOADED, State.DEPLOYED):
            made = bk.CompiledModule.load(bundle_of_eager, module)
            if state is State.DEPLOYED:
                made.deploy(None)
            return made
        made = bk.CompiledModule(bk.CompileConfig(backend="eager"))
        if state is not State.INIT:
            made.build(module, [x])
        if state is State.INACTIVE:
            made.deactivate()
        return made

    return make


@pytest.mark.parametrize(("call", "state"), CELLS, ids=[f"{call} in {state.value}" for call, state in CELLS])
def test_each_cell(call, state, in_state, module, x, tmp_path):
    """Each call leads to the state in its cell, or raises the error there and changes nothing."""
    made, to = in_state(state), TABLE[call][state]
    calls = {
        "build": lambda: made.build(module, [x]),
        "activate": made.activate,
        "deactivate": made.deactivate,
        "deploy": lambda: made.deploy(None),
        "infer": lambda: made(x),
        "save": lambda: made.save(tmp_path / "bundle"),
    }
    assert made.state is state
    if isinstance(to, State):
        calls[call]()
        assert made.state is to
        return
    with pytest.raises(StateError) as raised:
        calls[call]()
    assert str(raised.value) == to.format(call=call, name="CompiledModule", state=state.value)
    assert made.state is state


@pytest.mark.parametrize(("call", "state"), CELLS, ids=[f"{call} in {state.value}" for call, state in CELLS])
def test_each_cell_is_as_in_aitune(call, state):
    """A call raises where AITune's raises, and there alone."""
    aitune = AITUNE[call][[*State].index(state)]
    raises = "raise RuntimeError" in aitune or aitune.startswith("Cannot") or "cannot be" in aitune
    if aitune is not KEPT:
        assert isinstance(TABLE[call][state], str) == raises


def test_an_error_of_state_is_a_runtime_error_as_aitune_has_it(x):
    with pytest.raises(RuntimeError):
        bk.CompiledModule()(x)


@pytest.mark.parametrize(("state", "active"), [(state, state is State.ACTIVE) for state in State], ids=str)
def test_is_active_in_state_active_alone(in_state, state, active):
    assert in_state(state).is_active is active


def test_a_failed_build_leaves_it_as_it_was_and_may_be_tried_again(module, x):
    """A failed build does not change the state, and can be repeated."""
    made = bk.CompiledModule(bk.CompileConfig(backend="eager"))
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes"):
        made.build(module, [x[:, :3]])
    assert (made.state, made.device) == (State.INIT, None)
    assert made.build(module, [x]).state is State.ACTIVE

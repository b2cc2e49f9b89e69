"""The states of a CompiledModule, cell by cell of its table, on real modules."""

import pytest

import backend_kwargs as bk
from backend_kwargs.bundles.states import TABLE, State, StateError

CELLS = [(call, state) for call in TABLE for state in State]


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
    """Each call leads to the state of its cell, or raises the error of its cell and changes nothing."""
    made, cell = in_state(state), TABLE[call][state]
    calls = {
        "build": lambda: made.build(module, [x]),
        "activate": made.activate,
        "deactivate": made.deactivate,
        "deploy": lambda: made.deploy(None),
        "infer": lambda: made(x),
        "to_dict": made.to_dict,
        "save": lambda: made.save(tmp_path / "bundle"),
    }
    assert made.state is state
    if cell.to is not None:
        calls[call]()
        assert made.state is cell.to
        return
    with pytest.raises(StateError) as raised:
        calls[call]()
    assert str(raised.value) == cell.error.format(call=call, name="CompiledModule", state=state.value)
    assert made.state is state


@pytest.mark.parametrize(("call", "state"), CELLS, ids=[f"{call} in {state.value}" for call, state in CELLS])
def test_each_cell_quotes_the_seed(call, state):
    """Each cell quotes what AITune does."""
    assert TABLE[call][state].seed


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

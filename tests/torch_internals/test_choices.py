"""What is chosen in place of torch's timing, for wrappers of Triton kernels as Inductor's generated code makes them."""

import inspect
import threading
from importlib.util import find_spec

import pytest
from torch._inductor import config
from torch._inductor.runtime import triton_heuristics
from torch._inductor.runtime.hints import DeviceProperties, HeuristicType
from torch._inductor.select_algorithm import get_algorithm_selector_cache

from backend_kwargs.auto.pinned import PinnedChooser, note_configurations
from backend_kwargs.errors import BackendKwargsError
from backend_kwargs.facts import Pins
from backend_kwargs.torch_internals.choices import chosen_by

needs_triton = pytest.mark.skipif(not find_spec("triton"), reason="Triton is not installed")


def test_the_selector_asks_first():
    """Torch's selector has a list of functions that it asks, and one that times, which takes the choices by name."""
    selector = get_algorithm_selector_cache()
    assert isinstance(selector.preprocessing_fns, list)
    assert "choices" in inspect.signature(selector.do_autotuning).parameters


def test_kernels_of_pinned_code_have_code_of_their_own():
    """By this option pinned kernels differ from those that the process may have loaded with other configurations."""
    assert config.write_are_deterministic_algorithms_enabled is True


def test_all_is_put_back():
    """Leaving the context leaves torch as it was."""
    selector = get_algorithm_selector_cache()
    before = [*vars(selector)], selector.preprocessing_fns, triton_heuristics.cached_autotune
    with chosen_by(PinnedChooser(Pins("k.lock"))):
        assert triton_heuristics.cached_autotune is not before[2]
    assert ([*vars(selector)], selector.preprocessing_fns, triton_heuristics.cached_autotune) == before


# ---- Triton's wrappers


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    """Torch's wrappers set this variable for good where it is not set."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def configured(size):
    return triton_heuristics.Config({"XBLOCK": size}, num_warps=4, num_stages=1)


def made(pins, *, strict=False, descends=False):
    """Return the wrapper of a kernel that has two configurations, as generated code makes it."""
    import triton
    import triton.language as tl

    @triton.jit
    def triton_poi_fused_add_0(a, XBLOCK: tl.constexpr):  # noqa: N803 - as Inductor names it
        tl.store(a, 1.0)

    meta = {"device": DeviceProperties("cuda", 0, 132, 90), "signature": {"a": "*fp32"}, "constants": {}}
    with chosen_by(PinnedChooser(pins, strict=strict)):
        return triton_heuristics.cached_autotune(
            {"x": 64},
            [configured(32), configured(64)],
            triton_meta=meta,
            heuristic_type=HeuristicType.POINTWISE,
            filename=__file__,
            inductor_meta={"coordinate_descent_tuning": descends, "autotune_local_cache": False},
        )(triton_poi_fused_add_0)


def sizes(wrapper):
    return [each.kwargs["XBLOCK"] for each in wrapper.configs]


@pytest.fixture
def noted():
    """The key of the kernel, as it is noted while a lock is written."""
    pins = Pins("k.lock", phase="timing")
    assert sizes(made(pins)) == [32, 64]
    ((key, name, _),) = pins.uncalled
    assert (name, note_configurations(pins), pins.configurations) == ("triton_poi_fused_add", [name], {})
    assert pins.uncalled == []
    return key


@needs_triton
@pytest.mark.parametrize("size", [pytest.param(64, id="a given one"), pytest.param(128, id="where descent led")])
def test_a_configuration_of_the_lock(noted, size):
    """A kernel has the lock's configuration alone, and does not descend from it."""
    chosen = {"XBLOCK": size, "num_warps": 8 if size == 128 else 4, "num_stages": 1}
    wrapper = made(Pins("k.lock", configurations={noted: chosen}), strict=True, descends=True)
    assert [
        {**each.kwargs, "num_warps": each.num_warps, "num_stages": each.num_stages} for each in wrapper.configs
    ] == [chosen]
    assert not wrapper.inductor_meta["coordinate_descent_tuning"]


@needs_triton
def test_a_configuration_that_the_lock_lacks():
    """It is the first of torch's heuristic, or an error under `strict`."""
    assert sizes(made(Pins("k.lock"))) == [32]
    with pytest.raises(BackendKwargsError) as raised:
        made(Pins("k.lock"), strict=True)
    assert (
        str(raised.value)
        == "Lock 'k.lock' has no configuration for triton_poi_fused_add: pin again, or leave out 'strict'."
    )


@needs_triton
def test_a_configuration_that_the_kernel_does_not_take(noted):
    """A lock that names another keyword is refused."""
    with pytest.raises(BackendKwargsError) as raised:
        made(Pins("k.lock", configurations={noted: {"YBLOCK": 1, "num_warps": 4, "num_stages": 1}}))
    assert str(raised.value) == (
        "Lock 'k.lock' has a configuration that triton_poi_fused_add does not take: {'YBLOCK': 1, 'num_warps': 4, "
        "'num_stages': 1}."
    )


@needs_triton
def test_other_threads_choose_as_always():
    """What another thread makes meanwhile has all of its configurations."""
    found = []
    with chosen_by(PinnedChooser(Pins("k.lock"), strict=True)):
        replaced = triton_heuristics.cached_autotune

        def elsewhere():
            both = [configured(32), configured(64)]
            found.append(replaced({"x": 64}, both, {}, HeuristicType.POINTWISE, filename=__file__))

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert [each.__qualname__ for each in found] == ["cached_autotune.<locals>.decorator"]

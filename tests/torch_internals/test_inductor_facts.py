"""Facts about Inductor: its options, its choices of kernels, its code, its caches, and Triton."""

import threading

import pytest
import torch
from torch._inductor import config
from torch.compiler._cache import CacheArtifactManager

from backend_kwargs.torch_internals import (
    caches,
    choices,
    compile_fx,
    cudagraphs,
    inductor_code,
    inductor_config,
    pattern_matcher,
    regions,
    triton,
)
from tests import forks

# --- options --------------------------------------------------------------------------------------------------------


def test_the_source_of_the_options_is_a_file():
    """It assigns an option by its name."""
    assert "\nmax_fusion_size = " in inductor_config.source()


def test_an_alias_leads_to_the_entry_that_is_read():
    """Each alias of an option ends at an entry with none, and an entry without is its own target."""
    entries = inductor_config.entries()
    targets = [inductor_config.target_of(entry) for entry in entries.values()]
    assert {target.alias for target in targets} == {None}
    assert inductor_config.target_of(entries["max_fusion_size"]) is entries["max_fusion_size"]


def test_options_in_groups_have_values():
    """A name with a dot is that of a group's attribute."""
    with inductor_config.patched({"triton.cudagraphs": True}):
        assert inductor_config.value("triton.cudagraphs") is True
    assert inductor_config.value("triton.cudagraphs") is False


def test_torch_clones_live_outputs_if_asked():
    """torch 2.14 and later copies live results of CUDA graphs if an option says so, by default it does not."""
    theirs = inductor_config.CLONING in inductor_config.entries()
    assert theirs is (tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14))
    assert inductor_config.clones_live_outputs({inductor_config.CLONING: "user_visible"}) is theirs
    assert not inductor_config.clones_live_outputs({})


def test_options_hold_in_their_thread_and_defaults_in_each():
    """A thread started within sees a replaced default, and no patched option (since torch 2.12)."""
    seen = []

    def look():
        thread = threading.Thread(target=lambda: seen.append(config.max_fusion_size))
        thread.start()
        thread.join()

    with inductor_config.defaults_replaced({"max_fusion_size": 3}):
        look()
    look()
    assert (seen, config.max_fusion_size) == ([3, 64], 64)


# --- kernels --------------------------------------------------------------------------------------------------------


def test_timers_are_methods_of_the_benchmarker():
    """Its class has them, and no instance attribute hides them."""
    assert all(callable(getattr(type(choices.benchmarker), name)) for name in choices.TIMERS)
    assert not {*choices.TIMERS} & {*vars(choices.benchmarker)}


def test_the_backward_graphs_options():
    """They are none where torch keeps them itself, which it does since 2.13."""
    kept = torch.__version__ >= "2.13"
    assert bool(compile_fx.lost_cpp_wrapper_options()) is not kept


def test_a_region_has_a_name_since_2_12():
    """compile_fx takes the name as an argument, in torch 2.11 not."""
    assert compile_fx.NAMES_REGIONS is (torch.__version__ >= "2.12")


@pytest.mark.parametrize("kind", [compile_fx.InductorWrapper, compile_fx.AheadWrapper])
def test_torch_compiles_wrapper(kind):
    """It has the options of its mode."""
    assert isinstance(kind(None, {}, None).config, dict)


def test_graph_passes_know_whether_a_graph_is_for_inference():
    """A pass of the class for it gets to know, and a plain one does not (torch 2.11 has one class)."""

    class Plain(pattern_matcher.custom_graph_pass.CustomGraphPass):
        def __call__(self, graph):
            pass

        def uuid(self):
            return None

    assert not pattern_matcher.takes_is_inference(Plain())


# --- code -----------------------------------------------------------------------------------------------------------


def test_generated_modules_can_be_forgotten():
    """Compiled code is a module in Inductor's list until it is forgotten there."""
    from torch._inductor.codecache import PyCodeCache

    path = PyCodeCache.write("value = 7\n")
    module = PyCodeCache.load_by_key_path(*path)
    assert module in inductor_code.generated_modules()
    inductor_code.forget_module(module)
    assert module not in inductor_code.generated_modules()
    inductor_code.forget_module(module)  # once more changes nothing


def test_the_data_pointers_function_has_an_address():
    """It is a number above 0, as text."""
    assert int(inductor_code.DATA_POINTER_FUNCTION) > 0


def test_torch_has_stand_ins_for_cutlass():
    """They are packages in one folder."""
    assert {path.name for path in inductor_code.CUTLASS_MOCKS.iterdir()} >= {"cuda", "pydot", "scipy"}


def test_links_to_cutlass_are_in_inductors_cache(monkeypatch, tmp_path):
    """Their folder follows the cache's."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert inductor_code.cutlass_links() == tmp_path / "torch_cutlass"


def test_artifacts_are_recorded_apart():
    """What is recorded within is not there afterwards, and what was there is."""
    with caches.artifacts_apart():
        assert CacheArtifactManager.empty() if hasattr(CacheArtifactManager, "empty") else True
        CacheArtifactManager.record_artifact("inductor", "planted", b"planted")
        assert "planted" in str(CacheArtifactManager.serialize())
    assert "planted" not in str(CacheArtifactManager.serialize())


def test_trees_of_a_new_thread():
    """A thread that did not import torch has containers too, its own."""
    found = []
    thread = threading.Thread(target=lambda: found.append(cudagraphs.trees_of_thread()))
    thread.start()
    thread.join()
    assert isinstance(found[0], dict)
    assert found[0] is not cudagraphs.trees_of_thread()


THREAD_THAT_ENDS = """
import gc, os, sys, threading, time
import torch
assert "torch._inductor.cudagraph_trees" not in sys.modules
{here}
found = []
def made():
    from backend_kwargs.torch_internals import cudagraphs
    found.append(cudagraphs.trees_of_thread())
thread = threading.Thread(target=made)
thread.start()
number = thread.native_id
thread.join()
while os.path.exists(f"/proc/self/task/{{number}}"):  # Python's part ends earlier
    time.sleep(0.01)
gc.collect()
print(sys.getrefcount(found[0]))  # the list's reference, and that of the call
"""


@pytest.mark.parametrize(
    "here", ["", "import torch._inductor.cudagraph_trees"], ids=["first import", "imported before"]
)
def test_a_thread_that_ends_frees_nothing_of_others(here):
    """Containers that another one holds outlive the thread that made them: torch 2.11 lacks a reference to them."""
    assert forks.run("-c", THREAD_THAT_ENDS.format(here=here)).stdout == "2\n"


def test_own_trees_are_gone_afterwards():
    """The thread has other containers within, in the same dictionary."""
    containers = cudagraphs.trees_of_thread()
    before = dict(containers)
    with cudagraphs.own_trees([7]) as begin:
        begin()
        assert [*containers] == [7]
    assert containers == before


# --- Triton ---------------------------------------------------------------------------------------------------------


def test_what_triton_needs():
    """Without a GPU there is no TMA."""
    assert isinstance(triton.has_triton(), bool)
    assert torch.cuda.is_available() or not triton.has_triton_tma_device()


def test_kernels_of_the_user_have_numbers():
    """A node's keywords name a kernel and its constants by numbers in one table."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    kernel, constants = object(), {"BLOCK": 8}
    kwargs = {
        "kernel_idx": kernel_side_table.add_kernel(kernel),
        "constant_args_idx": kernel_side_table.add_constant_args(constants),
    }
    assert triton.kernel_and_constants(kwargs)[0] is kernel
    assert triton.kernel_and_constants(kwargs)[1] == constants


# --- regions --------------------------------------------------------------------------------------------------------


def test_regions_have_names_since_2_12():
    """torch reads a region's name from its annotation, and nothing that it does not know."""
    known = regions.regional_inductor("inductor_region")
    assert (known is not None) is (torch.__version__ >= "2.12")
    assert regions.regional_inductor("no_such_argument") is None


def test_nothing_was_recorded_on_a_device_that_was_not_used():
    """There is no manager of trees for it."""
    assert cudagraphs.recordings("0/0", 7, backward=False) is None
    cudagraphs.trees_of_thread().pop(7, None)  # before 2.14 torch makes an empty container

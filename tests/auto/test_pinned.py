"""What is compiled by a lock: each part of its keys counts, and what it lacks, or should not name, is said."""

import math
import re
import threading
from dataclasses import replace

import pytest
import torch
from torch._inductor.runtime.benchmarking import benchmarker
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import backend_kwargs as bk
from backend_kwargs.auto.lock import pinned_machine, write_lock
from backend_kwargs.auto.machine import machine
from backend_kwargs.auto.pinned import UNTIMED, PinnedChooser, compile_pinned, entry_of, untimed
from backend_kwargs.backends import CapturedGraph
from backend_kwargs.errors import BackendKwargsError
from backend_kwargs.facts import PinnedKernel, Pins
from backend_kwargs.facts.decision import Decision
from backend_kwargs.graphs.determinism import ASK
from backend_kwargs.options.catalogue import inductor_options
from backend_kwargs.torch_internals.choices import Site, chosen_by

SITE = Site(("cpu float32 2x3", "cpu float32 3x4"), "cpu float32 2x4", ("cpp_gemm", "mm"), library=1)


def chosen(pins, site, *, strict=False):
    """Return the kernel that is chosen, or the error."""
    try:
        return PinnedChooser(pins, strict=strict).kernel_at(site)
    except BackendKwargsError as error:
        return str(error)


def timed(site=SITE, at=0):
    pins = Pins("k.lock", phase="timing")
    PinnedChooser(pins).was_timed(site, at)
    pins.phase = "serving"
    return pins


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"inputs": SITE.inputs[::-1]}, id="inputs"),
        pytest.param({"output": "cpu bfloat16 2x4"}, id="output"),
        pytest.param({"kernels": SITE.kernels[::-1]}, id="order of kernels"),
        pytest.param({"kernels": (*SITE.kernels, "cpp_gemm #2")}, id="number of kernels"),
    ],
)
def test_another_site(changed):
    """A kernel is chosen for its site alone: elsewhere it is the library's, or an error under `strict`."""
    other = replace(SITE, **changed)
    assert chosen(timed(), SITE) == 0
    assert chosen(timed(), other) == other.library
    assert chosen(timed(), other, strict=True) == (
        f"Lock 'k.lock' has no kernel for {', '.join(other.inputs)}, out of {', '.join(other.kernels)}: pin again, or "
        "leave out 'strict'."
    )


def test_a_kernel_that_the_site_lacks():
    """A lock that was edited to name no kernel of its site is refused with those that it has."""
    pins = timed()
    pins.kernels = {key: replace(each, kernel="cutlass") for key, each in pins.kernels.items()}
    assert chosen(pins, SITE) == (
        "Lock 'k.lock' names kernel 'cutlass' for cpu float32 2x3, cpu float32 3x4, which has cpp_gemm, mm: pin again."
    )


PINNED = {"reproducible": "pinned", "lock": "k.lock"}


def bmm_by(pins, **options):
    """Compile a product by a lock that has no kernel for it; return the kernel that serves, or the error."""
    inputs = [torch.randn(4, 16, 32), torch.randn(4, 32, 16)]
    tuned = {"max_autotune": True, "max_autotune_gemm_backends": "CPP,ATEN"}
    backend = bk.make_backend("tmpl-inductor", tuned, **options).bind("test", PINNED)
    graph = CapturedGraph(make_fx(lambda a, b: (torch.bmm(a, b),))(*inputs), inputs, pins=pins)

    def run():
        with torch.no_grad():
            (result,) = backend.compile(graph).call(*inputs)
        torch.testing.assert_close(result, torch.bmm(*inputs))

    try:
        _, (code,) = run_and_get_code(run)
    except Exception as error:  # noqa: BLE001 - torch wraps it in its own
        return str(error)
    return "the library's" if "extern_kernels.bmm(" in code else "a template"


LACKS = (
    "Lock 'k.lock' has no kernel for cpu torch.float32 4x16x32 strides 512x32x1 offset 0, cpu torch.float32 4x32x16 "
    "strides 512x16x1 offset 0, out of bmm, [^,]*: pin again, or leave out 'strict'."
)


@pytest.mark.parametrize(
    ("just_written", "options", "kernel"),
    [
        pytest.param(False, {}, "^the library's$", id="not strict"),
        pytest.param(False, {"strict": True}, LACKS, id="strict"),
        pytest.param(True, {"strict": False}, LACKS, id="just written"),
    ],
)
def test_a_kernel_that_the_lock_lacks(just_written, options, kernel):
    """It is the library's, or an error under `strict` and for a lock that was just written, which has all."""
    found = bmm_by(Pins("k.lock", pinned_machine(machine()), strict=just_written), **options)
    assert re.search(kernel, found), found


@pytest.mark.parametrize("phase", ["serving", "timing"])
def test_a_graph_of_another_machine(phase):
    """What was pinned elsewhere neither serves here nor is added to."""
    pins = Pins("k.lock", pinned_machine(machine()) | {"threads": 999}, phase=phase)
    assert bmm_by(pins) == (
        f"Lock 'k.lock' was written for threads 999 (here {torch.get_num_threads()}): write one here by "
        "`backend-kwargs pin`, or bk.pin(...)."
    )


def test_a_lock_that_says_no_machine():
    """It serves nowhere, since nobody knows where it was written; one that is written notes this machine."""
    assert bmm_by(Pins("k.lock")).startswith("Lock 'k.lock' was written for threads None (here ")
    rest_of(pins := Pins("k.lock", phase="timing"))
    assert pins.machine == pinned_machine(machine())


GIVEN = [{"XBLOCK": 32, "num_warps": 4}, {"XBLOCK": 64, "num_warps": 8, "maxnreg": 128}]


@pytest.mark.parametrize(
    ("pinned", "strict", "taken"),
    [
        pytest.param({"XBLOCK": 16, "maxnreg": 64}, True, {"XBLOCK": 16, "maxnreg": 64}, id="of any one's keywords"),
        pytest.param(None, False, GIVEN[0], id="none"),
        pytest.param(
            None,
            True,
            "Lock 'k.lock' has no configuration for triton_poi: pin again, or leave out 'strict'.",
            id="none, strict",
        ),
        pytest.param(
            {"YBLOCK": 16},
            False,
            "Lock 'k.lock' has a configuration that triton_poi does not take: {'YBLOCK': 16}.",
            id="another keyword",
        ),
    ],
)
def test_a_configuration(pinned, strict, taken):
    """That of the lock if the kernel takes it, else the first of torch's, or an error under `strict`."""
    pins = Pins("k.lock", configurations={} if pinned is None else {"key": pinned})
    try:
        found = PinnedChooser(pins, strict=strict).configuration("key", "triton_poi", GIVEN)
    except BackendKwargsError as error:
        found = str(error)
    assert found == taken


def test_all_are_timed_while_a_lock_is_written():
    """Under `strict` too: what it lacks is what is to be written."""
    chooser = PinnedChooser(Pins("k.lock", phase="timing"), strict=True)
    assert chooser.kernel_at(SITE) is None
    assert chooser.configuration("key", "triton_poi", GIVEN) is None


def test_a_kernel_is_noted_with_its_site():
    """What was the fastest is written with the layouts and how many there were, for who reads the lock."""
    (noted,) = timed(SITE, 1).kernels.values()
    assert noted == PinnedKernel("mm", SITE.inputs, SITE.output, 2)


KERNEL = PinnedKernel("mm", (), "", 2)
LOCKS = {
    "decision": Pins("", decisions={"a": Decision("a", "", "default")}),
    "kernel": Pins("", kernels={"a": KERNEL}),
    "kernel's name": Pins("", kernels={"a": replace(KERNEL, kernel="cpp_gemm")}),
    "site": Pins("", kernels={"b": KERNEL}),
    "configuration": Pins("", configurations={"a": {"XBLOCK": 1}}),
    "configuration's value": Pins("", configurations={"a": {"XBLOCK": 2}}),
}


def test_each_lock_has_its_own_entries_in_caches():
    """Code that a bundle keeps under one lock is not found under another, whichever part of it differs."""
    found = [entry_of(each)["autotune_lookup_table"] for each in (Pins(""), *LOCKS.values())]
    assert len({str(each) for each in found}) == len(found)
    both = {"a": KERNEL, "b": KERNEL}
    one, other = Pins("one", kernels=both), Pins("other", kernels=dict(reversed(both.items())))
    assert entry_of(one) == entry_of(other)


def rest_of(pins, **options):
    """Return the options under which a graph is compiled by a lock."""
    gm, x = make_fx(torch.sin)(torch.ones(3)), torch.ones(3)
    given = {"reproducible": "pinned", "lock": "k", **options}
    following = lambda graph, rest: untimed(graph, rest) if "lock" in rest else rest  # noqa: E731
    return compile_pinned(CapturedGraph(gm, [x], pins=pins), given, following)


def test_options_that_time():
    """They are off whatever is asked, no cache answers, and the options of the lock are taken out."""
    rest = rest_of(Pins("", phase="timing"), benchmark_fusion=True, debug=True)
    assert {name: rest[name] for name in UNTIMED if name in rest} == {
        name: value for name, value in UNTIMED.items() if name in rest
    }
    assert rest.keys() >= {"benchmark_fusion", "debug", "autotune_lookup_table"}
    assert (rest["fx_graph_cache"], rest["fx_graph_remote_cache"]) == (False, False)
    assert rest["write_are_deterministic_algorithms_enabled"] is False  # so that its kernels are no other compile's
    assert not {"reproducible", "lock", "compile_threads"} & rest.keys()


@pytest.mark.parametrize(
    "name",
    [
        "shape_padding",
        "benchmark_fusion",
        "benchmark_combo_kernel",
        "benchmark_epilogue_fusion",
        "pipeline_max_autotune_gemm",
        "autotune_in_subproc",
        "dynamic_scale_rblock",
        "triton.multi_kernel",
    ],
)
def test_each_option_that_times(name):
    """It is off whatever the user asked for, where this torch has it."""
    if name not in inductor_options():
        pytest.skip(f"this torch has no {name}")
    assert not rest_of(Pins("", phase="timing"), **{name: True})[name]


def test_a_bundle_keeps_what_caches_would():
    """What stands in place of Inductor's compile_fx has caches of its own, and chooses by the lock."""
    kept = []

    def compile_fx(inner, gm, example_inputs):
        kept.append(benchmarker_refuses())
        return gm

    def following(graph, rest):
        assert not {"fx_graph_cache", "fx_graph_remote_cache"} & untimed(graph, rest).keys()
        graph.compile_fx(None, graph.gm, graph.example_inputs)
        return rest

    gm, x = make_fx(torch.sin)(torch.ones(3)), torch.ones(3)
    pins = Pins("k.lock", pinned_machine(machine()))
    graph = CapturedGraph(gm, [x], compile_fx=compile_fx, pins=pins)
    compile_pinned(graph, {"reproducible": "pinned", "lock": "k.lock"}, following)
    assert kept == [True]


def benchmarker_refuses():
    """Return whether torch's timer raises, as it does where a lock chooses."""
    try:
        benchmarker.benchmark_cpu(lambda: None, warmup=0, rep=0)
    except BackendKwargsError:
        return True
    return False


def test_a_race_for_a_lock():
    """It is the race without a lock, so that its decision is the store's; no number of races ends it."""
    raced = {"shape_padding": True, "most_races": 1000, "process_budget_s": math.inf}
    assert rest_of(Pins("", phase="deciding"), shape_padding=True) == raced


def test_kernels_of_a_gpu_are_compiled_in_this_process():
    """Torch's workers would not know of the lock."""
    with FakeTensorMode():
        x = torch.empty(3, device="cuda")
    graph = CapturedGraph(make_fx(torch.sin)(torch.ones(3)), [x], pins=Pins("", phase="timing"))
    assert untimed(graph, {"lock": "k", "compile_threads": 8})["compile_threads"] == 1


def test_a_graph_gets_the_lock_that_is_named(tmp_path):
    """What follows, such as the race and Inductor, asks the graph and not the file."""
    path = tmp_path / "k.lock"
    write_lock(Pins("", pinned_machine(machine()), kernels={"a": KERNEL}), path)
    graph, given = CapturedGraph(make_fx(torch.sin)(torch.ones(3)), [torch.ones(3)]), []
    compile_pinned(graph, {"reproducible": "pinned", "lock": str(path)}, lambda graph, rest: given.append(graph.pins))
    assert [(each.label, each.kernels) for each in given] == [(str(path), {"a": KERNEL})]


def test_a_lock_alone():
    """Without `reproducible` it is not read, and Inductor does not get it."""
    graph = CapturedGraph(make_fx(torch.sin)(torch.ones(3)), [torch.ones(3)])
    assert untimed(graph, {"lock": "k", "debug": True}) == {"debug": True}


@pytest.mark.parametrize(("phase", "raises"), [("serving", True), ("timing", False)])
def test_nothing_else_is_timed(phase, raises):
    """While a lock serves, torch's timer raises with the lock's name, in this thread alone."""
    results = []

    def measured():
        try:
            results.append(benchmarker.benchmark_cpu(lambda: None, warmup=0, rep=0) >= 0)
        except BackendKwargsError as error:
            results.append(str(error))

    with chosen_by(PinnedChooser(Pins("k.lock", phase=phase))):
        measured()
        thread = threading.Thread(target=measured)
        thread.start()
        thread.join()
    why = "Inductor would time kernels that lock 'k.lock' cannot name: leave out what asks for it."
    assert results == [why if raises else True, True]


def test_code_that_adds_atomically_is_refused():
    """The code of each lowered graph is looked at when it is there."""

    class Compiled:
        source_code = "tl.atomic_add(p, x)"

    compiling = PinnedChooser(Pins("k.lock")).wrap_inner_compile(lambda gm: Compiled())
    with pytest.raises(BackendKwargsError) as raised:
        compiling(make_fx(torch.sin)(torch.ones(3)))
    assert str(raised.value) == f"The code that Inductor generates for a graph adds atomically: {ASK}."


# ---- decisions of a lock


class ForAnyGraph(dict):
    """Decisions that have one for each key."""

    def get(self, key, default=None):
        return next(iter(self.values()), default)


def compiled_by(*decisions, strict=False):
    """Compile a graph under auto by a lock that has such a decision for it; return what was chosen, or the error."""
    backend = bk.make_backend("tmpl-inductor:auto", candidates=["max_autotune"]).bind("test", PINNED)
    pins = Pins("k.lock", pinned_machine(machine()), ForAnyGraph(enumerate(decisions)), strict=strict)
    try:
        compiled = backend.compile(CapturedGraph(make_fx(torch.sin)(torch.ones(3)), [torch.ones(3)], pins=pins))
    except BackendKwargsError as error:
        return str(error)
    return compiled.facts.decision.winner


@pytest.mark.parametrize(
    ("decision", "named"),
    [
        pytest.param(Decision("", "", "freezing", {"freezing": True}), "freezing", id="not permitted"),
        pytest.param(Decision("", "", "max_autotune", {"freezing": True}), "max_autotune", id="other options"),
        pytest.param(Decision("", "", "default", compiler="tvm"), "tvm", id="another compiler"),
    ],
)
def test_a_decision_that_the_backend_cannot_make(decision, named):
    """A lock may choose only what the backend's own options permit."""
    assert compiled_by(decision) == (f"Lock 'k.lock' names '{named}', which this backend cannot compile: pin again.")


def test_a_decision_for_eager():
    """The graph itself runs."""
    assert compiled_by(Decision("", "", "eager")) == "eager"


def test_a_lock_that_was_just_written_is_strict():
    """Then a graph without a decision is an error, without the option `strict`."""
    assert compiled_by(strict=True) == (
        "Lock 'k.lock' has no decision for a graph of float32 3 with gradients: pin it too (add=True), or leave out "
        "'strict'."
    )

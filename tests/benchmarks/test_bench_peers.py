"""The table of peers."""

import pytest

from backend_kwargs import list_templates, register_template
from backend_kwargs.errors import BackendKwargsError
from benchmarks.workloads import peers as table
from benchmarks.workloads.cases import CASES
from benchmarks.workloads.peers import (
    Peer,
    UnavailableError,
    globs_of,
    numerics,
    peers,
    resolved,
    sharing,
    tunes,
    why_not,
)

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


def test_every_template_and_mode_is_a_peer():
    """Every template and every mode of torch.compile is a peer."""
    clones = {"reduce-overhead+clone", "max-autotune+clone"}
    autos = {"tmpl-inductor:auto", "auto-no-rewrites", "auto-full"}
    others = {"tvm-untuned", "tvm-tuned", "openvino-native", "onnxruntime"}
    wanted = {"eager", "eager+graph", "aoti", *MODES, *clones, *autos, *others}
    assert peers().keys() == wanted | {f"tmpl-inductor:{name}" for name in list_templates()}


def test_equal_options_share_a_compile():
    """A mode and a template with equal options share one cold compile."""
    found = sharing(list(peers().values()))
    assert found["tmpl-inductor:default"] == "default"
    assert found["tmpl-inductor:freezing"] == "tmpl-inductor:freezing"
    register_template("tuned_as_the_mode", resolved(peers()["max-autotune"]))
    twin = Peer("twin", "template", "tmpl-inductor:tuned_as_the_mode")
    assert sharing([peers()["max-autotune"], twin])["twin"] in ("max-autotune", "twin")


def test_template_that_cannot_act_here_is_unavailable():
    """A template without effect here is unavailable, since its fallback would be timed under its name."""
    with pytest.raises(UnavailableError, match=r"^Template 'cutlass' cannot work here: "):
        resolved(peers()["tmpl-inductor:cutlass"])


@pytest.mark.parametrize(
    ("name", "module", "wanted"),
    [
        ("tmpl-inductor:freezing", True, "frozen"),
        ("tmpl-inductor:freezing", False, "bf16"),
        ("onnxruntime", True, "frozen"),
        ("onnxruntime", False, "bf16"),
        ("default", True, "bf16"),
        ("eager", True, "bf16"),
    ],
)
def test_numerics(name, module, wanted):
    """Frozen weights are a separate numerics class, in cases that have weights."""
    assert numerics(peers()[name], "bf16", module=module) == wanted


@pytest.mark.parametrize(
    ("case", "reason"),
    [("softmax", ""), ("adamw", "too slow to compile for each case: run on those of the suite 'dev'")],
    ids=["dev", "other"],
)
def test_a_peer_of_one_suite(case, reason):
    """auto-full runs only in the suite on which candidates are developed."""
    assert why_not(peers()["auto-full"], CASES[case], "fwd", "cuda") == reason


@pytest.mark.parametrize(
    ("cases", "reason"),
    [
        pytest.param(("*", "!softmax"), "too slow to compile for each case: not run on softmax", id="all but"),
        pytest.param(("gemm_*", "swiglu"), "too slow to compile for each case: run on gemm_*, swiglu", id="some"),
        pytest.param(("*",), "", id="all"),
    ],
)
def test_a_peer_of_some_cases(cases, reason):
    """A peer that is slow to compile says on which cases it runs, or does not."""
    assert why_not(Peer("slow", "template", "x", cases=cases), CASES["softmax"], "fwd", "cuda") == reason


@pytest.mark.parametrize(
    ("name", "globs", "expected"),
    [
        pytest.param("tmpl-inductor:triton", "*,!*:triton", False, id="taken out"),
        pytest.param("tmpl-inductor:tma", "*,!*:triton", True, id="others"),
        pytest.param("tmpl-inductor:triton", "*,!*:triton,tmpl-inductor:triton", True, id="by name"),
        pytest.param("tvm-tuned", "!tvm-*", False, id="taken out of all"),
        pytest.param("auto-full", "!tvm-*", True, id="all others"),
        pytest.param("hand:triton_matmul", "*,!hand:*", False, id="a case's own"),
    ],
)
def test_a_glob_takes_out(name, globs, expected):
    """A glob after "!" removes peers that other globs select, all if there are no others, but none given by name."""
    assert table.wanted(name, globs_of(globs)) is expected


def test_autos_differ_in_effort():
    """Both auto peers race; one tries all candidates that can gain."""
    quick, full = (resolved(peers()[name]) for name in ("tmpl-inductor:auto", "auto-full"))
    assert full == {**quick, "effort": "full"}


def test_tuners_are_told():
    """A peer that times kernels while it compiles gets the device for itself."""
    assert tunes(peers()["max-autotune"])
    assert not tunes(peers()["tmpl-inductor:freezing"])


def test_unknown_peer():
    """A misspelled peer raises at once."""
    with pytest.raises(BackendKwargsError) as error:
        globs_of("tmpl-inductor:max_autotun")
    assert str(error.value) == ("No peer is called 'tmpl-inductor:max_autotun': `python -m benchmarks list` shows all.")

"""The check of a call's inputs: what must be as in a sample, what need not, and what a refusal says."""

from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from backend_kwargs import BackendKwargsError
from backend_kwargs.bundles.samples import InputCheck, described

CPU = torch.device("cpu")
ONES = torch.ones(4, 8)
BUILD = "Build with a sample of this kind, or with dynamic=True."


def check_of(*samples, dynamic=False):
    """Return the check of a module that was built with these samples: arguments, or a dict of keywords."""
    calls = [((), each) if isinstance(each, dict) else (each, {}) for each in samples]
    return InputCheck([described(call) for call in calls], CPU, dynamic=dynamic)


def refused(check, *args, **kwargs):
    """Return why a call is refused, "" if it is not."""
    try:
        check(args, kwargs)
    except BackendKwargsError as error:
        return str(error)
    return ""


def like(shape="4, 8", strides=" with strides (8, 1)", dtype="float32", device="cpu"):
    return f"{dtype}[{shape}] on {device}{strides}"


# ---- what must be as in a sample


@pytest.mark.parametrize("passed_before", [False, True], ids=["first", "after others"])
@pytest.mark.parametrize(
    ("value", "got"),
    [
        pytest.param(ONES.double(), like(dtype="float64"), id="dtype"),
        pytest.param(ONES.to("meta"), like(device="meta"), id="device"),
        pytest.param(ONES[None], like("1, 4, 8", " with strides (32, 8, 1)"), id="rank"),
        pytest.param(torch.ones(3, 8), like("3, 8"), id="size"),
        pytest.param(ONES.T.contiguous().T, like(strides=" with strides (1, 4)"), id="strides"),
        pytest.param(ONES.to_sparse(), "float32[4, 8] sparse_coo on cpu", id="layout"),
        pytest.param(torch.full((4, 8), 1 + 2j).imag, like(strides=" with strides (16, 2)"), id="a view"),
        pytest.param(3, "3", id="number"),
        pytest.param(None, "None", id="none"),
    ],
)
def test_another_tensor(value, got, passed_before):
    """The message has both kinds, and what to do."""
    check = check_of((ONES,))
    if passed_before:
        check((torch.zeros(4, 8),), {})
    assert refused(check, value) == f"Input args[0] must be {like()}, got {got}. {BUILD}"


def test_a_sample_on_another_device_than_the_module():
    """An input is on the module's device where its sample was, and elsewhere on the sample's own."""
    check = check_of((ONES, ONES.to("meta")))
    assert refused(check, ONES, ONES.to("meta")) == ""
    assert refused(check, ONES, ONES) == f"Input args[1] must be {like(device='meta')}, got {like()}. {BUILD}"


def test_another_device_of_one_kind():
    """A second GPU is not the first."""
    with FakeTensorMode():
        first, second = (torch.empty(4, 8, device=f"cuda:{at}") for at in range(2))
        metadata = [described(((ONES,), {}))]
        metadata[0]["tuple"][0]["tuple"][0]["tensor"][3] = "cuda"
        check = InputCheck(metadata, torch.device("cuda:0"), dynamic=False)
        assert refused(check, first) == ""
        assert "got float32[4, 8] on cuda:1" in refused(check, second)


def test_the_input_that_differs_is_named():
    """By its position, its name, and its place in containers."""
    check = check_of((ONES, [ONES, (ONES,)]))
    assert refused(check, ONES, [ONES, (ONES.double(),)]).startswith("Input args[1][1][0] must be ")
    named = check_of({"x": ONES, "y": {"z": ONES}})
    assert refused(named, x=ONES, y={"z": ONES.double()}).startswith("Input kwargs['y']['z'] must be ")


# ---- several samples


@pytest.mark.parametrize(
    ("samples", "shape"),
    [
        pytest.param([(4, 8)], "any, any", id="one: each may vary"),
        pytest.param([(4, 8), (5, 8)], "any, 8", id="two: what differs may vary"),
        pytest.param([(4, 8), (4, 8)], "4, 8", id="two alike: nothing may vary"),
    ],
)
def test_sizes_that_may_vary(samples, shape):
    """Under `dynamic`; strides are not compared, but dtypes, devices and ranks are."""
    check = check_of(*((torch.ones(each),) for each in samples), dynamic=True)
    free = shape.split(", ")
    for other, at in ((torch.ones(7, 8), 0), (torch.ones(4, 7), 1)):
        got = like(", ".join(map(str, other.shape)), f" with strides {tuple(other.stride())}")
        wanted = f"Input args[0] must be {like(shape, '')}, got {got}. {BUILD}"
        assert refused(check, other) == ("" if free[at] == "any" else wanted)
    assert refused(check, ONES.T.contiguous().T) == ""
    assert refused(check, ONES.double()) != ""
    assert refused(check, ONES[None]) != ""


def test_sizes_vary_for_each_kind_of_sample():
    """Samples of another rank or dtype are compared apart from the others."""
    check = check_of((torch.ones(4, 8),), (torch.ones(5, 8),), (torch.ones(6).long(),), dynamic=True)
    for value in (torch.ones(7, 8), torch.ones(9).long()):
        assert refused(check, value) == ""
    for value in (torch.ones(7, 9), torch.ones(7, 8).long()):
        assert refused(check, value) != ""


def test_a_sample_without_dimensions():
    """It has strides too, which are none."""
    scalar = " on cpu with strides ()"
    assert refused(check_of((torch.tensor(1.0),)), torch.tensor(1)) == (
        f"Input args[0] must be float32[]{scalar}, got int64[]{scalar}. {BUILD}"
    )


def test_samples_of_other_numbers_of_arguments():
    """Each call is compared with those of its own number, whichever came before."""
    check = check_of((ONES,), (ONES, ONES))
    for count in (1, 2, 1, 2):
        assert refused(check, *[ONES.clone() for _ in range(count)]) == ""
        assert refused(check, *[ONES.double() for _ in range(count)]) != ""


def test_one_of_the_samples_is_enough():
    """Each set of sizes stays together; the first sample is the one that is named."""
    check = check_of((torch.ones(2), torch.ones(3)), (torch.ones(4), torch.ones(5)))
    for sizes in ((2, 3), (4, 5), (2, 3)):
        assert refused(check, *map(torch.ones, sizes)) == ""
    assert refused(check, torch.ones(2), torch.ones(5)).startswith(
        f"Input args[1] must be {like('3', ' with strides (1,)')}, got {like('5', ' with strides (1,)')}"
    )


def test_samples_of_other_structures():
    """What fits none is refused with all of them, each once."""
    check = check_of((ONES,), (ONES, [ONES, 3]), (ONES.double(),), {"x": ONES})
    assert refused(check, ONES, [ONES, 3]) == ""
    assert refused(check, x=ONES) == ""
    assert refused(check, ONES, ONES) == (
        "The arguments must have the structure of a sample, (_) or (_, [_, _]) or (x=_), got (_, _). Build with a "
        "sample of this kind."
    )


# ---- keywords and mappings


@pytest.mark.parametrize("passed_before", [False, True], ids=["first", "after others"])
def test_the_order_of_keywords_and_dicts(passed_before):
    """It is left to dynamo's guards; another mapping is as a dict, and other names are refused."""
    check = check_of({"x": ONES, "y": {"a": ONES, "b": 3}})
    if passed_before:
        check((), {"x": ONES.clone(), "y": {"a": ONES.clone(), "b": 3}})
    assert refused(check, y={"b": 3, "a": ONES.clone()}, x=ONES.clone()) == ""
    assert refused(check, y=OrderedDict(b=3, a=ONES), x=ONES) == ""
    assert refused(check, x=ONES.clone(), z={"a": ONES, "b": 3}) != ""
    assert refused(check, x=ONES.clone(), y={"a": ONES, "c": 3}) != ""


def test_objects_are_not_compared():
    """Those other than dicts with texts as keys, lists and tuples are a blank in a sample; so are these two."""
    for value in (SimpleNamespace(x=ONES), {1: ONES}, OrderedDict([(2, ONES)])):
        check = check_of((ONES, value))
        assert refused(check, ONES, value) == ""
        assert refused(check, ONES, SimpleNamespace()) == ""
        assert refused(check, ONES, [ONES]) != ""


def test_what_only_dynamo_can_check():
    """A tensor need not be dense, and what is no tensor may have any value: each call is looked at."""
    check = check_of((torch.full((4,), 1 + 2j),))
    for _ in range(2):
        assert refused(check, torch.full((4,), 1 + 2j).conj()) == ""
    assert "sparse_coo" in refused(check_of((ONES,), dynamic=True), ONES.to_sparse())
    other = check_of((ONES, 3))
    for _ in range(2):
        assert refused(other, ONES, 5) == ""

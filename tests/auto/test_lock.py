"""Locks: what timing chose, written so that it can be reviewed, and read with care."""

from dataclasses import replace

import pytest

from backend_kwargs import make_backend
from backend_kwargs.auto.lock import check_machine, read_lock, write_lock
from backend_kwargs.errors import BackendKwargsError
from backend_kwargs.explain import about_lock, explain
from backend_kwargs.facts import PinnedKernel, Pins
from backend_kwargs.facts.decision import Decision

MACHINE = {"torch": "2.13.0", "triton": None, "cuda": None, "backend-kwargs": "0.1", "cpu": "AVX2", "threads": 2}
WHERE, NOTHING = "torch 2.13.0, cpu AVX2, threads 2", "No store is read, and nothing is timed."
LINEAR = PinnedKernel("cpp_gemm", ("cpu torch.float32 2x3",), "cpu torch.float32 2x4", 3)
OPTIONS = {"max_autotune": True, "epilogue_fusion": False}
DECISION = Decision("b" * 64, "b" * 16, "max_autotune", OPTIONS, model="Net", inputs=("float32 2x3",))


def pins():
    return Pins(
        "k.lock",
        dict(MACHINE),
        {DECISION.key: DECISION, "a" * 64: Decision("a" * 64, "a" * 16, "default")},
        {"02": LINEAR, "01": LINEAR},
        {"0f": {"XBLOCK": 64, "num_warps": 4, "num_stages": 1}, "0e": {"XBLOCK": 32, "num_warps": 8}},
    )


def test_explain_says_what_a_lock_has(tmp_path):
    """In place of what stores have, which are not read."""
    path = str(tmp_path / "k.lock")
    given = {"reproducible": "pinned", "lock": path}
    write_lock(pins(), tmp_path / "k.lock")
    assert explain("tmpl-inductor:auto", given).notes == (
        f"Lock {path!r} has 2 decisions, 2 kernels, 2 configurations, written with {WHERE}. {NOTHING}",
    )
    one = replace(pins(), machine={"torch": "2.13.0", "gpu": "H200"}, kernels={"01": LINEAR})
    write_lock(one, tmp_path / "k.lock")
    assert "2 decisions, 1 kernels, 2 configurations, written with torch 2.13.0, gpu H200." in about_lock(path)


def test_a_lock_is_read_as_it_was_written(tmp_path):
    """What is read is what was noted, but for when and how it was decided."""
    write_lock(pins(), path := tmp_path / "k.lock")
    read = read_lock(path)
    assert read.kernels == pins().kernels
    assert read.configurations == pins().configurations
    assert {key: (each.winner, each.options, each.model, each.inputs) for key, each in read.decisions.items()} == {
        "a" * 64: ("default", {}, "", ()),
        "b" * 64: ("max_autotune", OPTIONS, "Net", ("float32 2x3",)),
    }
    assert read.machine == {name: value for name, value in MACHINE.items() if value}


def test_a_lock_is_sorted(tmp_path):
    """Two locks with the same content are the same bytes, in whatever order it was noted."""
    write_lock(pins(), one := tmp_path / "one")
    other = pins()
    other.decisions = dict(reversed(other.decisions.items()))
    other.decisions[DECISION.key] = replace(DECISION, options=dict(reversed(OPTIONS.items())))
    other.kernels = dict(reversed(other.kernels.items()))
    other.machine = dict(reversed(other.machine.items()))
    other.configurations = {key: dict(reversed(each.items())) for key, each in reversed(other.configurations.items())}
    write_lock(other, two := tmp_path / "two")
    assert one.read_bytes() == two.read_bytes()
    assert [line for line in one.read_text().splitlines() if line.startswith('["kernels"')] == [
        '["kernels"."01"]',
        '["kernels"."02"]',
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param("version = 3\n", "Lock {path!r} has version 3, not 2: update backend-kwargs.", id="newer"),
        pytest.param("version = 1\n", "Lock {path!r} has version 1, not 2: pin again.", id="older"),
        pytest.param(
            'version = 2\n[machine]\n[kernel.01]\nkernel = ""\n',
            "{path!r} is not a lock: Object contains unknown field `kernel`.",
            id="a table's name misspelt",
        ),
        pytest.param("", "{path!r} is not a lock: Object missing required field `version`.", id="empty"),
        pytest.param(
            'version = 2\n[machine]\n[kernels.01]\nkernel = 3\ninputs = []\noutput = ""\nof = 2\n',
            "{path!r} is not a lock: Expected `str`, got `int` - at `$.kernels[...].kernel`.",
            id="wrong type",
        ),
        pytest.param(
            'version = 2\n[machine]\n[decisions.a]\ngraph = ""\nwinner = "x"\n[decisions.a.options]\n'
            "x = [[[[[[[[[1]]]]]]]]]\n",
            "{path!r} is not a lock: options must be at most 8 levels deep.",
            id="deep",
        ),
    ],
)
def test_a_file_that_is_no_lock(tmp_path, content, message):
    """A newer, empty or wrong file gives one error that names it."""
    (path := tmp_path / "k.lock").write_text(content)
    with pytest.raises(BackendKwargsError) as raised:
        read_lock(path)
    assert str(raised.value) == message.format(path=str(path))


def test_an_option_that_a_file_cannot_say(tmp_path):
    """A decision with a function among its options is not written."""
    noted = pins()
    noted.decisions[DECISION.key] = replace(DECISION, options={"debug": True, "my_pass": abs})
    with pytest.raises(BackendKwargsError) as raised:
        write_lock(noted, path := tmp_path / "k.lock")
    assert str(raised.value) == "Option 'my_pass' is <built-in function abs>, which cannot be pinned; leave it out."
    assert not path.exists()


def test_a_lock_that_was_cut_off(tmp_path):
    """A file that ends in the middle is refused with where it ends."""
    write_lock(pins(), path := tmp_path / "k.lock")
    text = path.read_text()
    path.write_text(text[: text.index("AVX2")])
    with pytest.raises(BackendKwargsError) as raised:
        read_lock(path)
    ends = "TOMLDecodeError: Unterminated string (at end of document)"
    assert str(raised.value) == f"Cannot read a lock from {str(path)!r}: {ends}."


@pytest.mark.parametrize("name", ["k.lock", "k" * 5000])
def test_no_lock(tmp_path, name):
    """A missing file, or a name that no file can have, says who writes it."""
    path = str(tmp_path / name)
    with pytest.raises(BackendKwargsError) as raised:
        make_backend("tmpl-inductor", reproducible="pinned", lock=path)
    assert (
        str(raised.value)
        == f"There is no lock {path!r}: write it by `backend-kwargs pin FACTORY --lock {path}`, or bk.pin(...)."
    )


@pytest.mark.parametrize(
    ("changed", "devices", "differs"),
    [
        pytest.param({"torch": "2.14.0"}, ["cpu"], "torch '2.13.0' (here '2.14.0')", id="release"),
        pytest.param({"triton": "3.5"}, ["cpu"], "triton None (here '3.5')", id="triton"),
        pytest.param({"cuda": "13.0"}, ["cpu"], "cuda None (here '13.0')", id="CUDA"),
        pytest.param({"backend-kwargs": "0.2"}, ["cuda"], "backend-kwargs '0.1' (here '0.2')", id="our release"),
        pytest.param({"threads": 8}, ["cpu"], "threads 2 (here 8)", id="threads"),
        pytest.param({"gpu": "H100", "threads": 8}, ["cpu", "cuda"], "gpu None (here 'H100')", id="both devices"),
        pytest.param({"cpu": "AVX512"}, ["cpu"], "cpu 'AVX2' (here 'AVX512')", id="instruction set"),
        pytest.param({"gpu": "H100"}, ["cuda"], "gpu None (here 'H100')", id="GPU"),
        pytest.param({"gpu": "H100"}, ["cpu"], "", id="GPU of a graph on a CPU"),
        pytest.param({"threads": 8}, ["cuda"], "", id="threads of a graph on a GPU"),
    ],
)
def test_another_machine(changed, devices, differs):
    """A lock of another machine or release is refused with what differs, as far as it counts for the device."""
    if not differs:
        return check_machine(pins(), {**MACHINE, **changed}, devices)
    with pytest.raises(BackendKwargsError) as raised:
        check_machine(pins(), {**MACHINE, **changed}, devices)
    assert (
        str(raised.value)
        == f"Lock 'k.lock' was written for {differs}: write one here by `backend-kwargs pin`, or bk.pin(...)."
    )
    return None

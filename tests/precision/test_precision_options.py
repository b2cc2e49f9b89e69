"""Options of lower precision: spellings, errors, and what the machine lacks."""

import pytest

import backend_kwargs as bk
from backend_kwargs import BackendKwargsError
from backend_kwargs.options import precisions
from backend_kwargs.options.machine import CannotWorkError, Machine, cpu_dtypes, machine
from tests.precision.precision_nets import MARKS

pytestmark = MARKS


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"precision": "bf17"}, "Unknown precision 'bf17'. Did you mean 'bf16'?", id="unknown"),
        pytest.param(
            {"precision": "exact"},
            "Unknown precision 'exact'. It is one of tf32, bf16, fp16, int8-dynamic, int8-weight, fp8-dynamic.",
            id="nothing near",
        ),
        pytest.param(
            {"precision": "bf16"},
            "Option 'precision' needs 'max_error', the largest relative error of an output that you accept: for "
            "example, pass max_error=1e-2.",
            id="no bound",
        ),
        pytest.param(
            {"precision": "bf16", "max_error": 0},
            "Option 'max_error' must be float above 0 and below 1 | None, got 0 (int).",
            id="bound of 0",
        ),
        pytest.param(
            {"precision": ("bf16", "fp16"), "max_error": 0.01},
            "Option 'precision' names 2 (bf16, fp16), but only `auto` can choose between them: name one, or pass "
            "auto=True.",
            id="two without a race",
        ),
        pytest.param(
            {"precision": "bf16", "max_error": 0.01, "use_aoti": True},
            "Options 'use_aoti' and 'precision' cannot be combined; leave one out.",
            id="ahead of time",
        ),
        pytest.param(
            {"precision": "tf32", "max_error": 0.01},
            "Precision 'tf32' is refused: in torch it is a setting of the whole process, so products of other threads "
            "would use it too; call torch.set_float32_matmul_precision('high') yourself, or consent to "
            "'bf16'.",
            id="tf32",
        ),
    ],
)
def test_wrong_options(options, message):
    """Options that make no sense raise when the backend is created."""
    with pytest.raises(BackendKwargsError) as caught:
        bk.make_backend("tmpl-inductor", options)
    assert str(caught.value) == message


@pytest.mark.parametrize("given", ["bf16", ("bf16",), ["bf16"], " bf16 ,bf16"], ids=repr)
def test_one_value_for_all_spellings(given):
    """A name, a list and a string of names are the same option, also in a config."""
    backend = bk.make_backend("tmpl-inductor", precision=given, max_error=0.01)
    assert backend == bk.make_backend("tmpl-inductor", precision=("bf16",), max_error=0.01)
    assert type(backend).from_config(backend.to_config()) == backend


@pytest.mark.parametrize(
    ("name", "here", "expected"),
    [
        pytest.param("bf16", Machine(cpu_dtypes=frozenset({"bf16"})), "", id="a CPU with bf16"),
        pytest.param("bf16", Machine(capability=(8, 0), gpu="A100"), "", id="a GPU with bf16"),
        pytest.param(
            "bf16",
            Machine(),
            "Precision 'bf16' cannot act fully here: neither the GPU nor the CPU has instructions for bfloat16 "
            "products; torch emulates it, which is slow.",
            id="no bf16",
        ),
        pytest.param(
            "int8-dynamic",
            Machine(),
            "Precision 'int8-dynamic' cannot work here: torchao is not importable; "
            'pip install "torchao<0.19,>=0.18".',
            id="no torchao",
        ),
        pytest.param(
            "fp8-dynamic",
            Machine(packages=frozenset({"torchao"}), capability=(8, 0), gpu="A100"),
            "Precision 'fp8-dynamic' cannot work here: no GPU has instructions for float8 products (compute capability "
            "8.9 and up).",
            id="no float8",
        ),
    ],
)
def test_requirements(name, here, expected):
    """A missing requirement raises if the precision cannot work, and warns if it is slow."""
    limits = []
    try:
        precisions.verify({"precision": (name,), "max_error": 0.01}, here, limits.append)
    except CannotWorkError as lacking:
        limits = [str(lacking)]
    assert "".join(map(str, limits)) == expected


@pytest.mark.parametrize(
    ("aten", "onednn", "expected"),
    [
        pytest.param("AVX512", "", {"bf16"}, id="as it is"),
        pytest.param("AVX512", "all", {"bf16"}, id="no limit"),
        pytest.param("AVX512", "AVX512_CORE_AMX", {"bf16"}, id="oneDNN up to AMX"),
        pytest.param("AVX2", "", set(), id="ATen up to AVX2"),
        pytest.param("DEFAULT", "", set(), id="ATen without vectors"),
        pytest.param("AVX512", "avx2", set(), id="oneDNN up to AVX2"),
        pytest.param("AVX512", "AVX512_CORE_VNNI", set(), id="oneDNN before BF16"),
    ],
)
def test_variables_that_limit_instructions(aten, onednn, expected):
    """A CPU with bf16 has none where ATen or oneDNN is kept to the instructions of one without."""
    assert cpu_dtypes({"avx512_bf16"}, aten, onednn) == expected


def test_this_machine_heeds_them(monkeypatch):
    """What is found here is found under the limit that a variable sets."""
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert machine.__wrapped__().cpu_dtypes == set()


def test_a_race_leaves_out_what_cannot_work():
    """In a race a precision that this machine lacks is only a warning, since others may win."""
    limits = []
    asked = {"precision": ("bf16", "int8-dynamic"), "max_error": 0.01, "auto": True}
    precisions.verify(asked, Machine(cpu_dtypes=frozenset({"bf16"})), limits.append)
    assert [str(limit) for limit in limits] == [
        "Precision 'int8-dynamic' cannot act fully here: torchao is not importable; `auto` does not try it."
    ]


def test_bound_without_precision_is_inert():
    """`explain` says that a bound without a precision has no effect."""
    (effect,) = bk.explain("tmpl-inductor", max_error=0.01).effects
    assert effect.status == "inert because it is read only with precision"

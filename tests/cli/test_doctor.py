"""What a machine allows each template: verdicts for fictitious machines, and the command."""

import json
from dataclasses import asdict, replace

import pytest
from typer.testing import CliRunner

from backend_kwargs import backends, list_templates, make_backend
from backend_kwargs import explain as explain_
from backend_kwargs.backends.inductor import compiler
from backend_kwargs.backends.tvm import settings
from backend_kwargs.backends.tvm.settings import INSTALL
from backend_kwargs.cli import app, commands
from backend_kwargs.explain import Verdict, verdict
from backend_kwargs.options import machine as machines
from backend_kwargs.options.machine import Machine
from tests.cli.test_cli import check_golden, run

BARE = Machine()
LAPTOP = Machine(cxx="/usr/bin/g++")
H200 = Machine(
    gpu="NVIDIA H200",
    capability=(9, 0),
    sms=132,
    triton=True,
    triton_tma=True,
    cxx="/usr/bin/g++",
    nvcc="/usr/local/cuda/bin/nvcc",
    torch="2.13.0+cu130",
    cuda="13.0",
    driver="13.0",
    triton_version="3.7.0",
    cutlass="nvidia-cutlass 4.2.0.0",
)
A100 = replace(H200, gpu="NVIDIA A100", capability=(8, 0), sms=108, triton_tma=False, cutlass=None)
SMALL = replace(H200, gpu="a small GPU", sms=20)


@pytest.fixture
def on(monkeypatch):
    def be(machine: Machine, *, with_tvm: bool = False, with_cuda: bool = False) -> None:
        for module in (compiler, backends, commands, machines):
            monkeypatch.setattr(module, "machine", lambda: machine)
        monkeypatch.setattr(machines, "_scripts_graphs", lambda: False)  # True in some releases of torch
        monkeypatch.setattr(backends, "installed_version", lambda name: None)
        monkeypatch.setattr(settings, "unfit", lambda: "" if with_tvm else "apache-tvm 0.27 is not installed")
        monkeypatch.setattr(settings, "has_cuda", lambda: with_cuda)

    return be


def words(*, cannot: str = "", partly: str = "") -> dict[str, str]:
    found = dict.fromkeys(list_templates(), "works")
    return found | dict.fromkeys(cannot.split(), "cannot") | dict.fromkeys(partly.split(), "works partly")


@pytest.mark.parametrize(
    ("machine", "wanted"),
    [
        pytest.param(H200, words(), id="H200"),
        pytest.param(A100, words(cannot="cutlass", partly="tma"), id="no TMA, no CUTLASS"),
        pytest.param(
            SMALL,
            words(cannot="triton cutlass tma", partly="max_autotune max_autotune_no_cudagraphs"),
            id="small GPU",
        ),
        pytest.param(
            LAPTOP,
            words(
                cannot="cudagraphs coordinate_descent triton cutlass tma",
                partly="max_autotune max_autotune_no_cudagraphs eager_numerics",
            ),
            id="CPU",
        ),
        pytest.param(
            BARE,
            words(
                cannot="cudagraphs coordinate_descent triton cutlass tma cpp_wrapper",
                partly="max_autotune max_autotune_no_cudagraphs eager_numerics",
            ),
            id="no C++ compiler",
        ),
    ],
)
def test_words(machine, wanted, on):
    """Each template's verdict follows from the machine."""
    on(machine)
    assert {name: verdict(make_backend(f"tmpl-inductor:{name}")).word for name in list_templates()} == wanted


@pytest.mark.parametrize(
    ("template", "machine", "wanted"),
    [
        pytest.param("tma", LAPTOP, Verdict("cannot", "no CUDA GPU is visible"), id="GPU"),
        pytest.param(
            "cutlass",
            A100,
            Verdict(
                "cannot",
                "CUTLASS 4 (cutlass_library, cutlass_cppgen and pycute) is not importable",
                'pip install "nvidia-cutlass<5,>=4.2"',
            ),
            id="CUTLASS",
        ),
        pytest.param(
            "cutlass",
            replace(H200, nvcc=None),
            Verdict("cannot", "nvcc is not found", "install the CUDA toolkit, or set CUDACXX"),
            id="nvcc",
        ),
        pytest.param(
            "cpp_wrapper",
            BARE,
            Verdict("cannot", "no C++ compiler is on the PATH", "install g++ or set CXX"),
            id="C++ compiler",
        ),
        pytest.param("cpp_wrapper", LAPTOP, Verdict("works"), id="works"),
    ],
)
def test_verdict(template, machine, wanted, on):
    """A verdict other than "works" has its reason and the remedy."""
    on(machine)
    assert verdict(make_backend(f"tmpl-inductor:{template}")) == wanted


@pytest.mark.parametrize(
    ("option", "value"),
    [
        pytest.param("cutlass.cutlass_dir", "/opt/cutlass", id="CUTLASS"),
        pytest.param("cuda.cuda_cxx", "/opt/nvcc", id="nvcc"),
    ],
)
def test_option_gives_what_the_machine_lacks(option, value, on):
    """An option with the path of a requirement counts as having it."""
    on(replace(H200, **{"cutlass": None} if "cutlass_dir" in option else {"nvcc": None}))
    assert verdict(make_backend("tmpl-inductor:cutlass", {option: value})) == Verdict("works")


@pytest.mark.parametrize(
    ("machine", "tvms", "plain", "cuda"),
    [
        pytest.param(
            LAPTOP,
            {},
            Verdict("cannot", "apache-tvm 0.27 is not installed", INSTALL),
            Verdict("cannot", "apache-tvm 0.27 is not installed", INSTALL),
            id="absent",
        ),
        pytest.param(
            LAPTOP,
            {"with_tvm": True, "with_cuda": True},
            Verdict("works"),
            Verdict("cannot", "no CUDA GPU is visible"),
            id="no GPU",
        ),
        pytest.param(
            H200,
            {"with_tvm": True},
            Verdict("works"),
            Verdict("cannot", "the installed apache-tvm is not a GPU build (it has no CUDA runtime)", INSTALL),
            id="no GPU build",
        ),
        pytest.param(H200, {"with_tvm": True, "with_cuda": True}, Verdict("works"), Verdict("works"), id="GPU"),
    ],
)
def test_tvm(machine, tvms, plain, cuda, on):
    """TVM has one row, and another one for code on a GPU."""
    on(machine, **tvms)
    printed = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)["backends"]
    assert (printed["tmpl-tvm"], printed["tmpl-tvm[target=cuda]"]) == (asdict(plain), asdict(cuda))


def test_library_calls_alone(on):
    """If only library calls are left of the choices of autotuning, it has no effect."""
    on(LAPTOP)
    asked = make_backend("inductor", max_autotune_gemm=True, max_autotune_gemm_backends="ATEN,TRITON")
    assert verdict(asked) == Verdict("cannot", "no CUDA GPU is visible")


def test_switching_off_what_is_absent(on):
    """An option that switches off something absent needs nothing."""
    on(LAPTOP)
    assert verdict(make_backend("inductor", {"triton.autotune_pointwise": False})) == Verdict("works")


@pytest.mark.parametrize("machine", [H200, A100, SMALL, LAPTOP, BARE], ids=["H200", "A100", "small", "CPU", "bare"])
def test_explain_agrees(machine, on):
    """The reason of each verdict "cannot" is also in explain."""
    on(machine)
    for name in list_templates():
        found = verdict(make_backend(f"tmpl-inductor:{name}"))
        statuses = [effect.status for effect in explain_(f"tmpl-inductor:{name}").effects]
        if found.word == "cannot":
            assert f"inert because {found.reason}" in statuses, name


def test_output(on):
    """The command prints the machine, and each template with its reason and remedy."""
    on(A100)
    ran = CliRunner().invoke(app, ["doctor"])
    assert ran.exit_code == 0
    check_golden("doctor_a100", ran.stdout)


@pytest.mark.parametrize(
    ("machine", "ready"),
    [
        pytest.param(LAPTOP, "yes", id="CPU"),
        pytest.param(H200, "yes", id="GPU"),
        pytest.param(BARE, "no: no C++ compiler is on the PATH; install g++ or set CXX", id="no C++ compiler"),
        pytest.param(
            replace(H200, triton=False),
            "no: Triton does not work on this GPU; install the triton of this torch",
            id="no Triton",
        ),
    ],
)
def test_ready(on, machine, ready):
    """The last line says whether torch.compile works here, and if not what to install first."""
    on(machine)
    assert CliRunner().invoke(app, ["doctor"]).stdout.splitlines()[-1] == f"ready: {ready}"


def test_no_advice_to_buy_a_machine():
    """A remedy is something that can be done here: what only another processor or GPU has, has none."""
    remedies = [each.remedy for each in machines.REQUIREMENTS.values()]
    assert not [each for each in remedies if each.startswith("run on")]
    assert all(each.reason for each in machines.REQUIREMENTS.values())


def test_json(on):
    """`doctor --json` prints the same as data."""
    on(A100)
    printed = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)
    assert printed["machine"] == A100.facts() | dict.fromkeys(("TVM", "ONNX Runtime", "OpenVINO"), "none")
    assert printed["templates"]["default"] == {"word": "works", "reason": "", "remedy": ""}


def test_this_machine():
    """Without a visible GPU the real command exits with 0, and reports that CUDA graphs cannot work."""
    ran = run("doctor", "--json")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert json.loads(ran.stdout)["templates"]["cudagraphs"] == {
        "word": "cannot",
        "reason": "no CUDA GPU is visible",
        "remedy": "",
    }


def test_broken_template(on, monkeypatch):
    """A template of another package that fails to load is one row."""
    monkeypatch.setattr(commands, "list_templates", lambda: ["gone", "default"])
    on(LAPTOP)
    printed = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)["templates"]
    assert {name: row["word"] for name, row in printed.items()} == {"gone": "cannot", "default": "works"}


def test_bare_machine_in_words():
    """Absent things are shown as "none"."""
    assert Machine(torch="2.13.0").facts() == {
        "torch": "2.13.0, built without CUDA",
        "CPU": "products in neither bf16 nor fp16",
        **dict.fromkeys(("driver", "GPU", "Triton", "C++ compiler", "nvcc", "CUTLASS", "torchao"), "none"),
    }

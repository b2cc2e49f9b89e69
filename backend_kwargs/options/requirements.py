"""What options and templates require of the machine and of each other, and why they have no effect.

One table has what may be required of a machine, another the rules about options. Warnings, `strict`, `list`, `doctor`
and `explain` read both.
"""

import subprocess
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from subprocess import DEVNULL
from types import MappingProxyType
from typing import Any

from backend_kwargs.errors import BackendKwargsError, NoCompilerError, pip_install, unknown
from backend_kwargs.options.layers import Options
from backend_kwargs.options.machine import Machine, machine, places_of

CXX_LIMIT_S = 10.0
LEAST_SMS = 68  # of torch._inductor.utils.is_big_gpu, on NVIDIA


@dataclass(frozen=True, slots=True)
class Requirement:
    """A property of the machine: how it is detected, why it matters, and how to obtain it."""

    met: Callable[[Machine], bool]
    reason: str
    remedy: str = ""  # what can be done on this machine


Need = str | Requirement  # a requirement, or the name of one in REQUIREMENTS


def importable(package: str, remedy: str = "") -> Requirement:
    """Return the requirement of a package; `remedy` is "pip install PACKAGE" if it is empty."""

    def met(here: Machine) -> bool:
        return package in here.packages

    return Requirement(met, f"{package} is not importable", remedy or f"pip install {package}")


@cache
def _scripts_graphs() -> bool:
    """Return whether TorchScript compiles a graph of the class that dynamo makes, which it does not in torch 2.13."""
    import torch

    from backend_kwargs.torch_internals.fx import dynamos_graph_class

    with dynamos_graph_class(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            torch.jit.script(torch.fx.symbolic_trace(torch.nn.ReLU()))
        except Exception:  # noqa: BLE001 - whatever it lacks
            return False
    return True


REQUIREMENTS: Mapping[str, Requirement] = MappingProxyType(
    {
        "gpu": Requirement(
            lambda m: m.gpu is not None,
            "no CUDA GPU is visible",
        ),
        "triton": Requirement(
            lambda m: m.triton, "Triton does not work on this GPU", "install the triton of this torch"
        ),
        "large_gpu": Requirement(
            lambda m: m.hip or m.sms >= LEAST_SMS,
            f"the GPU has fewer than {LEAST_SMS} multiprocessors, Inductor's least for GEMM templates",
        ),
        "tma": Requirement(
            lambda m: m.capability >= (9, 0) and m.triton_tma,
            "the GPU has no tensor memory accelerator (compute capability 9.0 and up), or Triton no support for it",
        ),
        "cutlass": Requirement(
            lambda m: m.cutlass is not None,
            "CUTLASS 4 (cutlass_library, cutlass_cppgen and pycute) is not importable",
            pip_install("cutlass"),
        ),
        "torch_xla": importable("torch_xla"),
        "torchscript": Requirement(
            lambda _: _scripts_graphs(), "torch.jit.script fails on dynamo's graphs in this torch", "take aot_eager"
        ),
        "torchao": importable("torchao", pip_install("torchao")),
        "bf16_unit": Requirement(
            lambda m: m.capability >= (8, 0) or m.hip or "bf16" in m.cpu_dtypes,
            "neither the GPU nor the CPU has instructions for bfloat16 products",
        ),
        "fp16_unit": Requirement(
            lambda m: m.capability >= (7, 0) or m.hip or "fp16" in m.cpu_dtypes,
            "neither the GPU nor the CPU has instructions for float16 products",
        ),
        "fp8": Requirement(
            lambda m: m.capability >= (8, 9) and not m.hip,
            "no GPU has instructions for float8 products (compute capability 8.9 and up)",
        ),
        "nvcc": Requirement(
            lambda m: m.nvcc is not None, "nvcc is not found", "install the CUDA toolkit, or set CUDACXX"
        ),
        "cxx": Requirement(lambda m: m.cxx is not None, "no C++ compiler is on the PATH", "install g++ or set CXX"),
    }
)


@dataclass(frozen=True, slots=True)
class Limit:
    """Why `subject` has no full effect here, how to change that, and the fallback; "" if there is none.

    `of_machine`: the machine lacks something, whatever the other options are.
    """

    subject: str
    reason: str
    remedy: str
    otherwise: str = ""
    of_machine: bool = False

    def __str__(self) -> str:
        fully, then = "act fully" if self.otherwise else "work", self.otherwise or self.remedy
        return f"{self.subject} cannot {fully} here: {self.reason}{f'; {then}' if then else ''}."


class CannotWorkError(BackendKwargsError):
    """Something that was requested cannot work here at all; its one argument is the `Limit` with the reason."""


# By name in dynamo's registry; where there is no fallback, torch raises.
RELAY = Requirement(
    lambda _: any((place / "relay").is_dir() for place in places_of("tvm")),
    "torch's own tvm backend imports tvm.relay, which the installed TVM does not have",
    "take 'tmpl-tvm'",
)
DYNAMO_BACKENDS: Mapping[str, tuple[Need, ...]] = MappingProxyType(
    dict.fromkeys(("openxla", "openxla_eval"), ("torch_xla",))
    | dict.fromkeys(("ts", "aot_ts"), ("torchscript",))
    | {
        "cudagraphs": ("gpu",),
        "openvino": (importable("openvino", pip_install("openvino")),),
        "torch_tensorrt": ("gpu", importable("torch_tensorrt", "pip install torch-tensorrt")),
        "tvm": (importable("tvm", pip_install("tvm")), RELAY),
    }
)
DYNAMO_FALLBACKS: Mapping[str, str] = MappingProxyType({"cudagraphs": "kernels are launched one by one"})

Lookup = Callable[[str], Any]  # an option's final value by its name, Inductor's default if it is not set

TRITON = ("gpu", "triton")
TRITON_GEMM = (*TRITON, "large_gpu")
CUTLASS_GEMM = (*TRITON_GEMM, "cutlass", "nvcc")
GENERATORS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"TRITON": TRITON_GEMM, "CUTLASS": CUTLASS_GEMM, "CPP": ("cxx",)}
)


@dataclass(frozen=True, slots=True)
class Rule:
    """An option, or a glob of options, that has an effect only under conditions.

    `needs` has requirements, or their names; `either` gives groups of which one must be met; `unless` returns the
    reason why the option has no effect with the others, or "".
    """

    options: str
    needs: tuple[Need, ...] = ()
    either: Callable[[Lookup], Sequence[tuple[Need, ...]]] = lambda value: ()
    unless: Callable[[Lookup], str] = lambda value: ""


def _not_autotuned(value: Lookup) -> str:
    autotunes = value("max_autotune") or value("max_autotune_gemm")
    return "" if autotunes else "it is read only under max_autotune or max_autotune_gemm"


def _needs_of_generators(kind: str) -> Callable[[Lookup], list[tuple[str, ...]]]:
    """Return the needs of each requested kernel generator; library calls alone need nothing."""
    return lambda value: [GENERATORS.get(name, ()) for name in _backends(value, kind) if name != "ATEN"]


def _backend_not_asked(name: str) -> Callable[[Lookup], str]:
    def reason(value: Lookup) -> str:
        named = name in _backends(value, "gemm")
        return _not_autotuned(value) or ("" if named else f"max_autotune_gemm_backends does not name {name}")

    return reason


def generators(backends: str) -> list[str]:
    """Parse Inductor's list of GEMM or convolution backends, "ATEN,TRITON,CPP"."""
    return str(backends).upper().replace(" ", "").split(",")


def _backends(value: Lookup, kind: str) -> list[str]:
    return generators(value(f"max_autotune_{kind}_backends"))


RULES: tuple[Rule, ...] = (
    Rule("triton.*", needs=TRITON),
    Rule("triton.enable_persistent_tma_matmul", needs=(*TRITON_GEMM, "tma"), unless=_backend_not_asked("TRITON")),
    Rule("triton.enable_template_tma_store", needs=(*TRITON_GEMM, "tma"), unless=_backend_not_asked("TRITON")),
    Rule("cuda.*", needs=("gpu",)),
    Rule("cutlass.*", needs=CUTLASS_GEMM, unless=_backend_not_asked("CUTLASS")),
    Rule("coordinate_descent_*", needs=TRITON),
    Rule("eager_numerics.*", needs=TRITON),
    Rule("max_autotune_gemm", either=_needs_of_generators("gemm")),
    Rule("max_autotune_*_backends", unless=_not_autotuned),
    Rule("max_autotune_gemm_backends", either=_needs_of_generators("gemm")),
    Rule("max_autotune_conv_backends", either=_needs_of_generators("conv")),
    Rule("max_autotune_pointwise", needs=TRITON),
    Rule("cpp.*", needs=("cxx",)),
    Rule(
        "freezing_discard_parameters",
        unless=lambda value: "freezing works on a copy; the module keeps its own",
    ),
    Rule("cpp_wrapper", needs=("cxx",)),
)


def limits(subject: str, needs: Iterable[Need], otherwise: str = "", here: Machine | None = None) -> list[Limit]:
    """Return the limit for the first of `needs` that this machine lacks: the others often follow from it."""
    lacking = unmet(needs, here or machine())[:1]
    return [Limit(subject, each.reason, each.remedy, otherwise) for each in lacking]


def require(subject: str, *needs: Need) -> None:
    """Raise CannotWorkError for the first of `needs` that this machine lacks."""
    if lacking := limits(subject, needs):
        raise CannotWorkError(*lacking)


def unmet(needs: Iterable[Need], machine: Machine) -> list[Requirement]:
    """Return those of `needs` that `machine` does not meet; raise if a name is unknown."""
    return [requirement for requirement in map(_requirement, needs) if not requirement.met(machine)]


def _requirement(need: Need) -> Requirement:
    if isinstance(need, str) and need not in REQUIREMENTS:
        raise unknown("requirement", need, REQUIREMENTS, otherwise=f"Requirements are {', '.join(REQUIREMENTS)}.")
    return REQUIREMENTS[need] if isinstance(need, str) else need


def limits_of_options(
    options: Options, default: Lookup, machine: Machine, rules: Sequence[Rule] = RULES
) -> dict[str, Limit]:
    """Return the reason for each of `options` that has no effect: what `machine` lacks, else the other options.

    `default` returns the value of an option that is not set.
    """

    def value(name: str) -> object:
        return options[name] if name in options else default(name)

    reasons = {}
    for name in options:
        own = [rule for rule in rules if fnmatchcase(name, rule.options)]
        groups = [unmet(group, machine) for rule in own for group in rule.either(value)]
        none_met = groups[0] if groups and all(groups) else []
        if lacking := unmet((need for rule in own for need in rule.needs), machine) + none_met:
            reasons[name] = Limit(f"Option {name!r}", lacking[0].reason, lacking[0].remedy, of_machine=True)
        elif reason := next(filter(None, (rule.unless(value) for rule in own)), ""):
            reasons[name] = Limit(f"Option {name!r}", reason, "")
    return reasons


def check_answers(cxx: str) -> None:
    """Raise if a C++ compiler does not even answer `--version`: Inductor would wait for it without end."""
    if not _answers(cxx):
        raise NoCompilerError(
            f"Inductor needs a C++ compiler, but {cxx!r} did not answer --version within {CXX_LIMIT_S:g} s: set CXX to "
            "another one."
        )


@cache
def _answers(cxx: str) -> bool:
    try:
        # No pipes, which a process that the compiler started would keep open.
        subprocess.run([cxx, "--version"], stdout=DEVNULL, stderr=DEVNULL, timeout=CXX_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return False
    except OSError:
        return True  # torch tries another one, or raises an error of its own
    return True

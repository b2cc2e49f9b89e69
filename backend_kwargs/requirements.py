"""What options and templates need of the machine and of each other, and the reason when they cannot act."""

import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

OPTIONAL_PACKAGES = ("cutlass_library", "torch_xla", "tvm")
LEAST_SMS = 68  # torch._inductor.utils.is_big_gpu, on NVIDIA


@dataclass(frozen=True, slots=True)
class Machine:
    """What was found here. `gpu` is the name of the first CUDA device, None without one."""

    gpu: str | None
    capability: tuple[int, int]
    sms: int
    hip: bool
    triton: bool
    triton_tma: bool
    cxx: str | None
    nvcc: str | None
    packages: frozenset[str]


@dataclass(frozen=True, slots=True)
class Requirement:
    """A property of the machine: how it is told, why it matters, and what would change it."""

    met: Callable[[Machine], bool]
    reason: str
    remedy: str


REQUIREMENTS: Mapping[str, Requirement] = MappingProxyType(
    {
        "gpu": Requirement(
            lambda m: m.gpu is not None,
            "no CUDA GPU is visible",
            "run where an NVIDIA GPU is, with a CUDA build of torch",
        ),
        "triton": Requirement(
            lambda m: m.triton, "Triton does not work on this GPU", "install the triton of this torch"
        ),
        "large_gpu": Requirement(
            lambda m: m.hip or m.sms >= LEAST_SMS,
            f"the GPU has fewer than {LEAST_SMS} multiprocessors, Inductor's least for GEMM templates",
            "run on a larger GPU",
        ),
        "tma": Requirement(
            lambda m: m.capability >= (9, 0) and m.triton_tma,
            "the GPU has no tensor memory accelerator (compute capability 9.0 and up), or Triton no support for it",
            "run on a Hopper GPU or a later one",
        ),
        "cutlass": Requirement(
            lambda m: "cutlass_library" in m.packages,
            "cutlass_library is not importable",
            'pip install "backend-kwargs[cutlass]"',
        ),
        "torch_xla": Requirement(
            lambda m: "torch_xla" in m.packages, "torch_xla is not importable", "pip install torch_xla"
        ),
        "tvm": Requirement(lambda m: "tvm" in m.packages, "tvm is not importable", "pip install apache-tvm"),
        "nvcc": Requirement(lambda m: m.nvcc is not None, "nvcc is not on the PATH", "install the CUDA toolkit"),
        "cxx": Requirement(lambda m: m.cxx is not None, "no C++ compiler is on the PATH", "install g++ or set CXX"),
    }
)


@dataclass(frozen=True, slots=True)
class Limit:
    """Why `subject` cannot act fully here, what would change it, and what runs instead ("" where nothing does)."""

    subject: str
    reason: str
    remedy: str
    otherwise: str = ""

    def __str__(self) -> str:
        fully = "act fully" if self.otherwise else "work"
        return f"{self.subject} cannot {fully} here: {self.reason}; {self.otherwise or self.remedy}."


DYNAMO_BACKENDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"cudagraphs": ("gpu",), "openxla": ("torch_xla",), "openxla_eval": ("torch_xla",), "tvm": ("tvm",)}
)

Lookup = Callable[[str], Any]  # an option's final value by its name, Inductor's default where none is set

TRITON = ("gpu", "triton")
TRITON_GEMM = (*TRITON, "large_gpu")
CUTLASS_GEMM = (*TRITON_GEMM, "cutlass", "nvcc")
GEMM_BACKENDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"TRITON": TRITON_GEMM, "CUTLASS": CUTLASS_GEMM, "CPP": ("cxx",)}
)


@dataclass(frozen=True, slots=True)
class Rule:
    """An option, or a glob of them, that acts only under conditions.

    `needs` names requirements; `unless` returns the reason why the option is inert beside the others, or "".
    """

    options: str
    needs: tuple[str, ...] = ()
    unless: Callable[[Lookup, Machine], str] = lambda value, machine: ""


def _not_autotuned(value: Lookup, machine: Machine) -> str:
    autotunes = value("max_autotune") or value("max_autotune_gemm")
    return "" if autotunes else "it is read only under max_autotune or max_autotune_gemm"


def _no_backend_here(value: Lookup, machine: Machine) -> str:
    """Tell why none of the kernel generators asked for can serve here: only library calls are left."""
    asked = [name for name in _gemm_backends(value) if name != "ATEN"]
    lacking = [unmet(GEMM_BACKENDS.get(name, ()), machine) for name in asked]
    return lacking[0][0].reason if asked and all(lacking) else ""


def _backend_not_asked(name: str) -> Callable[[Lookup, Machine], str]:
    def reason(value: Lookup, machine: Machine) -> str:
        named = name in _gemm_backends(value)
        return _not_autotuned(value, machine) or ("" if named else f"max_autotune_gemm_backends does not name {name}")

    return reason


def _gemm_backends(value: Lookup) -> list[str]:
    return str(value("max_autotune_gemm_backends")).upper().replace(" ", "").split(",")


RULES: tuple[Rule, ...] = (
    Rule("triton.*", needs=TRITON),
    Rule("triton.enable_persistent_tma_matmul", needs=(*TRITON_GEMM, "tma"), unless=_backend_not_asked("TRITON")),
    Rule("triton.enable_template_tma_store", needs=(*TRITON_GEMM, "tma"), unless=_backend_not_asked("TRITON")),
    Rule("cuda.*", needs=("gpu",)),
    Rule("cutlass.*", needs=CUTLASS_GEMM, unless=_backend_not_asked("CUTLASS")),
    Rule("coordinate_descent_*", needs=TRITON),
    Rule("eager_numerics.*", needs=TRITON),
    Rule("max_autotune_gemm", unless=_no_backend_here),
    Rule("max_autotune_*_backends", unless=_not_autotuned),
    Rule("max_autotune_gemm_backends", unless=_no_backend_here),
    Rule("max_autotune_conv_backends", needs=TRITON_GEMM),
    Rule("max_autotune_pointwise", needs=TRITON),
    Rule("cpp.*", needs=("cxx",)),
    Rule(
        "freezing_discard_parameters",
        unless=lambda value, machine: "freezing works on a copy; the module keeps its own",
    ),
    Rule("cpp_wrapper", needs=("cxx",)),
)


def limits(subject: str, needs: Iterable[str], otherwise: str = "") -> list[Limit]:
    """Return what of `needs` this machine lacks, the first alone: the others often follow from it."""
    return [Limit(subject, lacking.reason, lacking.remedy, otherwise) for lacking in unmet(needs, machine())[:1]]


def unmet(needs: Iterable[str], machine: Machine) -> list[Requirement]:
    """Return those of the named requirements that `machine` does not meet."""
    return [REQUIREMENTS[need] for need in needs if not REQUIREMENTS[need].met(machine)]


def inert(options: Mapping[str, Any], default: Lookup, machine: Machine) -> dict[str, str]:
    """Return, for each of `options` that cannot act on `machine` or beside the others, the reason."""

    def value(name: str) -> Any:
        return options[name] if name in options else default(name)

    return {name: why for name in options if (why := _reason(name, value, machine))}


def _reason(name: str, value: Lookup, machine: Machine) -> str:
    rules = [rule for rule in RULES if fnmatchcase(name, rule.options)]
    lacking = unmet((need for rule in rules for need in rule.needs), machine)
    return lacking[0].reason if lacking else next(filter(None, (rule.unless(value, machine) for rule in rules)), "")


@cache
def machine() -> Machine:
    """Look at this machine, once."""
    import torch
    from torch.utils._triton import has_triton, has_triton_tma_device

    has_gpu = torch.cuda.is_available()
    properties = torch.cuda.get_device_properties(0) if has_gpu else None
    return Machine(
        gpu=properties.name if properties else None,
        capability=(properties.major, properties.minor) if properties else (0, 0),
        sms=properties.multi_processor_count if properties else 0,
        hip=torch.version.hip is not None,
        triton=has_gpu and has_triton(),
        triton_tma=has_gpu and has_triton_tma_device(),
        cxx=_cxx(),
        nvcc=shutil.which("nvcc"),
        packages=frozenset(name for name in OPTIONAL_PACKAGES if find_spec(name)),
    )


def _cxx() -> str | None:
    return shutil.which(os.environ.get("CXX", "")) or next(filter(None, map(shutil.which, ("g++", "clang++"))), None)

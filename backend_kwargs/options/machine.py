"""The one description of a machine, and what options and templates require of it and of each other.

How it is found out, and under which names its fields are stored, come first. Then one table has what may be required of
it, another the rules about options. Warnings, `strict`, `list`, `doctor` and `explain` read both.
"""

import ctypes
import os
import platform
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Container, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from subprocess import DEVNULL
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from backend_kwargs.errors import BackendKwargsError, pip_install, unknown
from backend_kwargs.keys import digest
from backend_kwargs.options.option import Options

if TYPE_CHECKING:
    from torch import device as device_type  # `torch` is a field of a machine

CUTLASS_PACKAGES = ("cutlass_library", "cutlass_cppgen", "pycute")
CUTLASS_VARIABLE = "TORCHINDUCTOR_CUTLASS_DIR"
CXX_LIMIT_S = 10.0
# Of ONEDNN_MAX_CPU_ISA: instructions that multiply no half precision.
WITHOUT_HALF = frozenset({"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI"})
HALF = {"bf16": {"avx512_bf16", "amx_tile"}, "fp16": {"amx_fp16"}}


@dataclass(frozen=True, slots=True)
class Machine:
    """The properties of a machine; the defaults describe a machine without any.

    `gpu` is the name of the first CUDA device, `cuda` the version that torch was built for, `driver` the newest CUDA
    version that the driver supports, `cutlass` the CUTLASS directory that Inductor would use, `cpu_dtypes` the half
    precisions for which the CPU has instructions, `packages` contains what can be imported. `cpu` is what ATen uses of
    the CPU, `processor` its name, and `features` a hash of all that it has: Inductor compiles for that. `git` is the
    commit of torch's sources.
    """

    gpu: str | None = None
    capability: tuple[int, int] = (0, 0)
    sms: int = 0
    hip: bool = False
    triton: bool = False
    triton_tma: bool = False
    cxx: str | None = None
    nvcc: str | None = None
    packages: Container[str] = frozenset()
    torch: str = ""
    cuda: str | None = None
    driver: str | None = None
    triton_version: str | None = None
    cutlass: str | None = None
    torchao: str | None = None
    cpu_dtypes: frozenset[str] = frozenset()
    cpu: str = ""
    processor: str = ""
    features: str = ""
    python: str = ""
    system: str = ""
    git: str = ""

    def without_gpu(self) -> "Machine":
        """Return the same machine for what runs on its CPU."""
        return replace(self, gpu=None, capability=(0, 0), sms=0, triton=False, triton_tma=False)

    def on(self, device: "device_type") -> "Machine":
        """Return the same machine with this GPU in place of the first one, without any for what runs on its CPU."""
        import torch

        if device.type != "cuda":
            return self.without_gpu()
        capability = torch.cuda.get_device_capability(device)
        return replace(self, gpu=torch.cuda.get_device_name(device), capability=capability)

    def stored(self, kind: str) -> dict[str, Any]:
        """Return what documents of a kind of `STORED` keep of this machine."""
        return {name: value(self) for name, value in STORED[kind].items()}

    def facts(self) -> dict[str, str]:
        """Return the properties as text for people to read."""
        capability = ".".join(map(str, self.capability))
        tma = "with" if self.triton_tma else "without"
        return {
            "torch": f"{self.torch}, {f'built for CUDA {self.cuda}' if self.cuda else 'built without CUDA'}",
            "driver": f"serves CUDA up to {self.driver}" if self.driver else "none",
            "GPU": f"{self.gpu}, compute capability {capability}, {self.sms} multiprocessors" if self.gpu else "none",
            "Triton": f"{self.triton_version}, {tma} TMA for this GPU" if self.triton_version else "none",
            "CPU": f"products in {' and '.join(sorted(self.cpu_dtypes)) or 'neither bf16 nor fp16'}",
            "C++ compiler": self.cxx or "none",
            "nvcc": self.nvcc or "none",
            "CUTLASS": self.cutlass or "none",
            "torchao": self.torchao or "none",
        }


_Stored = Mapping[str, Callable[[Machine], object]]
_COMPILED_FOR: _Stored = {
    "torch": lambda here: here.torch,
    "git": lambda here: here.git,
    "python": lambda here: here.python.rpartition(".")[0],
    "system": lambda here: here.system,
    "cpu": lambda here: f"{here.cpu} {here.features}",
}
# What is kept of a machine, by what it is kept with: the field's name there, and its value. Each kind of document has
# the names that it had first, so that "cpu" is a name, or what ATen uses, or that and all features.
STORED: Mapping[str, _Stored] = MappingProxyType(
    {
        "figure": {
            "torch": lambda here: here.torch,
            "python": lambda here: here.python,
            "platform": lambda here: platform.platform(),
            "device_name": lambda here: here.gpu or here.processor,
            "cpu": lambda here: here.processor,
            "cpus": lambda here: os.cpu_count(),
            "cuda": lambda here: here.cuda,
            "triton": lambda here: here.triton_version,
        },
        "decision": {
            "gpu": lambda here: here.gpu,
            "cuda": lambda here: here.cuda,
            "driver": lambda here: here.driver,
            "cpu": lambda here: here.cpu,
        },
        "code for a CPU": _COMPILED_FOR,
        "code for a GPU": {
            **_COMPILED_FOR,
            "gpu": lambda here: here.gpu,
            "capability": lambda here: ".".join(map(str, here.capability)),
            "cuda": lambda here: here.cuda,
            "driver": lambda here: here.driver,
            "triton": lambda here: here.triton_version or "none",
        },
    }
)


class _Importable:
    """The names of all packages that can be imported here."""

    def __contains__(self, name: object) -> bool:
        return find_spec(str(name)) is not None


@cache
def machine() -> Machine:
    """Return this machine's properties, detected once."""
    import torch

    from backend_kwargs.torch_internals.triton import has_triton, has_triton_tma_device

    has_gpu, cpu, found = torch.cuda.is_available(), torch.backends.cpu.get_cpu_capability(), _cpuinfo()
    properties = torch.cuda.get_device_properties(0) if has_gpu else None
    flags = sorted((found.get("flags") or found.get("Features", "")).split())
    # torch reports instructions only of x86.
    half = {name for names in HALF.values() for name in names if getattr(torch.cpu, f"_is_{name}_supported", bool)()}
    # First Inductor's nvcc, then that of torch.utils.cpp_extension.
    homes = filter(None, (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"))
    nvccs = os.environ.get("CUDACXX", ""), "nvcc", *(f"{home}/bin/nvcc" for home in homes)
    has_cutlass = all(map(find_spec, CUTLASS_PACKAGES))
    return Machine(
        gpu=properties.name if properties else None,
        capability=(properties.major, properties.minor) if properties else (0, 0),
        sms=properties.multi_processor_count if properties else 0,
        hip=torch.version.hip is not None,
        triton=has_gpu and has_triton(),
        triton_tma=has_gpu and has_triton_tma_device(),
        cxx=shutil.which(cxx_of({})),
        nvcc=next(filter(None, map(shutil.which, nvccs)), None),
        packages=_Importable(),
        torch=torch.__version__,
        cuda=torch.version.cuda,
        driver=_driver(),
        triton_version=installed_version("triton", "pytorch-triton"),
        cutlass=os.environ.get(CUTLASS_VARIABLE)
        or (f"nvidia-cutlass {installed_version('nvidia-cutlass')}" if has_cutlass else None),
        torchao=installed_version("torchao"),
        cpu_dtypes=cpu_dtypes(half, cpu, os.environ.get("ONEDNN_MAX_CPU_ISA", "")),
        cpu=cpu,
        processor=found.get("model name") or platform.processor() or platform.machine(),
        features=digest(" ".join(flags).encode(), 12) if found else platform.processor(),
        python=platform.python_version(),
        system=f"{sys.platform} {platform.machine()}",
        git=str(torch.version.git_version),
    )


def cxx_of(options: Options) -> str:
    """Return the C++ compiler that Inductor tries first; as in its option cpp.cxx, CXX precedes the usual one."""
    given = options.get("cpp.cxx")
    usual = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    return next(filter(None, [given] if isinstance(given, str) else given or ()), usual)


@cache
def silent_cxx(given: str | tuple[str | None, ...] | None, environment: str | None) -> str:
    """Return the C++ compiler that Inductor tries first if it does not answer `--version`, "" if it does.

    Inductor would wait for it without end. `given` is the option cpp.cxx, and `environment` the variable CXX.
    """
    cxx = cxx_of({"cpp.cxx": given})
    try:
        # No pipes, which a process that the compiler started would keep open.
        subprocess.run([cxx, "--version"], stdout=DEVNULL, stderr=DEVNULL, timeout=CXX_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return cxx
    except OSError:
        return ""  # torch tries another one, or raises an error of its own
    return ""


def _cpuinfo() -> dict[str, str]:
    """Return what Linux says of the first processor, by its words; {} if it says nothing."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in reversed(lines))}


def cpu_dtypes(instructions: Set[str], aten: str, onednn: str) -> frozenset[str]:
    """Return the half precisions that a CPU with these instructions multiplies.

    None where a variable keeps ATen's capability or oneDNN's limit to an older processor's.
    """
    if aten in ("DEFAULT", "AVX2") or onednn.upper() in WITHOUT_HALF:
        return frozenset()
    return frozenset(dtype for dtype, any_of in HALF.items() if any_of & instructions)


def _driver() -> str | None:
    version = ctypes.c_int(0)
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):  # no driver, or one for another system
        return None
    return f"{version.value // 1000}.{version.value % 1000 // 10}" if version.value else None


def places_of(package: str) -> list[Path]:
    """Return the folders of an installed package, none if it is not installed; imports nothing."""
    spec = find_spec(package)
    return [Path(place) for place in (spec and spec.submodule_search_locations) or ()]


def installed_version(*distributions: str) -> str | None:
    """Return the version of the first installed one of these distributions, None if none is installed."""
    for name in distributions:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


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

    from backend_kwargs.torch_internals.tensors import dynamos_graph_class

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

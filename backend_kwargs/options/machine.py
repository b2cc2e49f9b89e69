"""The one description of a machine, how it is found out, and under which names its fields are stored."""

import ctypes
import os
import platform
import shutil
import sys
from collections.abc import Callable, Container, Mapping, Set
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from backend_kwargs.keys import digest
from backend_kwargs.options.layers import Options

if TYPE_CHECKING:
    from torch import device as device_type  # `torch` is a field of a machine

CUTLASS_PACKAGES = ("cutlass_library", "cutlass_cppgen", "pycute")
CUTLASS_VARIABLE = "TORCHINDUCTOR_CUTLASS_DIR"
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

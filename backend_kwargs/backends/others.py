"""The compilers other than Inductor, by name, and their spelling as candidates of a race: "tmpl-tvm[trials=64]"."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

from backend_kwargs import errors
from backend_kwargs.backends import DeclaredCompiler
from backend_kwargs.backends.onnxruntime.compiler import ONNXRuntimeCompiler
from backend_kwargs.backends.openvino.compiler import OpenVINONativeCompiler
from backend_kwargs.backends.tvm.compiler import TVMCompiler
from backend_kwargs.errors import BackendKwargsError
from backend_kwargs.options import Options, convert, is_data, join_candidate, merge, same, split_candidates

# A compiler is its folder or module and its place here; each is found with and without "tmpl-".
COMPILERS: tuple[type[DeclaredCompiler], ...] = (
    TVMCompiler,
    ONNXRuntimeCompiler,
    OpenVINONativeCompiler,
)
OTHERS: Mapping[str, type[DeclaredCompiler]] = MappingProxyType(
    {name: each for each in COMPILERS for name in (each.registered, each.registered.removeprefix("tmpl-"))}
)
# Backends of release 0.1, found with and without "tmpl-", and what to write now. "tmpl-openvino" does not forward to
# OpenVINO's own backend, which overwrites the results of earlier calls and reports no fallback.
FORMER: Mapping[str, str] = MappingProxyType(
    {
        "openvino": "'openvino-native', or 'openvino' for OpenVINO's own backend",
        "tensorrt": "'torch_tensorrt' for Torch-TensorRT's own backend",
    }
)
OF_PRECISION = frozenset({"precision", "max_error", "inference_precision"})
# On a CPU `effort="full"` also races those of these that are installed.
RACED = tuple(each.registered for each in COMPILERS if each.raced)


@dataclass(frozen=True, slots=True)
class Other:
    """A compiler other than Inductor and its options, parsed from a candidate."""

    compiler: DeclaredCompiler
    options: Options

    def under(self, *, frozen: bool) -> dict[str, Any]:
        """Return its options, plus its option for frozen parameters if the caller froze them."""
        name = self.compiler.freeze_option
        return {**({name: True} if frozen and name else {}), **self.options}


def in_precision(text: str, precision: str, max_error: float | None) -> str:
    """Return the candidate `text` with a precision and its bound, "" if its compiler has none or it sets its own."""
    ((name, options),) = split_candidates(text)
    if name not in OTHERS or precision not in OTHERS[name](name).precisions or OF_PRECISION & options.keys():
        return ""
    return join_candidate(name, {**options, "precision": precision, "max_error": repr(max_error)})


def is_former(name: str) -> bool:
    """Return whether a name was that of a backend in release 0.1."""
    return name.removeprefix("tmpl-") in FORMER


def removed(name: str, kind: str = "Backend") -> BackendKwargsError:
    """Return the error that says what to write instead of a former name."""
    return errors.removed(f"{kind} {name!r}", f"write {FORMER[name.removeprefix('tmpl-')]}")


def is_other(text: str) -> bool:
    """Return whether a candidate names another compiler, or a name close to one followed by options."""
    head = text.partition("[")[0].strip()
    return head in OTHERS or is_former(head) or ("[" in text and bool(get_close_matches(head, OTHERS, n=1, cutoff=0.8)))


def other_of(text: str) -> Other:
    """Return the compiler and the checked options of a candidate; raise if an option is unknown, wrong, or code."""
    candidates = split_candidates(text)
    if is_former(candidates[0][0]):
        raise removed(candidates[0][0], "Candidate")
    if len(candidates) != 1 or candidates[0][0] not in OTHERS:
        raise BackendKwargsError(
            f"Candidate {text!r} must be a compiler's name, with its options in brackets: 'tmpl-tvm[trials=64]'."
        )
    ((name, options),) = candidates
    compiler = OTHERS[name](name)
    # A candidate may come from a file; whether the file is trusted is no longer known here.
    for option in map(compiler.option, options):
        if not is_data(option):
            raise BackendKwargsError(
                f"Candidate {text!r} sets {option.name!r}, which is code; a candidate may set only data: leave it out."
            )
    return Other(compiler, merge(compiler.read(f"candidate {name}", options, convert).layers))


def verify_other(text: str) -> None:
    """Raise if a candidate of another compiler is wrong or cannot work on this machine."""
    other = other_of(text)
    other.compiler.verify((), other.options, lambda limit: None)


def installed() -> tuple[str, ...]:
    """Return those of RACED that can work on this machine."""
    return tuple(name for name in RACED if _works(name))


def sets(text: str, compiler: str, options: Options) -> bool:
    """Return whether the candidate `text` names `compiler` and sets exactly `options`."""
    try:
        other = other_of(text)
    except BackendKwargsError:
        return False
    stored = _listed(options)
    return other.compiler.name == compiler and any(same(_listed(other.under(frozen=f)), stored) for f in (False, True))


def _listed(value: object) -> object:
    """Return `value` with lists in place of tuples, as a file has them."""
    if isinstance(value, Mapping):
        return {name: _listed(each) for name, each in value.items()}
    return [*map(_listed, value)] if isinstance(value, list | tuple) else value


def versions_of(texts: Iterable[str]) -> dict[str, Any]:
    """Return the versions of the compilers that candidates name, for the keys of decisions."""
    return {name: OTHERS[name](name).versions() for name in sorted({text.partition("[")[0].strip() for text in texts})}


def _works(name: str) -> bool:
    """Return whether a compiler can work on this machine."""
    try:
        verify_other(name)
    except BackendKwargsError:
        return False
    return True

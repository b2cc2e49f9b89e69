"""Graphs that Inductor cannot compile with some options, and the options used instead.

Triton's kernels alone fail if one GEMM has none, and ATen's operators alone if a list of tensors is changed in place. A
forward and its backward graph fall back separately.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from backend_kwargs.backends import Inputs
from backend_kwargs.errors import BackendKwargsError, warn_once
from backend_kwargs.facts import Call
from backend_kwargs.options import Options, generators, limits_of_options
from backend_kwargs.options.catalogue import inductor_option
from backend_kwargs.options.machine import Machine

if TYPE_CHECKING:
    from torch.fx import GraphModule

AUTOTUNED_BACKENDS = ("max_autotune_gemm_backends", "max_autotune_conv_backends")


def aten_where_alone(config: Options, here: Machine) -> dict[str, str]:
    """Return the lists of GEMM backends with ATen added, if none of the requested kernel generators works here."""
    if "max_autotune_gemm_backends" not in config:
        return {}
    limits = limits_of_options(config, lambda name: inductor_option(name).default, here)
    alone = (limit := limits.get("max_autotune_gemm_backends")) and limit.of_machine  # no generator
    return _with_aten(config) if alone else {}


def _with_aten(config: Options) -> dict[str, str]:
    """Return the lists of backends that lack ATen, with ATen."""
    asked = {name: config[name] for name in AUTOTUNED_BACKENDS if name in config}
    return {name: f"{backends},ATEN" for name, backends in asked.items() if "ATEN" not in generators(backends)}


def _no_kernel(config: Options) -> str:
    names = " or ".join(dict.fromkeys(each.removesuffix(",ATEN") for each in _with_aten(config).values()))
    return f"A GEMM or convolution of this graph has no {names} kernel"


@dataclass(frozen=True, slots=True)
class Fallback:
    """A failure of Inductor with some options, recognized by the text of its error.

    `instead` returns replacements for the offending ones among the requested options, {} if there are none; `reason`
    names the cause, and `remedy` what is done about it.
    """

    error: str
    instead: Callable[[Options], dict[str, Any]]
    reason: Callable[[Options], str]
    remedy: str


FALLBACKS = (
    Fallback(
        "NoValidChoicesError",
        _with_aten,
        _no_kernel,
        "ATEN's serve the graph as well",
    ),
    # An in-place operator on a list of tensors, as in an optimizer, has no fallback.
    Fallback(
        "<built-in function getitem> is not an OpOverload",
        lambda config: {"fallback_by_default": False} if config.get("fallback_by_default") else {},
        lambda config: "Inductor cannot leave what this graph does to ATen's operators alone",
        "it generates code",
    ),
)


def can_fall_back(config: Options) -> bool:
    """Return whether `config` has options with which some graphs fail to compile."""
    return any(fallback.instead(config) for fallback in FALLBACKS)


def compile_with_fallback(gm: "GraphModule", example_inputs: Inputs, *, strict: bool, **kwargs: Any) -> Call:
    """Compile a lowered graph; if the requested options make it fail, compile it without them, or raise if `strict`."""
    from backend_kwargs.torch_internals import inductor_config
    from backend_kwargs.torch_internals.compile_fx import compile_fx_inner
    from backend_kwargs.torch_internals.relowering import spare_of

    spare = spare_of(gm)
    asked = {name: inductor_config.value(name) for name in (*AUTOTUNED_BACKENDS, "fallback_by_default")}
    try:
        return compile_fx_inner(gm, example_inputs, **kwargs)
    except Exception as error:
        fallback = next((h for h in FALLBACKS if h.error in str(error) and h.instead(asked)), None)
        if fallback is None:
            raise
        why = fallback.reason(asked)
        if strict:
            raise BackendKwargsError(f"{why}; without strict=True {fallback.remedy}.") from None
    warn_once(f"{why}; {fallback.remedy}.")
    with inductor_config.patched(fallback.instead(asked)):
        return compile_fx_inner(spare, example_inputs, **kwargs)

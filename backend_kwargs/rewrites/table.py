"""Rewrites: named replacements of parts of a graph, and the lookup of a name. Imports no torch.

A name is looked up in the built-in table, then among the rewrites registered in this process, then among the entry
points of installed packages. Only the entry point of that name is loaded.
"""

import hashlib
import inspect
import os
import pkgutil
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

from backend_kwargs.errors import BackendKwargsError, wrong_value
from backend_kwargs.options.named_values import NamedValues

ENTRY_POINT_GROUP = "backend_kwargs.rewrites"
# Training may rely on nan being propagated, so `auto` uses such calls for inference only.
NAN = "the library's ReLU may turn nan into 0"
OBJECTIVES = ("latency", "memory")  # of the races that may try a rewrite
OURS = "backend_kwargs.rewrites"


@dataclass(frozen=True, slots=True)
class Rewrite:
    """A named replacement of part of a graph.

    Give exactly one of `patterns` and `traced`: a function, or "module:function", which is imported for the first
    graph. `patterns(matcher_pass)` registers patterns on a `torch._inductor.pattern_matcher.PatternMatcherPass`; they
    apply to the graphs that Inductor lowers, forward and backward. `traced(gm, example_inputs)` takes dynamo's graph
    and returns a `Change` or None.

    `operators` lists the operators of the rewrite that the generated code calls, as "namespace::name": `report` counts
    them there. Without any, what the rewrite replaces in dynamo's graph is counted. `needs` names entries of
    `requirements.REQUIREMENTS`; `applies` describes the dtypes, layouts and modes that it matches; `explain` shows it,
    with `costs`. `same_function` is False if the result can differ from the graph's by more than rounding; such a
    rewrite applies only where it is named. `fitting(stats)` returns whether a graph with these statistics can match,
    and `objective` names the races that try the rewrite. `early`: it seldom loses, so that a race has it in its first
    candidate, where that may be the only one.
    """

    summary: str
    patterns: str | Callable[[Any], None] = ""
    traced: str | Callable[[Any, Any], Any] = ""
    operators: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    applies: str = ""
    same_function: bool = True
    costs: str = ""
    version: int = 1
    fitting: Callable[[Any], bool] = lambda stats: True
    objective: str = "latency"
    early: bool = False

    def __post_init__(self) -> None:
        for name in ("operators", "needs"):
            if isinstance(value := getattr(self, name), str):
                raise wrong_value(f"Rewrite's {name!r}", "a tuple of str", value)
            object.__setattr__(self, name, tuple(value))
        if bool(self.patterns) == bool(self.traced):
            raise BackendKwargsError("A rewrite must have either `patterns` or `traced`; give exactly one.")
        function = self.patterns or self.traced
        if not (callable(function) or (isinstance(function, str) and ":" in function)):
            name = "patterns" if self.patterns else "traced"
            raise wrong_value(f"Rewrite's {name!r}", "a function or 'module:function'", function)
        if wrong := [each for each in self.operators if "::" not in each]:
            raise wrong_value("Rewrite's 'operators'", "of the form 'namespace::name'", wrong[0])
        if self.objective not in OBJECTIVES:
            raise wrong_value("Rewrite's 'objective'", " or ".join(map(repr, OBJECTIVES)), self.objective)


ONEDNN = ("gelu", "silu", "sigmoid", "tanh", "hardswish", "hardsigmoid", "hardtanh")  # by ATen's names


def _has(stats: Any, *names: str) -> bool:
    """Return whether one of these operators ran, in place or not."""
    return any(name in stats.names or f"{name}_" in stats.names for name in names)


def _may_gather_and_sum(stats: Any) -> bool:
    sums = _has(stats, "sum", "mean") and _has(stats, "index", "index_select", "embedding")
    return stats.gpu and (sums or _has(stats, "_embedding_bag", "_embedding_bag_forward_only"))


def _may_use_onednn(stats: Any) -> bool:
    return not stats.gpu and not stats.training and stats.gemms + stats.convolutions > 0


BUILT_IN: Mapping[str, Rewrite] = MappingProxyType(
    {
        "convolution": Rewrite(
            "Convolution, bias or a norm in eval mode (or any scale and shift of channels), a residual and ReLU as one "
            "library call",
            patterns=f"{OURS}.convolution:add_patterns",
            operators=("backend_kwargs::conv_relu", "backend_kwargs::conv_add_relu"),
            applies="float32 or half precision (on a CPU not float16); on a GPU channels last, without groups",
            costs=f"a norm is folded into weights at each call, rounded to their dtype; {NAN}",
            fitting=lambda stats: stats.convolutions > 0 and not stats.training and _has(stats, "relu"),
        ),
        "grouped_convolution": Rewrite(
            "Convolutions in groups, depthwise ones among them, by our own kernels: cuDNN's are slow in channels last",
            patterns=f"{OURS}.grouped_convolution:add_patterns",
            operators=("backend_kwargs::grouped_convolution",),
            needs=("gpu",),
            applies="half precision in channels last, at most 64 channels in a group",
            costs="depthwise ones have not been timed",
            fitting=lambda stats: stats.gpu and stats.convolutions > 0 and not stats.training,
        ),
        "patches": Rewrite(
            "Convolutions of patches that do not overlap, as by the first layer of a vision transformer, as a product",
            traced=f"{OURS}.patches:multiply_patches",
            needs=("gpu",),
            applies="half precision; a stride of the kernel's size, no padding, and sizes that do not vary",
            fitting=lambda stats: stats.gpu and stats.convolutions > 0,
            early=True,
        ),
        "linear_activation": Rewrite(
            "Linear with bias and ReLU or tanh-GELU, also one that is written out, as one library call",
            patterns=f"{OURS}.linear:add_patterns",
            operators=("backend_kwargs::linear_relu", "backend_kwargs::linear_gelu"),
            applies="float32 or half precision (on a CPU not float16)",
            costs=NAN,
            fitting=lambda stats: stats.gemms > 0 and not stats.training and _has(stats, "relu", "gelu", "tanh"),
        ),
        "onednn": Rewrite(
            "Linear or convolution and another activation (GELU, SiLU, ...) as one call of oneDNN, on a CPU",
            patterns=f"{OURS}.onednn:add_patterns",
            operators=("backend_kwargs::linear_onednn", "backend_kwargs::conv_onednn"),
            applies="a CPU, float32 or bfloat16",
            costs="a norm is folded into weights at each call, rounded to their dtype; nan may be lost",
            fitting=lambda stats: _may_use_onednn(stats) and _has(stats, *ONEDNN),
        ),
        "attention": Rewrite(
            "Attention that is spelt out, or has a bias over few keys, as one call",
            patterns=f"{OURS}.attention:add_patterns",
            operators=("backend_kwargs::attention",),
            applies="inference in float32 or half precision; a bias has no more digits than the heads",
            fitting=lambda stats: (stats.softmaxes > 0 and stats.gemms > 1) or (stats.gpu and stats.attentions > 0),
        ),
        "cudnn_attention": Rewrite(
            "cuDNN's kernel instead of the one that scaled_dot_product_attention chose",
            patterns=f"{OURS}.library_attention:add_cudnn_patterns",
            operators=("backend_kwargs::cudnn_attention",),
            needs=("gpu",),
            applies="inference in half precision",
            fitting=lambda stats: stats.attentions > 0,
        ),
        "attention_mask": Rewrite(
            "Masks that are expanded over the keys, copied so that scaled_dot_product_attention has a fused kernel",
            traced=f"{OURS}.attention_mask:make_dense",
            needs=("gpu",),
            applies="float32 or half precision; masks without gradients, of last stride 0",
            costs="memory for the mask of one head",
            fitting=lambda stats: stats.gpu and stats.softmaxes + stats.attentions > 0,
            early=True,
        ),
        "multihead_attention": Rewrite(
            "nn.MultiheadAttention with queries, keys and values as views of its products, which torch copies",
            traced=f"{OURS}.multihead_attention:attend_without_copies",
            needs=("gpu",),
            applies="calls with need_weights=False, as nn.TransformerEncoderLayer makes them in training",
            fitting=lambda stats: stats.gpu and stats.attentions > 0,
            early=True,
        ),
        "decode_attention": Rewrite(
            "Attention of a few queries over many keys, as in decoding, by kernels that share the keys of a head",
            traced=f"{OURS}.decode_attention:split_keys",
            needs=("gpu",),
            applies="float32 or half precision, without gradients; with a mask or repeated keys; at most 64 queries, "
            "counted for each head that shares keys",
            fitting=lambda stats: stats.gpu and stats.attentions + stats.softmaxes > 0 and not stats.training,
            early=True,
        ),
        "cross_entropy": Rewrite(
            "Cross-entropy, forward and backward, by kernels that read the logits once each",
            traced=f"{OURS}.losses:fuse_cross_entropy",
            applies="float32 or half precision; the mean over class indices (int64)",
            fitting=lambda stats: stats.gpu and stats.softmaxes > 0,
        ),
        "linear_cross_entropy": Rewrite(
            "A linear layer and cross-entropy in chunks of rows, so that few logits are in memory at a time",
            traced=f"{OURS}.losses:fuse_linear_cross_entropy",
            operators=("backend_kwargs::linear_cross_entropy",),
            applies="float32 or bfloat16; the mean over class indices (int64), without a bias",
            costs="about a tenth slower; gradients are computed in the forward pass and rounded once for each chunk",
            fitting=lambda stats: stats.softmaxes > 0 and stats.gemms > 0,
            objective="memory",
        ),
        "layer_norm_backward": Rewrite(
            "Layer norm's gradients by one kernel, which reads its input and the incoming gradient once",
            traced=f"{OURS}.layer_norm:fuse_gradients",
            operators=("backend_kwargs::layer_norm_backward",),
            applies="layer norms in training, or calls of ATen's gradients of them, in float32 or half precision; "
            "contiguous rows of at most 8192",
            costs="what follows the gradient of the input is no longer part of its kernel",
            fitting=lambda stats: stats.gpu and _has(stats, "native_layer_norm_backward"),
        ),
        "rotary": Rewrite(
            "The rotary embedding, forward and backward, by a kernel that reads each half of a head once",
            traced=f"{OURS}.rotary:fuse_rotary",
            applies="float32 or half precision",
            costs="what comes before and after is no longer part of its kernel",
            fitting=lambda stats: stats.gpu and _has(stats, "cat"),
        ),
        "matrix_vector": Rewrite(
            "Batched products of a matrix and a vector as multiply and sum, fused with what is around them",
            traced=f"{OURS}.matrix_vector:multiply_and_sum",
            needs=("gpu",),
            applies="float32 or half precision, at most 256 summands",
            fitting=lambda stats: stats.gpu and stats.gemms > 0,
            early=True,
        ),
        "gather_sum": Rewrite(
            "Sums and means of gathered rows (bags of embeddings, the outputs of a token's experts) by our own kernel",
            traced=f"{OURS}.gather_sum:fuse_gather_sum",
            needs=("gpu",),
            applies="float32 or half precision, without gradients; at most 256 rows in each sum",
            fitting=_may_gather_and_sum,
            early=True,
        ),
        "packed": Rewrite(
            "Linear layers that share an input as one product of packed weights (q, k and v, or gate and up)",
            traced=f"{OURS}.packed:pack",
            applies="while no gradients are recorded; weights of one dtype",
            same_function=False,
            costs="a copy of each packed weight, checked at each call; writes through `.data` go unnoticed",
            fitting=lambda stats: stats.gemms > 1 and not stats.training,
        ),
        "approximate_gelu": Rewrite(
            "Linear with bias and exact GELU as one library call with tanh-GELU",
            patterns=f"{OURS}.linear:add_approximate_patterns",
            operators=("backend_kwargs::linear_approximated_gelu",),
            applies="float32 or half precision (on a CPU not float16)",
            same_function=False,
            costs="tanh-GELU differs from exact GELU by up to 5e-4",
            fitting=lambda stats: stats.gemms > 0 and _has(stats, "gelu", "erf"),
        ),
    }
)

_REWRITES = NamedValues(
    "rewrite",
    ENTRY_POINT_GROUP,
    BUILT_IN,
    read=lambda entry, loaded: loaded if isinstance(loaded, Rewrite) else None,
    wanted="a Rewrite",
    advice=lambda names: f"Rewrites are {', '.join(names)}.",
)
_registered = _REWRITES.registered

find_rewrite = _REWRITES.find


def list_rewrites() -> list[str]:
    """Return the names of every rewrite: built in, registered, or offered by an installed package."""
    return _REWRITES.names()


def register_rewrite(name: str, rewrite: Rewrite) -> None:
    """Register `rewrite` for options and `auto`. Raise if another rewrite already has this name."""
    if not isinstance(rewrite, Rewrite):
        raise wrong_value("register_rewrite's second argument", "a Rewrite", rewrite)
    _REWRITES.register({name: rewrite}, Rewrite.__eq__, "exists and is another")


def check_rewrites(names: Iterable[str]) -> None:
    """Raise if one of `names` is not a rewrite."""
    for name in names:
        find_rewrite(name)


def raced_rewrites(named: Iterable[str] | None) -> tuple[str, ...]:
    """Return the rewrites that `auto` may race: those that compute the same function, and those in `named`.

    An empty `named` allows none. Rewrites of installed packages are raced only if named.
    """
    if named is not None and not tuple(named):
        return ()
    exact = (name for name, rewrite in {**BUILT_IN, **_registered}.items() if rewrite.same_function)
    return tuple(dict.fromkeys((*exact, *(named or ()))))


def fingerprint(names: Iterable[str]) -> str:
    """Return a hash of the versions and sources of the rewrites `names`, for the keys of Inductor's caches."""
    parts = [f"{name} {find_rewrite(name).version} {_source_hash(find_rewrite(name))}" for name in names]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def resolved(function: str | Callable[..., Any]) -> Callable[..., Any]:
    """Return `function`, imported if it is given as "module:function"."""
    found: Callable[..., Any] = pkgutil.resolve_name(function) if isinstance(function, str) else function
    return found


def _source_hash(rewrite: Rewrite) -> str:
    function = rewrite.patterns or rewrite.traced
    module = function.partition(":")[0] if isinstance(function, str) else getattr(function, "__module__", "")
    text = _main_text() if module == "__main__" else _module_text(module)
    if not isinstance(function, str):
        text += _code_text(function) + _held(function)
    return hashlib.sha256(text.encode()).hexdigest()


def _code_text(function: Callable[..., Any]) -> str:
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):  # typed at a prompt, or not a plain function
        code = getattr(function, "__code__", None)
        return f"{code.co_code.hex()} {code.co_consts} {code.co_names}" if code else repr(function)


def _held(function: Any) -> str:
    """Return the values that a function holds, as text: those of its closure and defaults.

    The text of an object with an address differs in each process, so that nothing is found that may be another's.
    """
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    return repr((cells, getattr(function, "__defaults__", None), getattr(function, "__kwdefaults__", None)))


def _main_text() -> str:
    """Return the source of the running script; without one, what differs in each process."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    try:
        return Path(path).read_text() if path else repr(os.getpid())
    except OSError:
        return repr(os.getpid())


@cache
def _module_text(module: str) -> str:
    """Return the source of a module; for one of ours, of all modules in its folder."""
    try:
        spec = find_spec(module) if module else None
    except (ImportError, ValueError):
        return ""
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        return ""
    path = Path(spec.origin)
    files = sorted(path.parent.rglob("*.py")) if module.startswith(f"{OURS}.") else [path]
    return "\n".join(each.read_text() for each in files)

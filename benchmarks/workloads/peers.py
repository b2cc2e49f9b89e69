"""All peers of the suite, in one table: the alternatives that a user has, and each template."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

from backend_kwargs import list_templates, make_backend
from backend_kwargs.errors import BackendKwargsError
from backend_kwargs.harness.trial import UnavailableError
from benchmarks.workloads.case import Case, Mode

Kind = Literal[
    "eager", "graph", "ahead", "mode", "clone", "template", "auto", "winner", "hand", "tvm", "engine", "control"
]
TEMPLATES = "tmpl-inductor:"
LAUNCH_BOUND = ("gemm_decode_1", "sdpa_decode", "dlrm", "llama_decode_*", "resnet50_b1")
HAND = "hand:"
BASELINES = ("eager", "default")  # timed in each group, so that every ratio is within one process
WINNER = "winner"
WITHOUT_REWRITES = "auto-no-rewrites"
MODELS = "models"  # the suite of real models
GLOBS: Mapping[str, tuple[str, ...]] = {
    "smoke": (
        *("eager", "default", f"{TEMPLATES}default", f"{TEMPLATES}fast_compile"),
        *("openvino-native", "onnxruntime", f"{HAND}*"),
    ),
    MODELS: ("eager", "default", "reduce-overhead*", "max-autotune*", f"{TEMPLATES}auto"),
}


@dataclass(frozen=True, slots=True)
class Peer:
    """One way to run a case: `torch.compile`'s backend, mode and options; none of them if it is not compiled.

    "eager" and "graph" run the case uncompiled, "ahead" as an ahead-of-time package, "hand" a kernel of the case's own.
    "clone" is a mode whose caller clones the outputs of each call, "winner" is auto's choice, compiled alone. `devices`
    are those on which the peer differs from all others, `cases` globs of the cases that it runs on, `suite` the suite
    that it belongs to, `cache` the peer whose compiled code it uses. An "engine" is for inference, with frozen weights.
    """

    name: str
    kind: Kind
    backend: str | Callable[..., Any] | None = None
    mode: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    devices: tuple[str, ...] = ("cpu", "cuda")
    modes: tuple[Mode, ...] = ("fwd", "fwd_bwd", "train")
    cases: tuple[str, ...] = ("*",)
    suite: str = "full"
    hand: Callable[..., Any] | None = None
    cache: str = ""

    @property
    def compiles(self) -> bool:
        """Return whether it uses torch.compile."""
        return self.backend is not None


def _mode(name: str, mode: str | None, *devices: str) -> Peer:
    return Peer(name, "mode", "inductor", mode, devices=devices or ("cpu", "cuda"))


FIXED: tuple[Peer, ...] = (
    Peer("eager", "eager"),
    Peer("eager+graph", "graph", devices=("cuda",), modes=("fwd",)),
    Peer("aoti", "ahead", modes=("fwd",), cases=LAUNCH_BOUND),
    _mode("default", None),
    _mode("reduce-overhead", "reduce-overhead", "cuda"),
    _mode("max-autotune", "max-autotune"),
    _mode("max-autotune-no-cudagraphs", "max-autotune-no-cudagraphs", "cuda"),
    *(
        Peer(f"{mode}+clone", "clone", "inductor", mode, devices=("cuda",))
        for mode in ("reduce-overhead", "max-autotune")
    ),
)
# Templates that compile too slowly for every case with an empty cache: about 100 s of nvcc, 45 s of g++, 300 s of
# Triton.
SLOW: Mapping[str, tuple[str, ...]] = {
    "cutlass": ("gemm_prefill", "gemm_decode_16"),
    "cpp_wrapper": ("gemm_*", "linear_*", "rms_*", "softmax", "swiglu"),
    "triton": ("*", "!llama_train"),
}
# Where a rewrite for GPUs may match; elsewhere auto races the same candidates without rewrites.
REWRITTEN = (
    *("gemm_decode_*", "linear_*", "layer_norm*", "softmax", "cross_entropy", "rope"),
    *("moe_*", "unet_level", "mamba_scan", "dlrm", "llama*", "vit_*", "resnet50_*", "bert_*"),
)
# TVM for the whole graph, or no figure, except for reading by indices, which always runs in eager, as it may raise.
IN_TVM: Mapping[str, Any] = {
    "fallback": "error",
    "aten_ops": ("embedding", "gather", "index", "index_put", "index_select"),
}
LAST: tuple[Peer, ...] = (
    Peer(f"{TEMPLATES}auto", "auto", f"{TEMPLATES}auto"),
    Peer(WITHOUT_REWRITES, "auto", f"{TEMPLATES}auto", options={"rewrites": ()}, cases=REWRITTEN),
    Peer("auto-full", "auto", f"{TEMPLATES}auto", options={"effort": "full"}, suite="dev"),
    Peer("tvm-untuned", "tvm", "tmpl-tvm", options=IN_TVM, devices=("cpu",), modes=("fwd",)),
    Peer(
        "tvm-tuned",
        "tvm",
        "tmpl-tvm",
        options={**IN_TVM, "scheduler": "meta_schedule", "trials": 64},
        devices=("cpu",),
        modes=("fwd",),
    ),
    *(
        Peer(name, "engine", f"tmpl-{name}", devices=("cpu",), modes=("fwd",))
        for name in ("openvino-native", "onnxruntime")
    ),
)


def peers() -> dict[str, Peer]:
    """Return all peers by name, without the kernels of cases."""
    named = (
        Peer(TEMPLATES + name, "template", TEMPLATES + name, cases=SLOW.get(name, ("*",)))
        for name in list_templates()
        if name != "auto"
    )
    return {peer.name: peer for peer in (*FIXED, *named, *LAST)}


def hand_written(kernels: Mapping[str, Callable[..., Any]]) -> dict[str, Peer]:
    """Return the hand-written peers of a case."""
    return {HAND + name: Peer(HAND + name, "hand", hand=kernel) for name, kernel in kernels.items()}


def wanted(name: str, globs: Sequence[str]) -> bool:
    """Return whether a name is requested: exactly, or by a glob without a "!" glob that matches it."""
    without = any(fnmatchcase(name, glob[1:]) for glob in globs if glob.startswith("!"))
    return name in globs or (not without and any(fnmatchcase(name, glob) for glob in globs))


def globs_of(text: str) -> tuple[str, ...]:
    """Parse globs such as "tmpl-*,!*:debug": "!" globs alone apply to all; raise if one matches no peer."""
    globs = tuple(text.split(","))
    for glob in globs:
        named = glob.removeprefix("!")
        if not named.startswith((HAND, "*")) and not any(fnmatchcase(name, named) for name in peers()):
            raise BackendKwargsError(f"No peer is called {glob!r}: `python -m benchmarks list` shows all.")
    return ("*", *globs) if all(glob.startswith("!") for glob in globs) else globs


def winner(decided: Mapping[str, Any], auto: Peer) -> Peer:
    """Return auto's choice as a peer that compiles it alone, with the auto's compiled code in its cache."""
    if decided["winner"] == "eager":
        return Peer(WINNER, "winner", "eager", cache=auto.name)
    return Peer(WINNER, "winner", TEMPLATES.removesuffix(":"), options=decided["options"], cache=auto.name)


def why_not(peer: Peer, case: Case, mode: Mode, device: str) -> str:
    """Return why a peer is unavailable for a case, a mode and a device, "" if it is available."""
    if device not in peer.devices:
        return f"no peer of its own on {device}"
    if peer.suite not in ("full", *case.suites):
        return f"too slow to compile for each case: run on those of the suite {peer.suite!r}"
    if device != "cpu" and not wanted(case.name, peer.cases):
        without = [glob[1:] for glob in peer.cases if glob.startswith("!")]
        where = f"not run on {', '.join(without)}" if without else f"run on {', '.join(peer.cases)}"
        return f"too slow to compile for each case: {where}"
    return "" if mode in peer.modes else f"not in mode {mode}"


def resolved(peer: Peer) -> dict[str, Any]:
    """Return the options of a compiled peer's compiler; raise UnavailableError if it has no effect here."""
    if peer.backend == "inductor":
        from torch._inductor import list_mode_options

        return dict(list_mode_options(peer.mode) if peer.mode else {}) | dict(peer.options)
    if not isinstance(peer.backend, str):
        return dict(peer.options)
    try:
        bound = make_backend(peer.backend, {**peer.options, **_strict(peer)}).options
    except BackendKwargsError as error:
        raise UnavailableError(str(error)) from error
    return {name: value for name, value in bound.items() if name != "strict"}


def uses_inductor(peer: Peer) -> bool:
    """Return whether Inductor compiles it."""
    return isinstance(peer.backend, str) and peer.backend.startswith(("inductor", TEMPLATES))


def compiler_key(peer: Peer) -> str:
    """Return a key that is equal for peers with the same compiler and options."""
    if not peer.compiles:
        return peer.name
    family = "inductor" if uses_inductor(peer) else peer.name
    return f"{family} {sorted(resolved(peer).items(), key=str)}"


# Modes that tune the same kernels: with --fewer-compiles the first compiles with what the second has tuned.
TUNED_AS: Mapping[str, str] = {"max-autotune": "max-autotune-no-cudagraphs"}
TUNERS = ("max_autotune", "max_autotune_gemm", "max_autotune_pointwise", "coordinate_descent_tuning")


def tunes(peer: Peer) -> bool:
    """Return whether compiling it times kernels on the device, which must not be disturbed."""
    if not peer.compiles:
        return False
    return not isinstance(peer.backend, str) or chooses_by_times(peer.kind, resolved(peer))


def chooses_by_times(kind: Kind, options: Mapping[str, Any]) -> bool:
    """Return whether such a peer chooses kernels by timing, so that two compiles may differ."""
    return kind in ("auto", "tvm") or any(options.get(name) for name in TUNERS)


def sharing(chosen: Sequence[Peer]) -> dict[str, str]:
    """Return, by name, the first peer that compiles with the same options; unavailable peers share with none."""
    first: dict[str, str] = {}
    shares = {}
    for peer in chosen:
        try:
            key = compiler_key(peer)
        except UnavailableError:
            key = peer.name
        shares[peer.name] = first.setdefault(key, peer.name)
    return shares


def numerics(peer: Peer, unit: str, *, module: bool) -> str:
    """Return the class within which speeds are comparable: the arithmetic's, or "frozen" if weights are folded."""
    options = resolved(peer) if peer.compiles else {}
    folds = module and bool(options.get("freezing") or options.get("freeze") or peer.kind == "engine")
    return "frozen" if folds else unit


def backend_of(peer: Peer) -> tuple[Any, dict[str, Any]]:
    """Return torch.compile's backend, and its mode and options, as a user would write them, with `strict`."""
    if peer.backend == "inductor" or not isinstance(peer.backend, str):
        given = {"mode": peer.mode, "options": dict(peer.options) or None}
        return peer.backend, {name: value for name, value in given.items() if value is not None}
    return make_backend(peer.backend, {**peer.options, **_strict(peer)}), {}


def _strict(peer: Peer) -> dict[str, bool]:
    """Return the option that prevents a template's fallback, which would be timed under its name."""
    ours = isinstance(peer.backend, str) and peer.backend.startswith(TEMPLATES)
    return {"strict": True} if ours and peer.kind == "template" else {}

"""One model under several backends: each compiled for itself, checked, and timed against the others in turn."""

import contextlib
import copy
import dataclasses
import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, cast

import torch
from torch.utils import _pytree as pytree

from backend_kwargs import measure
from backend_kwargs.errors import BackendKwargsError, unknown, wrong_value
from backend_kwargs.measure import Accuracy, Interval, Status

Mode = Literal["inference", "training"]
Progress = Callable[[str, str, float], None]
Inputs = tuple[tuple[Any, ...], dict[str, Any]]

VERSION = 1
WARM_CALLS = 3
SEED = 0
AGAIN = "\0again"
COMPILE_NOTES = {
    True: "Compile seconds are the first call, with an empty Inductor cache for each candidate.",
    False: "Compile seconds are the first call, with Inductor's cache as it was found: see each row's cache.",
}


@dataclass(frozen=True)
class Candidate:
    """One way to run the model: a label, and `torch.compile`'s `backend` (None: eager), `mode` and `options`."""

    label: str
    backend: Callable[..., Any] | str | None = None
    mode: str | None = None
    options: Mapping[str, Any] | None = None


@dataclass
class Row:
    """What became of one candidate; only a row whose status is "pass" has a latency.

    `graphs` counts the graphs its backend compiled: 1 is a whole model, more are graph breaks. `compile_s` is the
    first call in seconds, `cache` whether Inductor found the graphs in its cache ("warm", "cold", "" unknown).
    `latency` and `samples` are seconds per call, `speedup` is against the baseline, `peak_bytes` one call's memory
    above what was held before (on CUDA: before the compile). `verdict` is "baseline", "within noise" or "".
    """

    label: str
    backend: str
    status: Status = "pass"
    reason: str = ""
    graphs: int = 0
    compile_s: float | None = None
    cache: str = ""
    latency: Interval | None = None
    speedup: Interval | None = None
    peak_bytes: int | None = None
    accuracy: Accuracy | None = None
    verdict: str = ""
    samples: list[float] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Say whether this row has figures to compare."""
        return self.status == "pass"


@dataclass
class Comparison:
    """The rows in the order of the candidates, and what they are to be read against.

    `noise` is the band that the baseline, timed twice, spans against itself; None where nothing was timed.
    """

    rows: list[Row]
    environment: dict[str, Any]
    noise: Interval | None
    baseline: str | None
    mode: Mode
    notes: list[str]


def compare(
    model: Callable[..., Any],
    example_inputs: Any,
    candidates: Sequence[Candidate],
    *,
    mode: Mode = "inference",
    device: str | torch.device | None = None,
    rounds: int = 30,
    baseline: str | None = None,
    budget_s: float | None = None,
    cold: bool = True,
    progress: Progress | None = None,
) -> Comparison:
    """Compile `model` under each candidate, check its numbers before and after timing, and time all of them in turn.

    `example_inputs` is a tensor, a sequence of positional or a mapping of keyword arguments. In "training" a call is
    forward and backward, with random cotangents; gradients and changed buffers are checked too. The model is copied
    and comes back untouched. The baseline is the candidate so labelled, else eager, else the first that passes.
    `budget_s` bounds the timing alone. `cold` gives each candidate an empty Inductor cache: else a peer that shares
    kernels with an earlier one, or an earlier run, seems to compile for nothing. `progress(label, stage, fraction)`
    hears the stages "reference", "compile", "compiled", "timing".

    Everything runs in this process: peers must be timed interleaved, and a child process for each of twelve candidates
    would cost twelve imports of torch. So what a process pays once (imports, Inductor's start) is paid before the first
    clock, and memory is a count that earlier candidates do not disturb (`measure.peak_memory`).

    A candidate's failure becomes its row. Raises BackendKwargsError for wrong arguments or a model that cannot be
    copied.
    """
    _check_arguments(candidates, mode, rounds, baseline)
    say = progress or _silence
    inputs = _arguments(example_inputs)
    place = torch.device(device) if device is not None else _device_of(model, inputs)
    with _undisturbed(place, training=mode == "training"):
        study = _Study.of(model, inputs, mode, place)
        trials = [_Trial(candidate, Row(candidate.label, _shown(candidate))) for candidate in candidates]
        say("eager", "reference", 0.0)
        study.settle(trials)
        _warm_up(trials, place)
        for done, trial in enumerate(trials, 1):
            if trial.row.passed:
                fraction = done / (len(trials) + 2)
                say(trial.row.label, "compile", fraction)
                trial.attempt(partial(trial.start, study, cold=cold))
                say(trial.row.label, "compiled", fraction)
        noise, chosen = _time(study, trials, rounds, baseline, budget_s, say)
    environment = measure.environment(place) | {"mode": mode, "rounds": rounds, "dtype": str(study.dtype)}
    return Comparison([t.row for t in trials], environment, noise, chosen, mode, [COMPILE_NOTES[cold], *study.notes])


def _silence(label: str, stage: str, fraction: float) -> None:
    pass


def _check_arguments(candidates: Sequence[Candidate], mode: str, rounds: int, baseline: str | None) -> None:
    labels = [candidate.label for candidate in candidates]
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice is not None:
        raise BackendKwargsError(f"Candidate {twice!r} is given twice: give each its own label.")
    if mode not in ("inference", "training"):
        raise wrong_value("mode", "'inference' or 'training'", mode)
    if not isinstance(rounds, int) or rounds < 1:
        raise wrong_value("rounds", "a whole number of at least 1", rounds)
    if baseline is not None and baseline not in labels:
        raise unknown("baseline", baseline, labels, otherwise="It is the label of one of the candidates.")


def _arguments(example_inputs: Any) -> Inputs:
    if isinstance(example_inputs, torch.Tensor):
        return (example_inputs,), {}
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, Sequence) and not isinstance(example_inputs, str):
        return tuple(example_inputs), {}
    raise wrong_value("example_inputs", "a tensor, a sequence of arguments or a mapping of keywords", example_inputs)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _device_of(model: Callable[..., Any], inputs: Inputs) -> torch.device:
    parameters = list(model.parameters()) if isinstance(model, torch.nn.Module) else []
    return next((tensor.device for tensor in [*parameters, *_tensors(inputs)]), torch.device("cpu"))


def _shown(candidate: Candidate) -> str:
    if candidate.backend is None or isinstance(candidate.backend, str):
        return candidate.backend or "eager"
    if inspect.isfunction(candidate.backend):
        return f"{candidate.backend.__module__}:{candidate.backend.__qualname__}"
    return repr(candidate.backend)


# ---- isolation: each candidate compiles, and nothing stays changed


@contextlib.contextmanager
def _undisturbed(device: torch.device, *, training: bool) -> Iterator[None]:
    """Keep random states, grad mode and dynamo's config as they were."""
    seeded = [] if device.type == "cpu" else [device]
    kind = "cuda" if device.type == "cpu" else device.type
    with torch.random.fork_rng(seeded, device_type=kind), torch.set_grad_enabled(training), _room_to_compile():
        yield


def _can_isolate() -> bool:
    return "isolate_recompiles" in inspect.signature(torch.compile).parameters


def _room_to_compile() -> contextlib.AbstractContextManager[Any]:
    """Lift the limit on variants of one code object where torch (before 2.13) cannot count them apart."""
    import torch._dynamo.config as dynamo_config

    if _can_isolate():
        return contextlib.nullcontext()
    patch: Callable[..., contextlib.AbstractContextManager[Any]] = dynamo_config.patch
    return patch(recompile_limit=10_000, accumulated_recompile_limit=10_000)


def _isolated(model: Callable[..., Any], **kwargs: Any) -> Callable[..., Any]:
    """Return `torch.compile(model, ...)` that shares no compiled code and no limit with another one."""
    compiler: Any = torch.compile
    if _can_isolate():
        return cast("Callable[..., Any]", compiler(model, isolate_recompiles=True, **kwargs))

    def forward(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    code = forward.__code__.replace(co_name="forward")
    own = types.FunctionType(code, globals(), "forward", None, forward.__closure__)
    return cast("Callable[..., Any]", compiler(own, **kwargs))


class _Counted:
    """A backend that counts the graphs it compiles and returns them as they are: the hot path has no wrapper."""

    def __init__(self, backend: Callable[..., Any]) -> None:
        self._backend = backend
        self.graphs = 0

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: Any, **kwargs: Any) -> Any:
        compiled = self._backend(gm, example_inputs, **kwargs)
        self.graphs += 1
        return compiled

    def __getattr__(self, name: str) -> Any:
        # torch asks a backend for its compiler_name, config and reset().
        if name == "_backend":
            raise AttributeError(name)
        return getattr(self._backend, name)


def _compiler(candidate: Candidate) -> tuple[_Counted, dict[str, Any]]:
    """Return the counted backend and what is left for `torch.compile`: for "inductor" torch binds mode and options."""
    from torch._dynamo.backends.registry import lookup_backend

    options = dict(candidate.options) if candidate.options else None
    if candidate.backend == "inductor":
        mode = candidate.mode or (None if options else "default")
        wrapper: Any = torch._TorchCompileInductorWrapper
        return _Counted(wrapper(mode, options, None)), {}
    backend: Any = candidate.backend
    return _Counted(lookup_backend(backend)), {"mode": candidate.mode, "options": options}


def _cache_counts() -> tuple[int, int]:
    from torch._dynamo.utils import counters

    found, aot = counters["inductor"], counters["aot_autograd"]
    return (
        found["fxgraph_cache_hit"] + aot["autograd_cache_hit"],
        found["fxgraph_cache_miss"] + aot["autograd_cache_miss"],
    )


def _cache_word(before: tuple[int, int], after: tuple[int, int]) -> str:
    hits, misses = after[0] - before[0], after[1] - before[1]
    return "warm" if hits else "cold" if misses else ""


def _empty_cache() -> contextlib.AbstractContextManager[Any]:
    from torch._inductor.utils import fresh_cache

    return fresh_cache()


def _warm_up(trials: "list[_Trial]", device: torch.device) -> None:
    """Pay once, on no candidate's clock, for the imports and for Inductor's compiler processes and headers."""
    import torch._dynamo
    import torch._inductor.compile_fx

    backends = [trial.candidate.backend for trial in trials if trial.row.passed]
    named = [f"{backend!r} {getattr(backend, 'compiler_name', '')}" for backend in backends]
    if any("inductor" in name for name in named):
        # Where Inductor cannot work each candidate says so itself.
        with contextlib.suppress(Exception):
            _isolated(lambda x: x + 1, backend="inductor")(torch.ones(8, device=device))


# ---- one model, its inputs and what is right for it


@dataclass(frozen=True)
class _Truth:
    """Inputs of one check, with eager's results and the reference's."""

    inputs: Inputs
    eager: dict[str, Any]
    reference: dict[str, Any] | None


@dataclass
class _Study:
    model: Callable[..., Any]
    inputs: Inputs
    training: bool
    device: torch.device
    dtype: torch.dtype | None
    notes: list[str]
    cotangents: list[torch.Tensor] = field(default_factory=list)
    changed: dict[str, torch.Tensor | None] = field(default_factory=dict)
    truths: list[_Truth] = field(default_factory=list)

    @classmethod
    def of(cls, model: Callable[..., Any], inputs: Inputs, mode: Mode, device: torch.device) -> "_Study":
        try:
            copied, inputs = copy.deepcopy((model, inputs))
        except Exception as error:
            reason = measure.status_of(error)[1]
            raise BackendKwargsError(f"compare copies the model and its inputs, which fails here: {reason}") from error
        inputs = pytree.tree_map(partial(_moved, device=device), inputs)
        training, notes = mode == "training", []
        if isinstance(copied, torch.nn.Module):
            copied = copied.to(device).train(training)
            notes = _without_dropout(copied) if training else []
        return cls(copied, inputs, training, device, _dtype_of(copied, inputs), notes)

    def settle(self, trials: "list[_Trial]") -> None:
        """Learn eager's results and the reference's; where eager itself is not to be relied on, every row says so."""
        try:
            self._learn()
        except Exception as error:  # noqa: BLE001 - the rows tell it
            status, reason = measure.status_of(error)
            self._spoil(trials, status, f"eager failed: {reason}")
            return
        again = [self.verify(self.model, self.model, truth) for truth in self.truths]
        if not all(accuracy.passed for accuracy in again):
            self._spoil(trials, "eager_two_runs_differ", measure.worst(again).reason)

    def _spoil(self, trials: "list[_Trial]", status: Status, reason: str) -> None:
        for trial in trials:
            trial.row.status, trial.row.reason = status, reason

    def _learn(self) -> None:
        inputs = copy.deepcopy(self.inputs)
        before = {name: (tensor, tensor._version) for name, tensor in _state(self.model, inputs).items()}
        saved = {name: tensor.detach().clone() for name, tensor in _state(self.model, ((), {})).items()}
        output = self.model(*inputs[0], **inputs[1])
        self.cotangents = _cotangents(output) if self.training else []
        after = _state(self.model, inputs)
        touched = [
            n for n, t in after.items() if n not in before or before[n][0] is not t or before[n][1] != t._version
        ]
        self.changed = {name: saved.get(name) for name in touched}
        self.truths = [self._truth(measure.fresh_inputs(self.inputs, seed)) for seed in (1, 2)]

    def _truth(self, inputs: Inputs) -> _Truth:
        eager = self.observe(self.model, self.model, copy.deepcopy(inputs))
        precise = measure.reference(self.model, inputs, run=lambda fn, args: self.observe(fn, fn, args))
        return _Truth(inputs, eager, precise)

    def observe(self, call: Callable[..., Any], model: Callable[..., Any], inputs: Inputs) -> dict[str, Any]:
        """Run once from the same seed and buffers; return copies of the outputs, gradients and changed state."""
        with torch.no_grad():
            for name, tensor in _state(model, ((), {})).items():
                saved = self.changed.get(name)
                if saved is not None and saved.shape == tensor.shape:
                    tensor.copy_(saved)
        torch.manual_seed(SEED)
        output = call(*inputs[0], **inputs[1])
        seen = {"output": output}
        if self.training:
            leaves = _leaves(model, inputs)
            seen["gradients"] = dict(zip(leaves, self.backward(output, list(leaves.values())), strict=True))
        seen["state"] = {name: tensor for name, tensor in _state(model, inputs).items() if name in self.changed}
        return {what: pytree.tree_map(_kept, tree) for what, tree in seen.items()}

    def backward(self, output: Any, leaves: list[torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of `leaves`, without touching their `.grad`."""
        outputs = [tensor for tensor in _tensors(output) if tensor.requires_grad]
        if len(outputs) != len(self.cotangents):
            raise RuntimeError(f"{len(outputs)} outputs require grad, in eager {len(self.cotangents)}")
        cotangents = [c.to(o.dtype) for c, o in zip(self.cotangents, outputs, strict=True)]
        return torch.autograd.grad(outputs, leaves, cotangents, allow_unused=True)

    def step(self, call: Callable[..., Any], model: Callable[..., Any]) -> Callable[[], object]:
        """Return the callable that is timed, on inputs of its own."""
        args, kwargs = inputs = copy.deepcopy(self.inputs)
        if not self.training:
            return partial(call, *args, **kwargs)
        leaves = list(_leaves(model, inputs).values())
        return lambda: self.backward(call(*args, **kwargs), leaves)

    def verify(self, call: Callable[..., Any], model: Callable[..., Any], truth: _Truth) -> Accuracy:
        """Check outputs, gradients and changed state against eager's and the reference's."""
        seen = self.observe(call, model, copy.deepcopy(truth.inputs))
        judge = partial(measure.check, dtype=self.dtype, training=self.training)
        precise = truth.reference or {}
        return measure.worst([judge(seen[w], truth.eager[w], precise.get(w), what=w) for w in seen])


def _moved(leaf: Any, device: torch.device) -> Any:
    if not isinstance(leaf, torch.Tensor) or leaf.device == device:
        return leaf
    return leaf.detach().to(device).requires_grad_(leaf.requires_grad)


def _kept(leaf: Any) -> Any:
    # A CUDA graph writes its next result over this one.
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


def _without_dropout(model: torch.nn.Module) -> list[str]:
    dropouts = [m for m in model.modules() if isinstance(m, torch.nn.modules.dropout._DropoutNd) and m.p]
    for dropout in dropouts:
        dropout.p = 0.0
    return ["Dropout is off: Inductor draws other masks than eager, which cannot be compared."] if dropouts else []


def _dtype_of(model: Callable[..., Any], inputs: Inputs) -> torch.dtype | None:
    tensors = [*(model.parameters() if isinstance(model, torch.nn.Module) else ()), *_tensors(inputs)]
    found = [tensor.dtype for tensor in tensors if tensor.is_floating_point()]
    return min(found, key=lambda dtype: dtype.itemsize, default=None)


def _state(model: Callable[..., Any], inputs: Inputs) -> dict[str, torch.Tensor]:
    """Return what a call may change in place: the module's buffers and the input tensors."""
    buffers = model.named_buffers() if isinstance(model, torch.nn.Module) else ()
    given = {f"input {at}": tensor for at, tensor in enumerate(_tensors(inputs))}
    return dict(buffers) | given


def _leaves(model: Callable[..., Any], inputs: Inputs) -> dict[str, torch.Tensor]:
    """Return what a backward pass gives gradients to."""
    named: dict[str, torch.Tensor] = dict(model.named_parameters()) if isinstance(model, torch.nn.Module) else {}
    named |= {f"input {at}": tensor for at, tensor in enumerate(_tensors(inputs))}
    return {name: tensor for name, tensor in named.items() if tensor.requires_grad}


def _cotangents(output: Any) -> list[torch.Tensor]:
    """Return a random normal cotangent for each differentiable output, 1 for a scalar.

    A mean of squares would leave the output of a normalisation without a gradient to check.
    """
    outputs = [tensor for tensor in _tensors(output) if tensor.requires_grad]
    if not outputs:
        raise BackendKwargsError("mode='training' needs an output that requires grad.")
    generator = torch.Generator().manual_seed(SEED)
    return [torch.randn(o.shape, generator=generator).to(o) if o.ndim else torch.ones_like(o) for o in outputs]


# ---- one candidate


@dataclass
class _Trial:
    candidate: Candidate
    row: Row
    call: Callable[..., Any] = _silence
    model: Callable[..., Any] = _silence
    step: Callable[[], object] = lambda: None
    counted: _Counted | None = None

    def attempt(self, what: Callable[[], None]) -> None:
        try:
            what()
        except Exception as error:  # noqa: BLE001 - the row tells it
            self.failed(error)
        if not self.row.graphs and self.counted:
            self.row.graphs = self.counted.graphs

    def failed(self, error: Exception) -> None:
        self.row.status, self.row.reason = measure.status_of(error)

    def start(self, study: _Study, *, cold: bool) -> None:
        """Compile, warm up, count memory, and check on inputs not seen before."""
        self.call = self.model = copy.deepcopy(study.model) if study.training else study.model
        held = torch.cuda.memory_allocated(study.device) if study.device.type == "cuda" else None
        if self.candidate.backend is not None:
            self.counted, left = _compiler(self.candidate)
            self.call = _isolated(self.model, backend=self.counted, **left)
        step = self.step = study.step(self.call, self.model)
        self._first_call(step, study.device, cold=cold)
        if self.counted is not None and not self.counted.graphs:
            self.row.status, self.row.reason = "fail_to_run", "no graph reached the backend: this would run in eager"
            return
        self.row.peak_bytes = measure.peak_memory(
            lambda: [step() for _ in range(WARM_CALLS)] and None, study.device, held
        )
        self.judge(study.verify(self.call, self.model, study.truths[0]))
        self.row.graphs = self.counted.graphs if self.counted else 0

    def _first_call(self, step: Callable[[], object], device: torch.device, *, cold: bool) -> None:
        if self.counted is None:
            step()
            return
        with _empty_cache() if cold else contextlib.nullcontext():
            cache, started, error = _cache_counts(), perf_counter(), None
            # Raised out of torch's empty cache, an error would leave the folder behind.
            try:
                step()
                measure.synchronize(device)
            except Exception as raised:  # noqa: BLE001 - raised again below
                error = raised
        if error is not None:
            raise error
        self.row.compile_s = perf_counter() - started
        self.row.cache = _cache_word(cache, _cache_counts())

    def judge(self, accuracy: Accuracy) -> None:
        self.row.accuracy = accuracy
        if not accuracy.passed:
            self.row.status, self.row.reason = accuracy.status, accuracy.reason

    def finish(self, study: _Study, samples: list[float]) -> None:
        """Check again, on other inputs, that the callable which was timed is right and was compiled all along."""
        self.judge(study.verify(self.call, self.model, study.truths[1]))
        more = self.counted.graphs - self.row.graphs if self.counted else 0
        if more:
            self.row.status, self.row.reason = "fail_to_run", f"recompiled {more} times while it was timed"
        if self.row.passed:
            self.row.samples, self.row.latency = samples, measure.median_interval(samples)


def _time(
    study: _Study, trials: list[_Trial], rounds: int, baseline: str | None, budget_s: float | None, say: Progress
) -> tuple[Interval | None, str | None]:
    racing = {trial.row.label: trial for trial in trials if trial.row.passed}
    first = _baseline(list(racing.values()), baseline)
    if first is None:
        return None, None
    calls = {label: trial.step for label, trial in racing.items()} | {AGAIN: first.step}
    start = 1 - 1 / (len(trials) + 2)
    say("", "timing", start)
    samples = measure.interleave(
        calls,
        rounds=rounds,
        device=study.device,
        budget_s=budget_s,
        progress=lambda fraction: say("", "timing", start + fraction * (1 - start)),
        failed=lambda label, error: (first if label == AGAIN else racing[label]).failed(error),
    )
    for label, trial in racing.items():
        if label in samples:
            trial.attempt(partial(trial.finish, study, samples[label]))
    if not first.row.passed:
        # Ratios need a baseline that ran beside: the others race again without it.
        return _time(study, trials, rounds, baseline, budget_s, say)
    return _judge_speed(first, list(racing.values()), samples[AGAIN])


def _baseline(racing: list[_Trial], wanted: str | None) -> _Trial | None:
    eager = (trial for trial in racing if trial.candidate.backend is None)
    named = (trial for trial in racing if trial.row.label == wanted)
    return next(named, None) or next(eager, None) or next(iter(racing), None)


def _judge_speed(first: _Trial, racing: list[_Trial], again: list[float]) -> tuple[Interval, str]:
    noise = measure.noise_floor(measure.ratio_interval(first.row.samples, again))
    for row in (trial.row for trial in racing if trial.row.passed):
        row.speedup = measure.ratio_interval(first.row.samples, row.samples)
        row.verdict = "within noise" if measure.within_noise(row.speedup, noise) else ""
    first.row.verdict = "baseline"
    return noise, first.row.label


# ---- out


def fastest(comparison: Comparison) -> Row | None:
    """Return the row that beats the baseline by most, None where none does beyond the noise."""
    faster = [row for row in comparison.rows if row.passed and row.speedup and not row.verdict and row.speedup.low > 1]
    return max(faster, key=lambda row: row.speedup.median if row.speedup else 0.0, default=None)


def to_json(comparison: Comparison) -> dict[str, Any]:
    """Return the comparison as plain JSON values: seconds, bytes, raw samples, and the version of this layout."""
    return {
        "version": VERSION,
        "environment": comparison.environment,
        "mode": comparison.mode,
        "baseline": comparison.baseline,
        "noise": dataclasses.asdict(comparison.noise) if comparison.noise else None,
        "notes": list(comparison.notes),
        "candidates": [_row_json(row) for row in comparison.rows],
    }


def _row_json(row: Row) -> dict[str, Any]:
    spread = {f"p{q}": measure.percentile(row.samples, q / 100) for q in (20, 80)} if row.samples else {}
    written = dataclasses.asdict(row)
    if row.latency:
        written["latency"] |= spread
    return written


def plot(comparison: Comparison, path: str | Path) -> None:
    """Write the speedups with their intervals as an image; the ending of `path` chooses the format.

    Raises BackendKwargsError where matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BackendKwargsError('plot needs matplotlib: pip install "backend-kwargs[plot]".') from error
    rows = comparison.rows
    figure = Figure(figsize=(9, 1.6 + 0.42 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    _draw_rows(axes, rows)
    if comparison.noise:
        axes.axvspan(comparison.noise.low, comparison.noise.high, color="0.88", zorder=0)
    axes.axvline(1.0, color="0.4", linewidth=1, zorder=1)
    axes.set_yticks(range(len(rows)), [row.label for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    band = "; grey: the baseline against itself" if comparison.noise else ""
    axes.set_xlabel(f"speedup over {comparison.baseline or 'nothing'}, median and 95 % interval{band}")
    where = comparison.environment
    axes.set_title(f"{comparison.mode} on {where['device_name']}, torch {where['torch']}", fontsize=10, loc="left")
    figure.savefig(path, dpi=150)


def _draw_rows(axes: Any, rows: list[Row]) -> None:
    # Notes stand in a column beside the plot, where no dot can cover them.
    beside = {"xycoords": ("axes fraction", "data"), "va": "center", "fontsize": 8, "annotation_clip": False}
    for at, row in enumerate(rows):
        axes.annotate(_note(row), (1.02, at), color="0.25" if row.passed else "tab:red", **beside)
        if row.speedup:
            middle = row.speedup.median
            reach = [[middle - row.speedup.low], [row.speedup.high - middle]]
            colour = "0.5" if row.verdict else "tab:blue" if middle > 1 else "tab:orange"
            axes.errorbar(middle, at, xerr=reach, fmt="o", color=colour, capsize=3, zorder=2)


def _note(row: Row) -> str:
    if not row.passed:
        return row.status
    compiled = f"compile {row.compile_s:.1f} s" if row.compile_s is not None else "not compiled"
    return f"{row.speedup.median:.2f}x   {compiled}" if row.speedup else compiled

"""torch's OpInfo samples through torch.compile by a compiler on the CPU: is any operator worse than eager?

    python tests/backends/tvm/opinfo.py [--backend tvm] [--ops add,mul] [--dtypes float32,int64] [--samples 8]
        [--processes 2] [--out F]

Each sample runs in eager and compiled; outputs, and gradients with --gradients, must be alike. Operators run in
separate processes, so one that kills its process is reported and the others continue. --out writes the list.
"""

# ruff: noqa: T201 - a command prints

import argparse
import json
import platform
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.testing import assert_close
from torch.utils._pytree import tree_leaves, tree_map_only

import backend_kwargs as bk
from backend_kwargs.backends import CapturedGraph

LIST = Path(__file__).with_name("opinfo.md")
# With the samples of each operator: the other types differ from float32 at the first if they do.
DTYPES = {"float32": 3} | dict.fromkeys(("float64", "float16", "bfloat16", "int64", "int32", "uint8", "bool"), 1)
LIMIT = 300  # seconds for an operator
CHUNK = 40  # operators for which one process is started
# What eager gives is whatever lay in memory, so that nothing can be compared.
UNINITIALISED = frozenset({"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"})
# torch decomposes these under any compiler, such as "aot_eager", which changes uint8 results by at most one.
ROUNDED_BY_TORCH = frozenset({"nn.functional.interpolate", "nn.functional.upsample_bilinear"})
# Which compiler runs the samples, and the distributions that it needs.
backend_name = ["tvm"]
RELEASES = {
    "tvm": ("apache-tvm", "apache-tvm-ffi"),
    "onnxruntime": ("onnxruntime", "onnx", "onnxscript"),
    "openvino-native": ("openvino",),
}
NAMES = {"tvm": "TVM", "onnxruntime": "ONNX Runtime", "openvino-native": "OpenVINO"}
# Of a sample: the compiler ran a part of it; eager ran all; something is worse than in eager.
RAN, EAGER, WORSE = "ran", "eager", "worse"


@dataclass
class Verdict:
    """The results of an operator's samples of one dtype."""

    op: str
    dtype: str
    counts: Counter[str] = field(default_factory=Counter)
    fallbacks: dict[str, str] = field(default_factory=dict)
    worse: list[str] = field(default_factory=list)


def op_infos() -> Any:
    """Return torch's operators with their samples, whose import takes seconds."""
    from torch.testing._internal.common_methods_invocations import op_db

    return op_db


def name_of(op: Any) -> str:
    return ".".join(filter(None, [op.name, op.variant_test_name]))


def operators(names: set[str], dtype: str) -> list[str]:
    """Return the operators that have samples of a dtype: those in `names`, or all."""
    chosen = [op for op in op_infos() if not names or {op.name, name_of(op)} & names]
    return [name_of(op) for op in chosen if getattr(torch, dtype) in op.supported_dtypes("cpu")]


def examine(name: str, dtype: str, samples: int, gradients: bool = False) -> Verdict:
    """Run an operator's samples in eager and compiled."""
    verdict = Verdict(name, dtype)
    op = next(op for op in op_infos() if name_of(op) == name)
    wants = gradients and op.supports_autograd
    try:
        for sample in islice(op.sample_inputs("cpu", getattr(torch, dtype), requires_grad=wants), samples):
            verdict.counts[_sample(op, sample, verdict, wants)] += 1
    except Exception as error:  # noqa: BLE001 - some samples need packages that are not installed
        verdict.fallbacks["samples"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return verdict


def _sample(op: Any, sample: Any, verdict: Verdict, gradients: bool) -> str:
    def call(value: Any, args: Any, kwargs: Any) -> Any:
        return op.op(value, *args, **kwargs)

    summaries: list[Any] = []
    # Else engines would leave parts of one operator to eager.
    options = {} if backend_name[0] == "tvm" else {"min_block_size": 1}
    backend = bk.make_backend(backend_name[0], options)

    def recorded(gm: Any, inputs: Any, **kwargs: Any) -> Any:
        compiled = backend.called_with(**kwargs).compile(CapturedGraph(gm, inputs))
        summaries.append(compiled.facts.parts)
        return compiled.call

    torch._dynamo.reset()
    try:
        wanted = outcome(call, sample, gradients)
    except Exception:  # noqa: BLE001 - samples on which eager fails show nothing
        return "eager fails"
    try:
        given = outcome(torch.compile(call, backend=recorded, dynamic=False), sample, gradients)
        if op.name in ROUNDED_BY_TORCH and sample.input.dtype == torch.uint8:
            assert_close(given, wanted, rtol=0, atol=1)
        elif op.name not in UNINITIALISED:
            compare(given, wanted, lambda: outcome(call, sample, gradients, torch.float64))
    except Exception as error:  # noqa: BLE001 - worse than eager, however it fails
        verdict.worse.append(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
        return WORSE
    for summary in summaries:
        verdict.fallbacks |= summary.fallbacks
    return RAN if any(summary.partitions for summary in summaries) else EAGER


def outcome(call: Any, sample: Any, gradients: bool, wider: torch.dtype | None = None) -> list[Any]:
    """Return the outputs of a call, then its inputs afterwards, or their gradients."""

    def fresh(x: torch.Tensor) -> torch.Tensor:
        copy = x.detach().clone()
        return (copy.to(wider) if wider and x.is_floating_point() else copy).requires_grad_(x.requires_grad)

    args = tree_map_only(torch.Tensor, fresh, (sample.input, sample.args, sample.kwargs))
    torch.manual_seed(0)
    outputs = [x for x in tree_leaves(call(*args)) if isinstance(x, torch.Tensor)]
    inputs = [x for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
    if not gradients:
        return [*outputs, *inputs]
    losses = [x.abs().sum() for x in outputs if x.requires_grad]
    leaves = [x for x in inputs if x.requires_grad]
    return [*outputs, *(torch.autograd.grad(sum(losses), leaves, allow_unused=True) if losses else ())]


def compare(given: list[Any], wanted: list[Any], precise: Any) -> None:
    """Raise AssertionError unless results are alike, or about as close to the precise ones as eager's."""
    assert len(given) == len(wanted), f"{len(given)} results, eager has {len(wanted)}"
    reference: list[Any] = []
    for i, (one, other) in enumerate(zip(given, wanted, strict=True)):
        if other is None or one is None:
            assert one is other, f"{one} for eager's {other}"
            continue
        try:
            assert_close(one, other, equal_nan=True)
        except AssertionError:
            if one.dtype != other.dtype or one.shape != other.shape or not one.is_floating_point():
                raise
            reference = reference or precise()
            # Taken apart, an operator of halves is rounded at each step: a few roundings are no error.
            rounding = torch.finfo(one.dtype).eps * float(reference[i].abs().nan_to_num(0, 0, 0).max())
            if not distance(one, reference[i]) <= 2 * distance(other, reference[i]) + 4 * rounding:
                raise


def distance(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the largest difference; infinite if only one is finite."""
    apart = (value.double() - reference.double()).abs()
    same = (value == reference) | (value.isnan() & reference.isnan())
    return float(torch.where(same, 0.0, apart).nan_to_num(nan=torch.inf).max()) if value.numel() else 0.0


def work(names: list[str], dtype: str, samples: int | None, gradients: bool) -> None:
    """Print a line when an operator starts, and its verdict at its end."""
    torch.set_num_threads(1)
    for name in names:
        print(json.dumps({"starts": name}), flush=True)
        signal.alarm(LIMIT)  # unhandled, it ends the process, which TVM's code would prevent in Python
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            verdict = examine(name, dtype, samples or DTYPES.get(dtype, 1), gradients)
        print(json.dumps(vars(verdict)), flush=True)


def isolated(names: list[str], dtype: str, samples: int | None, gradients: bool) -> Iterator[Verdict]:
    """Yield verdicts from processes; an operator that kills one is reported, and a new process runs the rest."""
    while names:
        command = [sys.executable, __file__, "--work", "--ops", ",".join(names), "--dtypes", dtype]
        command += ["--backend", backend_name[0]]
        command += [*(["--samples", str(samples)] if samples else []), *(["--gradients"] if gradients else [])]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
            started = ""
            for line in process.stdout or ():
                output = json.loads(line) if line.startswith("{") else {}
                started = output.get("starts", started)
                if "op" in output:
                    names = names[names.index(output["op"]) + 1 :]
                    yield Verdict(**{**output, "counts": Counter(output["counts"])})
        if names:
            crashed = started if started in names else names[0]
            names = names[names.index(crashed) + 1 :]
            yield Verdict(crashed, dtype, Counter({WORSE: 1}), {}, [f"the process ended with {process.returncode}"])


def table(verdicts: list[Verdict]) -> str:
    """Return the list: by operator and dtype, how many samples the compiler ran, and what fell back with the reason."""
    lines = [
        f"| operator | type | {NAMES[backend_name[0]]} | eager | worse | in eager, and why |",
        "|---|---|---|---|---|---|",
    ]
    for v in sorted(verdicts, key=lambda v: (v.op, v.dtype)):
        why = "; ".join(f"`{op}`: {reason}" for op, reason in sorted(v.fallbacks.items()))
        why = " ".join([*(f"**{each}**" for each in v.worse[:1]), why]).replace("|", "\\|").strip()
        lines.append(f"| {v.op} | {v.dtype} | {v.counts[RAN]} | {v.counts[EAGER]} | {v.counts[WORSE]} | {why} |")
    return "\n".join(lines) + "\n"


def write(path: Path, verdicts: list[Verdict]) -> None:
    """Write the list of the results so far."""
    counts = sum((v.counts for v in verdicts), Counter())
    path.write_text(f"{heading()}\n\nSamples: {dict(counts)}.\n\n{table(verdicts)}")


def heading() -> str:
    """Return the heading: the command, and the versions."""
    releases = [f"{name} {version(name)}" for name in ("torch", *RELEASES[backend_name[0]])]
    where = ", ".join([*releases, f"Python {platform.python_version()}"])
    what = f"What {NAMES[backend_name[0]]} ran of torch's OpInfo samples on the CPU"
    return f"{what}, written by `python {' '.join(sys.argv)}`: {where}."


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", default="", help="names, by commas; all without")
    parser.add_argument("--backend", default="tvm", choices=RELEASES)
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--samples", type=int, help="of each operator and type at most; as DTYPES says without")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--gradients", action="store_true")
    parser.add_argument("--out", type=Path, default=None, help=f"such as {LIST.name}")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    backend_name[0] = options.backend
    names = set(filter(None, options.ops.split(",")))
    dtypes = options.dtypes.split(",")
    if options.work:
        work(options.ops.split(","), dtypes[0], options.samples, options.gradients)
        return 0
    return run(options, [(dtype, operators(names, dtype)) for dtype in dtypes])


def run(options: argparse.Namespace, by_dtype: list[tuple[str, list[str]]]) -> int:
    """Run all, with a line for each operator, and return how many are worse than eager."""
    chunks = [(dtype, ops[i : i + CHUNK]) for dtype, ops in by_dtype for i in range(0, len(ops), CHUNK)]
    total, verdicts, began = sum(len(ops) for _, ops in chunks), [], time.monotonic()

    def through(chunk: tuple[str, list[str]]) -> None:
        for verdict in isolated(chunk[1], chunk[0], options.samples, options.gradients):
            verdicts.append(verdict)
            if options.out and len(verdicts) % CHUNK == 0:  # the list if the run is ended by hand later
                write(options.out, verdicts)
            done = f"{len(verdicts)}/{total} {time.monotonic() - began:.0f} s"
            print(f"{done} {verdict.op} {verdict.dtype} {dict(verdict.counts)} {verdict.worse[:1] or ''}", flush=True)

    with ThreadPoolExecutor(options.processes) as pool:
        list(pool.map(through, chunks))
    counts = sum((v.counts for v in verdicts), Counter())
    if options.out:
        write(options.out, verdicts)
    ran, where = counts[RAN], NAMES[backend_name[0]]
    print(f"{ran} samples ran in {where}, {counts[EAGER]} in eager alone, {counts[WORSE]} worse than in eager.")
    return int(counts[WORSE] > 0)


if __name__ == "__main__":
    sys.exit(main())

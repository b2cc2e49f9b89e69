"""Run each Triton kernel of the suite in every configuration, check it, and time it against the libraries.

    python -m benchmarks tune-kernels --out tuned.json
    python -m benchmarks tune-kernels --out tuned.json --report benchmarks/results/h200/kernels.md

A first pass compiles in several processes; a second, alone on the GPU, checks and times. A configuration that does
not compile, run or agree is a line of the result and does not stop the rest; each case has its own process, which may
lose the device or hang.
"""

import fnmatch
import gc
import itertools
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from backend_kwargs import trial
from backend_kwargs.files import write_whole
from benchmarks.execution import device_timer, process
from benchmarks.execution.process import Tell
from benchmarks.execution.study import CaseStudy
from benchmarks.workloads.case import Case, Problem, Work
from benchmarks.workloads.cases import attention, elementwise, gemm, norms

CASES = {case.name: case for module in (gemm, norms, attention, elementwise) for case in module.CASES}
MODULES = ("attention", "cross_entropy", "elementwise", "matmul", "norms", "softmax")
# Measured on an H200 with random data; fp8 is twice the rate of bf16 by its datasheet.
BYTES_PER_S = 4.3e12
FLOPS_PER_S = {"bf16": 790e12, "fp16": 790e12, "fp8": 1580e12, "fp32": 60e12}
TIMED = 15  # rounds
CLOSE = 0.02  # relative difference of two times that count as equal
REPORT = """# Hand-written kernels compared with libraries

Written by:

```sh
python -m benchmarks tune-kernels --out tuned.json
python -m benchmarks tune-kernels --out tuned.json --report benchmarks/results/h200/kernels.md
```

Environment: {device}.

Each time is the median device time of a call with a cold L2; all configurations of a case are interleaved in one
process. Each configuration was first checked against eager, and each kernel is shown with its fastest one.

{table}

Failed or wrong: {lost}.

## Reading

The time of the best library call, including eager, over that of the best kernel:

{reading}

The limit is the least work of the case at nominal rates, 4.3 TB/s and 790 TFLOP/s in bf16. A few per cent above 100
mean that the nominal rate is too low; the suite measures its own ceilings. Eager calls the libraries' kernels one by
one, so if a case has several operations, "faster" is mostly due to fusion, which a compiler can do too. The
configuration was chosen by the times shown, which favours the kernels by a few tenths of a per cent.
`layer_norm_fwd_bwd` counts each tensor once, but must read its input in both passes, so separate passes can reach only
80 %.
"""
Line = dict[str, Any]


def write_report(found: Path, out: Path) -> None:
    """Write the results of `tune` as Markdown."""
    write_whole(out, markdown(json.loads(found.read_text())))


def tune(out: Path, case: str, scale: str, jobs: int, budget: float, each: float) -> None:
    """Check and time every configuration of the cases' kernels, and write the results to `out`."""
    started = time.monotonic()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    names = [name for name in CASES if fnmatch.fnmatch(name, case) and has_kernels(name)]
    if jobs:
        compile_all(names, device, scale, jobs, min(budget / 2, 100.0))
    rows: list[Line] = []
    for name in names:
        if time.monotonic() - started > budget:
            rows.append({"case": name, "error": "not started: the budget was spent"})
            continue
        timed = process.run(time_case, name, device, scale, step_s=each)
        rows += timed.value if timed.passed else [{"case": name, "error": timed.reason}]
        found = {"environment": trial.environment(torch.device(device)), "rows": rows}
        write_whole(out, json.dumps(found, indent=1))
        print(table([row for row in rows if row["case"] == name]), flush=True)
    print(f"{time.monotonic() - started:.0f} s")


def has_kernels(name: str) -> bool:
    """Return whether a case has a Triton peer."""
    peers = CASES[name].build(torch.device("meta"), CASES[name].dtype, "smoke").peers
    return any(peer.startswith("triton") for peer in peers)


def compile_all(names: list[str], device: str, scale: str, jobs: int, patience: float) -> None:
    """Fill Triton's cache from several processes; failures are reported by the timing."""
    started = time.monotonic()
    until: Any = {"step_s": patience, "deadline": started + patience}
    with ThreadPoolExecutor(jobs) as pool:
        made = [*pool.map(lambda name: process.run(compile_case, name, device, scale, **until), names)]
    done = sum(each.passed for each in made)
    print(f"compiled {done} of {len(names)} cases in {time.monotonic() - started:.0f} s", flush=True)


# ---- in the processes


def compile_case(tell: Tell, name: str, device: str, scale: str) -> None:
    """Launch each configuration once."""
    _, calls = prepared(name, device, scale)
    for peer, call in calls.items():
        for run in variants(call).values() if peer.startswith("triton") else ():
            attempt(run, torch.device(device))


def time_case(tell: Tell, name: str, device: str, scale: str) -> list[Line]:
    """Return a row for eager, each library and each configuration."""
    case, place = CASES[name], torch.device(device)
    problem, calls = prepared(name, device, scale)
    expected = calls["eager"]()
    rows = [timed_row(case, problem.work, "eager", "", "")]
    racing: dict[tuple[str, str], Callable[[], Any]] = {("eager", ""): calls.pop("eager")}
    for peer, call in calls.items():
        runs = variants(call) if peer.startswith("triton") else {"": call}
        for config, run in runs.items():
            error = attempt(partial(differs, run, expected, case), place)
            rows.append(timed_row(case, problem.work, peer, config, error))
            if not error:
                racing[peer, config] = run
            if lost(place):
                return [*rows, {"case": name, "error": "the device is lost"}]
    del expected
    names = {f"{peer} {config}": key for key in racing for peer, config in [key]}
    samples = device_timer.device_times(
        {label: racing[key] for label, key in names.items()}, TIMED, place, failed=lambda *_: None
    )
    for row in rows:
        seconds = samples.get(f"{row['peer']} {row['config']}")
        row["us"] = 1e6 * trial.percentile(seconds, 0.5) if seconds else None
    return rows


def prepared(name: str, device: str, scale: str) -> tuple[Problem, dict[str, Callable[[], Any]]]:
    """Build a case and a call for eager and each of its peers: the gradients too, if the case has them."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    case = CASES[name]
    study = CaseStudy.of(case, case.modes[0], torch.device(device), case.dtype, scale)
    study.prepare()
    peers, subject = {"eager": study.problem.fn, **study.problem.peers}, study.subject()
    return study.problem, {peer: study.step(subject._replace(call=fn)) for peer, fn in peers.items()}


def tuners() -> dict[str, Any]:
    """Return every tuned kernel by name."""
    import triton

    found = {}
    for module in MODULES:
        for name, value in vars(import_module(f"benchmarks.workloads.kernels.{module}")).items():
            if isinstance(value, triton.runtime.autotuner.Autotuner):
                found[f"{module}.{name}"] = value
    return found


def variants(call: Callable[[], Any]) -> dict[str, Callable[[], Any]]:
    """Return the call with each configuration of each kernel that it launches, other kernels in their first."""
    everything = {name: (tuner, tuner.configs) for name, tuner in tuners().items()}
    for tuner, configs in everything.values():
        tuner.configs, tuner.best_config = configs[:1], None
    error = attempt(call, torch.device("cpu"))
    used = {name: pair for name, pair in everything.items() if getattr(pair[0], "best_config", None) is not None}
    for tuner, configs in everything.values():
        tuner.configs = configs
    if error and not used:
        return {"": call}
    return {
        f"{name} {brief(config)}": pinned(call, {**{n: (t, c[0]) for n, (t, c) in used.items()}, name: (tuner, config)})
        for name, (tuner, _) in used.items()
        for config in tuner.searched
    }


def brief(config: Any) -> str:
    """Return a configuration in the form of its kernel's table."""
    blocks = ", ".join(f"{name}={value}" for name, value in config.kwargs.items())
    return f"config({config.num_warps}, {config.num_stages}, {blocks})"


def pinned(call: Callable[[], Any], choice: dict[str, tuple[Any, Any]]) -> Callable[[], Any]:
    """Return the call with a fixed configuration for each kernel, so that nothing is searched."""

    def run() -> Any:
        kept = [(tuner, tuner.configs) for tuner, _ in choice.values()]
        for tuner, config in choice.values():
            tuner.configs = [config]
        try:
            return call()
        finally:
            for tuner, configs in kept:
                tuner.configs = configs

    return run


def attempt(run: Callable[[], Any], device: torch.device) -> str:
    """Run and wait; return the error in a line, "" if there is none."""
    try:
        wrong = run()
        trial.synchronize(device)
    except Exception as error:  # noqa: BLE001 - reported in the row
        return trial.status_of(error)[1]
    return wrong if isinstance(wrong, str) else ""


def differs(run: Callable[[], Any], expected: Any, case: Case) -> str:
    """Return how a call's result differs from eager's."""
    return trial.check(run(), expected, training=case.modes != ("fwd",)).reason


def lost(device: torch.device) -> bool:
    """Return whether the device has a sticky error."""
    try:
        trial.synchronize(device)
        torch.ones(1, device=device).item()
    except Exception:  # noqa: BLE001 - whatever it is, the device is unusable
        return True
    return False


# ---- the result


def timed_row(case: Case, work: Work | None, peer: str, config: str, error: str) -> Line:
    """Return one line of the result, without its time."""
    return {"case": case.name, "peer": peer, "config": config, "error": error, "limit_us": limit_us(work), "us": None}


def limit_us(work: Work | None) -> float | None:
    """Return the least microseconds by an H200's nominal ceilings."""
    return work and 1e6 * max(work.flops / FLOPS_PER_S[work.unit], work.bytes / BYTES_PER_S)


def table(rows: list[Line]) -> str:
    """Return a case's rows as text: the libraries, and each kernel's configurations, fastest first."""
    lines = []
    order = sorted(rows, key=lambda row: (row.get("peer", ""), row.get("us") or float("inf")))
    for peer, group in itertools.groupby(order, key=lambda row: row.get("peer", "")):
        for row in group:
            us, limit = row.get("us"), row.get("limit_us")
            figures = f"{us:9.1f} us {100 * limit / us:5.1f} %" if us and limit else f"{'-':>9}           "
            lines.append(
                f"{row['case']:24} {peer:28} {figures}  {row.get('config', '')} {row.get('error', '')}".rstrip()
            )
    return "\n".join(lines)


def markdown(results: dict[str, Any]) -> str:
    """Return the best line of each kernel and library of the results, and how they compare."""
    rows = [row for row in results["rows"] if row.get("us")]
    best = {key: min(group, key=fastness) for key, group in grouped(rows, "case", "peer").items()}
    at = results["environment"]
    lines = [
        "| case | peer | µs | % of limit | configuration |",
        "| --- | --- | ---: | ---: | --- |",
        *(best_line(row) for row in best.values()),
    ]
    device = f"{at['device_name']}, torch {at['torch']}, triton {at['triton']}"
    lost = [f"{row['case']} {row.get('config', '')}: {row['error']}" for row in results["rows"] if row.get("error")]
    return REPORT.format(
        device=device, table="\n".join(lines), reading=reading(list(best.values())), lost="; ".join(lost) or "none"
    )


def best_line(row: Line) -> str:
    """Return a peer's best as a row of the table."""
    share = f"{100 * row['limit_us'] / row['us']:.1f}" if row["limit_us"] else ""
    config = f"`{row['config']}`" if row["config"] else ""
    return f"| {row['case']} | {row['peer']} | {row['us']:.1f} | {share} | {config} |"


def reading(best: list[Line]) -> str:
    """Return, case by case, the best kernel against the best library, including eager."""
    found: dict[str, list[str]] = {"faster": [], "as fast": [], "slower": []}
    for (case,), rows in grouped(best, "case").items():
        ours, theirs = (
            min((row for row in rows if row["peer"].startswith("triton") is hand), key=fastness, default=None)
            for hand in (True, False)
        )
        if ours and theirs:
            ratio = theirs["us"] / ours["us"]
            word = "faster" if ratio > 1 + CLOSE else "slower" if ratio < 1 - CLOSE else "as fast"
            found[word].append(f"{case} {ratio:.2f}x")
    return "\n".join(f"- {word}: {', '.join(cases) or 'none'}" for word, cases in found.items())


def grouped(rows: list[Line], *names: str) -> dict[tuple[Any, ...], list[Line]]:
    """Return rows by the values of `names`, in the order of their first."""
    groups: dict[tuple[Any, ...], list[Line]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return groups


def fastness(row: Line) -> float:
    """Return a sort key for rows, fastest first."""
    return float(row["us"])

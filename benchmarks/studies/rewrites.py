"""The speedup of rewrites: each pattern alone in a compiled graph, and whole cases raced with and without rewrites.

    python -m benchmarks rewrites --patterns --out benchmarks/results/h200/rewrites_alone.json
    bash benchmarks/gpu_rewrites.sh OUT_DIR BUDGET_S
    python -m benchmarks rewrites --report --out OUT_DIR

All peers of a case are timed interleaved in one process, a process for each case. A peer that is wrong, or does not
compile, has no time. What is measured is written at once: first `auto` with and without rewrites, then torch's modes.
"""

import json
import logging
import math
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from backend_kwargs import make_backend, trial
from backend_kwargs.compare import Candidate, compare, to_json
from backend_kwargs.errors import error_text
from backend_kwargs.files import write_whole
from benchmarks.studies.rewrite_cases import CASES, PATTERNS, Made, Place, RewriteCase, case_of_model

WITH, WITHOUT, DEFAULT = "auto with", "auto without", "default"
Record = dict[str, Any]


def place_of(device: str) -> Place:
    """Return the place for which cases are built: small ones on a CPU."""
    full = device != "cpu"
    return Place(torch.device(device), torch.bfloat16 if full else torch.float32, full)


def alone(place: Place, only: str) -> dict[str, Record]:
    """Return the device's microseconds for each pattern inside a compiled graph, without and with its rewrite."""
    found = {}
    for name, (rewrite, make) in PATTERNS.items():
        if only not in name and only != rewrite:
            continue
        try:
            found[name] = {"rewrite": rewrite, **_timed(partial(make, place), rewrite, place.device)}
        except Exception as error:  # noqa: BLE001 - the next pattern can still be timed
            found[name] = {"rewrite": rewrite, "error": error_text(error)}
        print(name, found[name], flush=True)
    return found


def _timed(make: Callable[[], Made], rewrite: str, device: torch.device) -> dict[str, float]:
    fn, args = make()
    calls = {}
    with torch.no_grad():
        for label, names in (("default", ()), ("rewritten", (rewrite,))):
            torch._dynamo.reset()
            compiled = torch.compile(fn, backend=make_backend("tmpl-inductor", rewrites=names))
            compiled(*args)
            calls[label] = partial(compiled, *args)
        seconds = {label: trial.device_seconds(call, device) for label, call in calls.items()}
        gap = max(
            (one.float() - other.float()).abs().max().item()
            for one, other in zip(*(_tensors(call()) for call in calls.values()), strict=True)
        )
    return {label: each * 1e6 for label, each in seconds.items()} | {"largest_difference": gap}


def _tensors(result: Any) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)


# ---- whole cases


def names_of(only: str) -> list[str]:
    """Return the names of the cases that contain `only`."""
    return [name for name in CASES if only in name]


def race_shard(
    out: Path, names: list[str], which: tuple[int, int], limits: tuple[float, float], options: list[str]
) -> int:
    """Race every case of a shard in its own process, until a time; return how many are left.

    `limits` are the seconds after which no case begins, and those after which a case is stopped; what it has written
    stays. A case with a file in `out` is done.
    """
    started, left = time.monotonic(), 0
    budget_s, each_s = limits
    number, count = which
    out.mkdir(parents=True, exist_ok=True)
    for name in names[number - 1 :: count]:
        file = out / (re.sub(r"\W+", "_", name) + ".json")
        if file.exists():
            continue
        if time.monotonic() - started > budget_s:
            left += 1
            continue
        command = [sys.executable, "-m", "benchmarks", "rewrites", "--one", name, "--out", str(file), *options]
        try:
            subprocess.run(command, timeout=each_s, check=False)
        except subprocess.TimeoutExpired:
            print(f"{name}: stopped after {each_s:g} s", flush=True)
    return left


def race_one(name: str, out: Path, rounds: int, race_s: float, modes: tuple[str, ...], place: Place) -> None:
    """Race one case, or a user's model, without and with rewrites and write the result; then time torch's modes too."""
    case = CASES.get(name) or case_of_model(name)
    torch.manual_seed(0)
    fn, args = case.make(place)
    record: Record = {"case": name, "bar": case.bar, "estimate": case.estimate, "race_s": race_s or case.race_s}
    timed = partial(compare, fn, args, mode=case.mode, rounds=rounds, device=place.device)
    with tempfile.TemporaryDirectory() as folder, _matches() as matches:
        default, without, with_rewrites = _candidates(case, record["race_s"], folder)
        try:
            comparison = timed(candidates=[default, without, with_rewrites], baseline=WITHOUT)
            record |= {"auto": to_json(comparison), "matches": matches}
            write_whole(out, json.dumps(record) + "\n")
            if modes:
                torchs = [Candidate(mode, "inductor", mode) for mode in modes]
                comparison = timed(candidates=[default, *torchs, with_rewrites], baseline=WITH)
                record["modes"] = to_json(comparison)
        except Exception as error:  # noqa: BLE001 - a line of the report
            record["error"] = error_text(error)
        write_whole(out, json.dumps(record) + "\n")
    print(line(record), flush=True)


def _candidates(case: RewriteCase, race_s: float, folder: str) -> tuple[Candidate, Candidate, Candidate]:
    def auto(label: str, names: tuple[str, ...] | None) -> Candidate:
        options = {"budget_s": race_s, "process_budget_s": 1e4, "rewrites": names, "store": f"{folder}/{label}"}
        return Candidate(label, "tmpl-inductor:auto", options=options)

    return Candidate(DEFAULT, "tmpl-inductor"), auto(WITHOUT, ()), auto(WITH, case.named)


@contextmanager
def _matches() -> Iterator[list[str]]:
    """Yield a list of the races' log lines about rewrites: the matches of each, and its possible saving."""
    found: list[str] = []
    logger = logging.getLogger("backend_kwargs.auto")
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage()) if "matches" in record.msg else None  # type: ignore[method-assign]
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


# ---- results


COLUMNS = (
    "case", "default", "best of torch's modes", "`auto` without", "`auto` with", "gain", "estimate", "bar",
    "over the best mode", "first call, s: without; with", "kept",
)  # fmt: skip
HEAD = f"| {' | '.join(COLUMNS)} |\n|---|{'---:|' * (len(COLUMNS) - 2)}---|\n"


def report(out: Path) -> str:
    """Return a Markdown table of the records in a folder, and their geometric means."""
    records = [json.loads(file.read_text()) for file in sorted(out.glob("*.json"))]
    gains, overs = [], []
    for record in records:
        rows = _rows(record, "auto")
        gains += [rows[WITH]["speedup"]["median"]] if _timed_rows(rows, WITH, WITHOUT) else []
        overs += [over for over in (_over_best(record),) if over is not None]
    text = HEAD + "\n".join(map(line, records)) + "\n"
    for what, figures in (("`auto` with over `auto` without", gains), ("`auto` with over the best mode", overs)):
        if figures:
            mean = math.exp(sum(map(math.log, figures)) / len(figures))
            text += f"\nGeometric mean of {what}: {mean:.3f}x over {len(figures)} cases; least: {min(figures):.3f}x.\n"
    return text


def line(record: Record) -> str:
    """Return one row of the table."""
    rows = _rows(record, "auto")
    if not rows:
        return f"| {record['case']} | {record.get('error', '')} |"
    gain = rows.get(WITH, {}).get("speedup")
    modes = {label: row for label, row in _rows(record, "modes").items() if label != WITH and row["latency"]}
    best = min(modes, key=lambda label: modes[label]["latency"]["median"], default="")
    over = _over_best(record)
    kept = re.findall(r"^\s*(\S+).*<- kept", rows.get(WITH, {}).get("report") or "", re.MULTILINE)
    cells = [
        record["case"],
        _ms(rows.get(DEFAULT)),
        f"{_ms(modes[best])} {best}" if best else "",
        _ms(rows.get(WITHOUT)),
        _ms(rows.get(WITH)),
        f"{gain['median']:.2f}x [{gain['low']:.2f}, {gain['high']:.2f}]" if gain else "",
        *(f"{each:.2f}x" if each else "" for each in (record["estimate"], record["bar"], over)),
        "; ".join(f"{rows[label]['compile_s']:.1f}" for label in (WITHOUT, WITH) if rows[label].get("compile_s")),
        ", ".join(dict.fromkeys(kept)) + (f" ({record['error']})" if "error" in record else ""),
    ]
    return f"| {' | '.join(cells)} |"


def _rows(record: Record, part: str) -> dict[str, Record]:
    return {row["label"]: row for row in record.get(part, {}).get("candidates", ())}


def _timed_rows(rows: dict[str, Record], *labels: str) -> bool:
    return all(rows.get(label, {}).get("speedup") for label in labels)


def _over_best(record: Record) -> float | None:
    """Return the speedup of `auto` with rewrites over the fastest of default and torch's modes, paired by rounds."""
    rows = _rows(record, "modes")
    others = [row["speedup"]["median"] for label, row in rows.items() if label != WITH and row.get("speedup")]
    return 1 / max(others) if others and _timed_rows(rows, WITH) else None


def _ms(row: Record | None) -> str:
    if not row or not row.get("latency"):
        return row["status"] if row else ""
    return f"{row['latency']['median'] * 1e3:.3f} ms"

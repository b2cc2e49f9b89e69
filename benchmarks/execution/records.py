"""One cell of the results, its JSON lines, and the records for PyTorch's HUD."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from statistics import median
from typing import Any

from backend_kwargs.errors import BackendKwargsError
from backend_kwargs.trial import Status

VERSION = 1
AGAIN = "A/A"  # the peer that is the baseline's own callable, timed a second time: the noise floor


@dataclass(slots=True)
class Compile:
    """One fresh compile of a peer: seconds to the first result, bytes at the peak, kernels launched per call.

    `fresh`: it had its own process; otherwise it was compiled with its peers, and its seconds depend on the order,
    since earlier compiles make later ones cheaper. `shares` names the peer with equal options that was compiled in its
    place. `beside` is the number of other compiles running when it began. `alone_s` is for an auto: the time to compile
    its winner alone, to compare with `warm_s`, the auto's time with its decision and its kernels stored.
    """

    cold_s: float | None = None
    warm_s: float | None = None
    alone_s: float | None = None
    peak_bytes: int | None = None
    kernels: int | None = None
    fresh: bool = False
    shares: str = ""
    beside: int = 0


@dataclass(slots=True)
class Cell:
    """One peer of one case in one mode: its status, raw samples of each clock, and the conditions.

    `wall_s`, `dropped_s` and `device_s` are seconds per call, one per round, untrimmed, paired by round with the other
    cells of the same `group_id` (one timing process). `wall_s` is of a loop that keeps each result until the next call
    returns, `dropped_s` of one that drops results at once; older files have only the latter. `device_s` is empty if the
    device has no events. A cell that did not pass has no samples. `repeats` is the number of calls per sample by clock,
    "wall", "dropped" or "events"; it is empty in older files. `exposed`: launches are not hidden, so that `device_s`
    includes host time. `one_cache`: peers shared a cache. `decided` is the result of auto's race: winner, options,
    seconds, and rows of name, status, seconds, compile_s, reason, opponent, and the speedup over it: low, median, high.
    """

    case: str
    case_version: int
    mode: str
    dtype: str
    peer: str
    kind: str  # of peers.Kind
    numerics: str  # class whose members may be compared: "bf16", "tf32", "fp8", "frozen", ...
    group_id: str
    status: Status
    reason: str = ""
    wall_s: list[float] = field(default_factory=list)
    dropped_s: list[float] = field(default_factory=list)
    device_s: list[float] = field(default_factory=list)
    repeats: dict[str, int] = field(default_factory=dict)
    exposed: bool = False
    l2: str = "cold"
    scale: str = "full"  # "smoke": the same computation, small; never compared with the other
    one_cache: bool = False
    compile: Compile = field(default_factory=Compile)
    run: int = 0  # which fresh compile
    accuracy: dict[str, float | None] = field(default_factory=dict)
    work: dict[str, Any] | None = None  # Work as a dict
    limit_s: float | None = None
    bound: str = ""  # "compute" | "memory" | "launch" | "L2"
    options: dict[str, Any] = field(default_factory=dict)
    decided: dict[str, Any] | None = None

    @property
    def passed(self) -> bool:
        """Return whether there is a latency."""
        return self.status == "pass"


@dataclass(slots=True)
class Results:
    """The content of one or more files: environments and ceilings, one per run, and the cells of whole groups."""

    environments: list[dict[str, Any]] = field(default_factory=list)
    ceilings: list[dict[str, Any]] = field(default_factory=list)
    cells: list[Cell] = field(default_factory=list)
    compiles: dict[str, dict[str, Any]] = field(default_factory=dict)  # by key: Compile, status, reason
    groups: set[str] = field(default_factory=set)  # keys of finished groups


# ---- JSON lines


def append(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Append records to a file, all or none, and wait until they are on disk."""
    text = "".join(json.dumps(line, default=str) + "\n" for line in lines)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Unbuffered: what a full disk refuses must not be written again when the file is closed.
    with path.open("a+b", buffering=0) as file:
        # An incomplete line of a killed run must not swallow the next one.
        content = (b"" if _ends_whole(path) else b"\n") + text.encode()
        size = os.fstat(file.fileno()).st_size
        try:
            while content:
                content = content[file.write(content) :]
            os.fsync(file.fileno())
        except OSError as error:
            file.truncate(size)
            why = f"{error.strerror}; make room, and continue with --resume"
            raise BackendKwargsError(f"Cannot write {str(path)!r}: {why}.") from None


def _ends_whole(path: Path) -> bool:
    with path.open("rb") as file:
        if not file.seek(0, os.SEEK_END):
            return True
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"


def line_of(cell: Cell) -> dict[str, Any]:
    """Return the record of a cell."""
    return {"record": "cell", **asdict(cell)}


def group_line(key: str, group_ids: Sequence[str]) -> dict[str, Any]:
    """Return the record that ends a group: without it, the cells before it belong to an interrupted one."""
    return {"record": "group", "key": key, "group_ids": list(group_ids)}


def read(*paths: str | Path) -> Results:
    """Return the content of files, without broken lines and cells of unfinished groups.

    Raises BackendKwargsError if a file cannot be read or has another version.
    """
    results, cells, whole, shared = Results(), [], set(), set()
    for line in (line for path in paths for line in _lines(Path(path))):
        match line.pop("record", None):
            case "environment":
                _check_version(line)
                results.environments.append(line)
            case "ceilings":
                results.ceilings.append(line)
            case "compile":
                results.compiles[line.pop("key")] = line
            case "cell":
                cells.append(_cell(line))
                shared |= {cells[-1].group_id} if "one_cache" not in line and _hides_seconds(cells[-1]) else set()
            case "group":
                results.groups.add(line["key"])
                whole |= set(line["group_ids"])
    results.cells = [cell for cell in cells if cell.group_id in whole]
    for cell in results.cells:
        cell.one_cache |= cell.group_id in shared
    return results


def _hides_seconds(cell: Cell) -> bool:
    """Return whether a compile has no time: only this shows in older files that a group shared one cache."""
    return cell.passed and cell.kind in ("mode", "template", "auto") and cell.compile.cold_s is None


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise BackendKwargsError(
            f"Cannot read {str(path)!r}, which must be JSON lines of `run --out`: {error}."
        ) from error
    for line in text.splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            yield record


def _check_version(line: Mapping[str, Any]) -> None:
    if line.get("version") != VERSION:
        raise BackendKwargsError(f"Results must be of version {VERSION}, got {line.get('version')!r}: run them again.")


def _cell(line: dict[str, Any]) -> Cell:
    known = {each.name for each in fields(Cell)}
    held = {name: value for name, value in line.items() if name in known}
    if "dropped_s" not in line:
        # Files from before results were kept have only dropped ones.
        held["wall_s"], held["dropped_s"] = [], held.get("wall_s", [])
        held["repeats"] = {"dropped" if clock == "wall" else clock: n for clock, n in held.get("repeats", {}).items()}
    return Cell(**held | {"compile": Compile(**line.get("compile") or {})})


# ---- HUD

METRICS = {
    "wall_time(s)": lambda cell: cell.wall_s,
    "wall_time_results_dropped(s)": lambda cell: cell.dropped_s,
    "device_time(s)": lambda cell: cell.device_s,
    "compile_time_cold(s)": lambda cell: _given(cell.compile.cold_s if cell.compile.fresh else None),
    "compile_time_warm(s)": lambda cell: _given(cell.compile.warm_s),
    "peak_memory(bytes)": lambda cell: _given(cell.compile.peak_bytes),
    "kernels": lambda cell: _given(cell.compile.kernels),
}


def _given(value: float | None) -> list[float]:
    return [] if value is None else [value]


def to_hud(results: Results) -> list[dict[str, Any]]:
    """Return the records for PyTorch's HUD, one per metric of a cell; a cell that did not pass has only its status.

    Source: the benchmark results format, v3, of the PyTorch wiki's "PyTorch OSS benchmark infra".
    """
    environment = results.environments[-1] if results.environments else {}
    about = {"runners": [_runner(environment)], "dependencies": _dependencies(environment)}
    return [record | about for cell in results.cells for record in _hud_of(cell)]


def _hud_of(cell: Cell) -> Iterator[dict[str, Any]]:
    fields = {name: getattr(cell, name) for name in ("kind", "numerics", "l2", "scale", "run", "status", "reason")}
    head = {
        "benchmark": {
            "name": "backend_kwargs",
            "mode": "inference" if cell.mode == "fwd" else "training",
            "dtype": cell.dtype,
            "extra_info": {**fields, "mode": cell.mode, "group_id": cell.group_id},
        },
        "model": {
            "name": cell.case,
            "type": "micro-benchmark" if cell.work else "model",
            "backend": cell.peer,
            "origins": ["backend_kwargs"],
            "extra_info": {"version": cell.case_version},
        },
    }
    metrics = {"pass": [float(cell.passed)]}
    if cell.passed:
        metrics |= {name: values for name, of in METRICS.items() if (values := of(cell))}
    for name, values in metrics.items():
        yield head | {"metric": {"name": name, "benchmark_values": values, "target_value": None, "extra_info": {}}}


def _runner(environment: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": environment.get("device_name"),
        "type": environment.get("device"),
        "cpu_info": environment.get("cpu"),
        "cpu_count": environment.get("cpus"),
        "gpu_info": environment.get("device_name") if environment.get("device") == "cuda" else None,
        "extra_info": {name: environment.get(name) for name in ("driver", "cuda", "python", "platform")},
    }


def _dependencies(environment: Mapping[str, Any]) -> dict[str, Any]:
    versions = {name: environment.get(name) for name in ("torch", "triton", "backend_kwargs")}
    revision = environment.get("revision")
    return {name: {"version": version} for name, version in versions.items() if version} | (
        {"benchmarks": {"sha": revision}} if revision else {}
    )


def middle(values: Iterable[float | None]) -> float | None:
    """Return the median of the known values, None if there are none."""
    known = [value for value in values if value is not None]
    return median(known) if known else None

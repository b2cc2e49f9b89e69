"""A log of the sizes that a service saw, and what to declare of them."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from backend_kwargs.errors import BackendKwargsError, shown

FEW = 8  # sizes that get code of their own
MOST_CANDIDATES = 256  # sizes among which buckets are chosen
LINE = '{"batch": 4, "sequence": 133}'


@dataclass(frozen=True)
class Bucket:
    """Calls that are padded to one size; `added` is the share of elements that padding adds to theirs."""

    size: int
    calls: int
    added: float


@dataclass(frozen=True)
class Proposal:
    """What to declare of one name: code for each size, or buckets; `added` as of a `Bucket`, of all calls."""

    name: str
    sizes: int
    calls: int
    buckets: tuple[Bucket, ...]

    @property
    def exact(self) -> bool:
        """Whether each size has a bucket of its own, so that nothing is padded."""
        return self.sizes == len(self.buckets)

    @property
    def added(self) -> float:
        """The share of elements that padding adds in all calls."""
        wide = sum(each.size * each.calls for each in self.buckets)
        real = sum(each.size * each.calls / (1 + each.added) for each in self.buckets)
        return wide / real - 1 if real else 0.0


def read_log(file: Path) -> dict[str, Counter[int]]:
    """Return how often each size of each name is in a log of JSON lines; "calls" in a line counts it so often."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BackendKwargsError(f"Cannot read the log {str(file)!r}: {getattr(error, 'strerror', error)}.") from None
    seen: dict[str, Counter[int]] = {}
    names: set[str] | None = None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        sizes = _sizes_of(line, number)
        calls = sizes.pop("calls", 1)
        if names is not None and names != set(sizes):
            raise BackendKwargsError(
                f"Line {number} of the log must have the sizes of {', '.join(sorted(names))}, got {shown(line)}."
            )
        names = set(sizes)
        for name, size in sizes.items():
            seen.setdefault(name, Counter())[size] += calls
    if not seen:
        raise BackendKwargsError(f"The log {str(file)!r} has no calls: write a line such as {LINE} for each.")
    return seen


def _sizes_of(line: str, number: int) -> dict[str, int]:
    """Return the sizes in one line; raise if it has none."""
    try:
        sizes: Any = json.loads(line)
    except (ValueError, RecursionError):
        sizes = None
    right = isinstance(sizes, dict) and sizes and all(type(size) is int and size >= 0 for size in sizes.values())
    if not right:
        raise BackendKwargsError(f"Line {number} of the log must be sizes such as {LINE}, got {shown(line)}.")
    return dict(sizes)


def propose(seen: Mapping[str, Counter[int]], most: int = FEW) -> list[Proposal]:
    """Return what to declare: at most so many sizes or buckets of each name, with the least padding."""
    return [_proposal(name, counts, most) for name, counts in seen.items()]


def _proposal(name: str, counts: Counter[int], most: int) -> Proposal:
    sizes = sorted(counts)
    ends = sizes if len(sizes) <= most else _least_padding(sizes, counts, most)
    buckets, low = [], -1
    for end in ends:
        within = {size: counts[size] for size in sizes if low < size <= end}
        calls, real = sum(within.values()), sum(size * count for size, count in within.items())
        buckets.append(Bucket(end, calls, end * calls / real - 1 if real else 0.0))
        low = end
    return Proposal(name, len(sizes), counts.total(), tuple(buckets))


def _least_padding(sizes: Sequence[int], counts: Mapping[int, int], most: int) -> list[int]:
    """Return the ends of so many buckets that the sum of padded sizes over all calls is least."""
    step = -(-len(sizes) // MOST_CANDIDATES)
    ends = [*sizes[::-1][::step][::-1]]  # the largest is one of them
    calls, at = [], 0
    for end in ends:
        count = 0
        while at < len(sizes) and sizes[at] <= end:
            count += counts[sizes[at]]
            at += 1
        calls.append(count)
    before = [0, *accumulate(calls)]
    # least[n]: the least sum for the first n ends, with the buckets chosen.
    least: list[tuple[int, list[int]]] = [(0, [])] + [
        (before[n] * ends[n - 1], [ends[n - 1]]) for n in range(1, len(ends) + 1)
    ]
    for _ in range(most - 1):
        least = [least[0]] + [
            min(
                (
                    (least[start][0] + (before[n] - before[start]) * ends[n - 1], [*least[start][1], ends[n - 1]])
                    for start in range(n)
                ),
                key=lambda each: each[0],
            )
            for n in range(1, len(ends) + 1)
        ]
    return least[-1][1]


def pasted(proposals: Sequence[Proposal]) -> str:
    """Return the arguments of `seal` that declare this."""
    ends = {each.name: [bucket.size for bucket in each.buckets] for each in proposals}
    sizes = {name: each for name, each in ends.items() if next(p for p in proposals if p.name == name).exact}
    buckets = {name: each for name, each in ends.items() if name not in sizes}
    parts = [f"sizes={sizes}"] if sizes else []
    return ", ".join(parts + ([f"buckets={buckets}"] if buckets else []))

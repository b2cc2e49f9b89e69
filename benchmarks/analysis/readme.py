"""README's table, from the records of one run: `python -m tests.docs_tables --write` writes it.

For another run, change RUN, ROWS and the records.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

RECORDS = Path(__file__).parent.parent / "results" / "h200" / "models.jsonl"
RUN = ("2026-11-23T23:33", "2026-11-23T23:57")  # when the run began, and was continued
# Each case, in the reader's words.
ROWS: Mapping[str, str] = {
    "roberta": "RoBERTa-base, 6 of 12 layers: 16 x 256 tokens",
    "gpt2": "GPT-2, 6 of 12 layers: 4 x 512 tokens",
    "mistral_decode": "Mistral's width, 4 layers: 4 x 1 token, cache of 2048",
    "deit": "DeiT-base, 6 of 12 blocks: 64 images of 224 x 224",
    "mixtral": "Mixtral-8x7B, 2 of 32 layers: 1 x 512 tokens",
}
# Each column, and the peer whose first call it shows: that of max-autotune was measured without CUDA graphs only.
COLUMNS: Mapping[str, tuple[str, str]] = {
    "eager": ("eager", ""),
    "default": ("default", "default"),
    "reduce-overhead": ("reduce-overhead+clone", "reduce-overhead+clone"),
    "max-autotune": ("max-autotune+clone", "max-autotune-no-cudagraphs"),
    "**`auto`**": ("tmpl-inductor:auto", "tmpl-inductor:auto"),
}
BEST = 1.01  # within one per cent of the fastest counts as the best too


@dataclass(frozen=True, slots=True)
class Timed:
    """One peer of a case: milliseconds per call, None if it did not pass, and seconds of the first call."""

    call_ms: float | None
    first_s: float | None


def timed() -> dict[str, dict[str, Timed]]:
    """Return what the run timed, by case and peer."""
    found: dict[str, dict[str, Timed]] = {}
    for cell in _cells():
        call_ms = median(cell["wall_s"]) * 1e3 if cell["wall_s"] else None
        found.setdefault(cell["case"], {})[cell["peer"]] = Timed(call_ms, cell["compile"]["cold_s"])
    return found


def _cells() -> Iterator[dict[str, object]]:
    began = ""
    for line in RECORDS.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if record["record"] == "environment":
            began = record["time"]
        elif record["record"] == "cell" and began.startswith(RUN):
            yield record.get("cell", record)


def table() -> str:
    """Return the rows as a Markdown table: milliseconds per call, and the seconds of the first call."""
    lines = ["| model | " + " | ".join(COLUMNS) + " |", "|---" + "|---:" * len(COLUMNS) + "|"]
    found = timed()
    for case, words in ROWS.items():
        calls = {title: found[case][peer].call_ms for title, (peer, _) in COLUMNS.items()}
        best = min(filter(None, calls.values()))
        cells = [
            _cell(calls[title], found[case][first].first_s if first else None, best)
            for title, (_, first) in COLUMNS.items()
        ]
        lines.append(f"| {words} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(call_ms: float | None, first_s: float | None, best: float) -> str:
    if call_ms is None:
        return "did not pass"
    call = f"{call_ms:.2f} ms"
    call = f"**{call}**" if call_ms <= best * BEST else call
    return call if first_s is None else f"{call}; {first_s:.0f} s"

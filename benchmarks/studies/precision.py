"""The speedup of lower precision on a GPU: Llama prefill in row-wise float8, compared with the modes in bfloat16.

    python -m benchmarks precision --out precision.md

All candidates run interleaved in one process. The error bound below was fixed before the first run: a product of random
numbers has an error of 3.7 % in row-wise float8, and four layers of a random Llama about 11 %.
"""

from pathlib import Path
from typing import Any

import torch

from backend_kwargs import make_backend
from backend_kwargs.compare import Candidate, Comparison, compare
from backend_kwargs.files.atomic_write import write_whole
from benchmarks.workloads.nets.llama import Prefill, Shape

MAX_ERROR = 0.15
TIGHT = 0.02  # a race with this bound must refuse float8
LEAST_GAIN = 1.2  # over the best mode in bfloat16
SHAPE = Shape(layers=4, hidden=4096, heads=32, kv_heads=8, inner=14336, vocab=32768, length=8192)
SMALL = Shape(layers=2, hidden=128, heads=4, kv_heads=2, inner=256, vocab=512, length=128)
BF16 = ("eager", "inductor", "reduce-overhead", "max-autotune-no-cudagraphs")


def candidates(budget_s: float, precision: str = "fp8-dynamic") -> list[Candidate]:
    """Return the modes of torch.compile, the same graph in the precision, and races with a wide and a tight bound."""
    lower = {"precision": precision, "max_error": MAX_ERROR}
    race = {**lower, "budget_s": budget_s}
    return [
        Candidate("eager"),
        Candidate("inductor", "inductor"),
        Candidate("reduce-overhead", "inductor", mode="reduce-overhead"),
        Candidate("max-autotune-no-cudagraphs", "inductor", mode="max-autotune-no-cudagraphs"),
        Candidate(precision, make_backend("tmpl-inductor", lower)),
        Candidate(f"{precision}, cudagraphs", make_backend("tmpl-inductor:cudagraphs", lower)),
        Candidate("auto", make_backend("tmpl-inductor:auto", {"budget_s": budget_s})),
        Candidate(f"auto, max_error={MAX_ERROR:g}", make_backend("tmpl-inductor:auto", race)),
        Candidate(f"auto, max_error={TIGHT:g}", make_backend("tmpl-inductor:auto", {**race, "max_error": TIGHT})),
    ]


def run(device: str, tokens: int, rounds: int, budget_s: float) -> Comparison:
    """Time Llama's prefill of one prompt with all candidates; on a CPU a small model, in int8."""
    on_gpu = device == "cuda"
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = Prefill(SHAPE if on_gpu else SMALL).eval()
        prompt = torch.randint(model.embed.num_embeddings, (1, tokens))
    if on_gpu:
        model.bfloat16()
    listed = candidates(budget_s, "fp8-dynamic" if on_gpu else "int8-dynamic")
    # One cache for all candidates: each finds what another compiled, so that the study takes minutes on a GPU.
    return compare(model, prompt, listed, device=device, rounds=rounds, max_error=MAX_ERROR, cold=False)


def gain(comparison: Comparison) -> tuple[float, str, str]:
    """Return the speedup of the fastest lower precision over the fastest mode in bfloat16, and the names of both."""
    timed = {row.label: row.latency.median for row in comparison.rows if row.passed and row.latency}
    plain = [label for label in timed if label in BF16]
    lower = [label for label in timed if label not in BF16 and label not in ("auto", f"auto, max_error={TIGHT:g}")]
    if not plain or not lower:
        return 0.0, "", ""
    best, fastest = (min(labels, key=timed.__getitem__) for labels in (plain, lower))
    return timed[best] / timed[fastest], fastest, best


def page(comparison: Comparison, device: str, tokens: int) -> str:
    """Return the table, the speedup and its goal, and the decision of each race, as Markdown."""
    ratio, fastest, best = gain(comparison)
    met = "met" if ratio >= LEAST_GAIN else "not met"
    errors = [
        f"- {row.label}: error {row.accuracy.error:.2g}"
        for row in comparison.rows
        if row.accuracy is not None and row.accuracy.error is not None
    ]
    races = [
        f"### {row.label}\n\n```text\n{row.report}\n```" for row in comparison.rows if row.label.startswith("auto")
    ]
    model = SHAPE if device == "cuda" else SMALL
    return "\n\n".join(
        [
            "# Lower precision: prefill of a Llama with random weights",
            f"`python -m benchmarks precision`, {tokens} tokens, max_error={MAX_ERROR:g} fixed before the run. {model}",
            f"```text\n{comparison}\n```",
            f"{fastest} over {best}: {ratio:.2f}x; the goal of {LEAST_GAIN:g}x is {met}.",
            "## Errors\n\nRelative RMSE of the logits to float64.\n\n" + "\n".join(errors),
            "## Races",
            *races,
        ]
    )


def write_page(device: str, tokens: int, rounds: int, budget_s: float, out: Path | None) -> None:
    """Run the study; print its page, and write it to `out`."""
    text = page(run(device, tokens, rounds, budget_s), device, tokens) + "\n"
    print(text)
    if out:
        write_whole(out, text)

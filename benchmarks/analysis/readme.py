"""README's table, from the records of one run: `python -m tests.docs_tables --write` writes it."""

from collections.abc import Mapping
from pathlib import Path

from benchmarks.analysis.held_out import AUTO, CLONED, DEFAULT, Model, read_models
from benchmarks.workloads.drawn import MODELS

RECORDS = Path(__file__).parent.parent / "results" / "h200" / "drawn.jsonl"
# Each model, in the reader's words; the last one is `auto`'s worst.
ROWS: Mapping[str, str] = {
    "image_CLIPVisionModel": "CLIP's vision tower, 4 layers: 16 images",
    "text_JinaEmbeddingsV3Model": "Jina embeddings v3, 4 layers: 8 x 256 tokens",
    "timm_xception65p": "Xception65: 32 images",
    "decode_LlamaForCausalLM": "Llama's width of 4096, 4 layers: one token, cache of 1024",
    "timm_loss_mobilevitv2_175": "MobileViT v2, a training step: 32 images",
    "text_loss_BertGenerationDecoder": "BertGeneration, 4 layers, a training step: 8 x 256 tokens",
}
# Each column: the call that was timed, and the way whose first call it shows.
COLUMNS: Mapping[str, tuple[str, str]] = {
    "eager": ("eager", ""),
    "default": (DEFAULT, DEFAULT),
    "reduce-overhead": (CLONED, "reduce-overhead"),
    "**`auto`**": (AUTO, AUTO),
}
BEST = 1.01  # within one per cent of the fastest counts as the best too


def table() -> str:
    """Return the rows as a Markdown table: milliseconds per call, and the seconds of the first call."""
    models = {model.row.name: model for model in read_models(RECORDS, [MODELS[name] for name in ROWS])}
    lines = ["| model | " + " | ".join(COLUMNS) + " |", "|---" + "|---:" * len(COLUMNS) + "|"]
    return "\n".join([*lines, *(f"| {words} | {' | '.join(_cells(models[name]))} |" for name, words in ROWS.items())])


def _cells(model: Model) -> list[str]:
    calls = {title: model.ms(call) for title, (call, _) in COLUMNS.items()}
    best = min(filter(None, calls.values()))
    return [_cell(calls[title], model.first_s(way) if way else None, best) for title, (_, way) in COLUMNS.items()]


def _cell(call_ms: float | None, first_s: float | None, best: float) -> str:
    if call_ms is None:
        return "did not pass"
    call = f"{call_ms:.2f} ms"
    call = f"**{call}**" if call_ms <= best * BEST else call
    return call if first_s is None else f"{call}; {first_s:.0f} s"

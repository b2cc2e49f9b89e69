"""What lower precision costs two trained models in their own terms: sentences ranked, digits recognised.

Run it with: python examples/precision.py
"""

from collections.abc import Callable, Iterator

import digits
import sentence_encoder
import torch
from torch import Tensor, nn

import backend_kwargs as bk

PRECISIONS = ("bf16", "fp16", "int8-dynamic", "int8-weight")
MAX_ERROR = 0.1  # so wide that each precision is used, and its error is shown


def ranked(embeddings: Tensor) -> Tensor:
    """Return for each sentence the others, the most similar first: [sentences, others]."""
    similar = (embeddings @ embeddings.T).fill_diagonal_(-2)
    return similar.argsort(1, descending=True)[:, :-1]


def of_sentences(embeddings: Tensor, exact: Tensor) -> str:
    """Say how many sentences find their paraphrase first, and how many neighbours keep their rank."""
    order, wanted = ranked(embeddings), ranked(exact)
    paraphrases = int((order[:, 0] == torch.arange(len(order)) ^ 1).sum())
    return f"{paraphrases} of {len(order)} paraphrases first, {(order == wanted).float().mean():.1%} of ranks kept"


def of_digits(logits: Tensor, labels: Tensor) -> str:
    """Say how many digits are right."""
    return f"{int((logits.argmax(1) == labels).sum())} of {len(labels)} right"


def cases() -> Iterator[tuple[str, nn.Module, tuple[Tensor, ...], Callable[[Tensor], str]]]:
    """Yield a name, the trained model, its inputs, and a function that describes the quality of an output."""
    encoder, tokens = sentence_encoder.build()
    with torch.no_grad():
        exact = encoder(*tokens).cpu()
    yield "sentence encoder", encoder, tokens, lambda output: of_sentences(output, exact)
    images, held_out, labels, held_out_labels = digits.data()
    net = digits.train(images, labels).to(tokens[0].device)
    yield "digits", net, (held_out.to(tokens[0].device),), lambda output: of_digits(output, held_out_labels)


@torch.no_grad()
def table(name: str, model: nn.Module, inputs: tuple[Tensor, ...], judge: Callable[[Tensor], str]) -> Iterator[str]:
    """Yield a row for the model as it is, and one for each precision."""
    yield f"| {name} | float32, eager | | {judge(model(*inputs).cpu())} |"
    for precision in PRECISIONS:
        backend = bk.make_backend("tmpl-inductor", precision=precision, max_error=MAX_ERROR)
        compiled = torch.compile(model, backend=backend)
        result = compiled(*inputs).cpu()
        used = bk.report(compiled).graphs[0].precision
        error = "not used" if used.reason else f"{used.error:.1e}"
        yield f"| {name} | `{precision}` | {error} | {judge(result)} |"
        torch.compiler.reset()


def main() -> None:
    """Print a table in Markdown."""
    print("| model | precision | error | task |\n|---|---|---|---|")
    for case in cases():
        for row in table(*case):
            print(row, flush=True)


if __name__ == "__main__":
    main()

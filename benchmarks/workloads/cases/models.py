"""Cases: whole models in plain torch, random weights."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.workloads.case import Case, Problem, Unit, Work
from benchmarks.workloads.nets.convs import ResNet
from benchmarks.workloads.nets.counting import made, nbytes, traced, unit
from benchmarks.workloads.nets.encoders import Bert, ViT
from benchmarks.workloads.nets.llama import Decode, Llama, Loss, Prefill, Shape

# The layers of Llama 3.2 1B, with a quarter of its vocabulary, since the head would otherwise outweigh four layers.
LLAMA = {
    "full": Shape(layers=4, hidden=2048, heads=32, kv_heads=8, inner=8192, vocab=32_000, length=2048),
    "smoke": Shape(layers=1, hidden=64, heads=4, kv_heads=2, inner=128, vocab=256, length=32),
}
ADAMW = partial(torch.optim.AdamW, lr=1e-4, fused=True)
ADAMW_TENSORS = 3  # a weight and its two moments, each read and written
BERT = {"full": (12, 768, 12, 30_522, 512), "smoke": (1, 64, 4, 256, 64)}
VIT = {"full": (12, 768, 12, 224), "smoke": (1, 64, 4, 64)}
RESNET = {"full": ((3, 4, 6, 3), 64, 1000), "smoke": ((1, 1), 16, 10)}
IMAGE = {"full": 224, "smoke": 32}
# Some are multiples of 64, some of 8, some of neither.
SWEEP = {"full": (64, 100, 128, 197, 256, 333, 384, 512), "smoke": (5, 8, 13)}


def tokens(shape: tuple[int, int], vocab: int, device: torch.device) -> torch.Tensor:
    """Return random tokens."""
    return torch.randint(vocab, shape, device=device)


def prefill(device: torch.device, dtype: torch.dtype, scale: str, batch: int) -> Problem:
    """Build the logits after prompts that fill the cache."""
    shape = replace(LLAMA[scale], cache=(batch, LLAMA[scale].length))
    model = made(partial(Prefill, shape), device, dtype)
    args = (tokens((batch, shape.length), shape.vocab, device),)
    given, outputs = traced(partial(Prefill, shape), args)
    masked = attention_flops(shape, batch, shape.length * (shape.length - 1) / 2)
    rows = args[0].unique().numel() * shape.hidden * dtype.itemsize
    written = _cache(shape, batch, shape.length, dtype) + outputs
    read = _weights(model) + rows + nbytes(args)
    return Problem(model, args, Work(given - masked, read + written, unit(dtype), written))


def decode(device: torch.device, dtype: torch.dtype, scale: str, batch: int) -> Problem:
    """Build the logits after one more token, at three quarters of the cache."""
    shape = replace(LLAMA[scale], cache=(batch, LLAMA[scale].length))
    model = made(partial(Decode, shape), device, dtype)
    pos = shape.length * 3 // 4
    args = (torch.randn(batch, 1, shape.hidden, device=device, dtype=dtype), torch.tensor([pos], device=device))
    given, outputs = traced(partial(Decode, shape), args)
    unread = attention_flops(shape, batch, shape.length - pos - 1)
    read = _weights(model) + _cache(shape, batch, pos, dtype) + nbytes(args)
    written = _cache(shape, batch, 1, dtype) + outputs
    return Problem(model, args, Work(given - unread, read + written, unit(dtype), written))


def train(device: torch.device, dtype: torch.dtype, scale: str, batch: int) -> Problem:
    """Build the loss for a training step."""
    shape = replace(LLAMA[scale], length=LLAMA[scale].length // 2)
    model = made(partial(Loss, shape), device, dtype).train()
    args = (tokens((batch, shape.length + 1), shape.vocab, device),)
    given, _ = traced(partial(Llama, shape), (args[0][:, 1:],))
    forward = given - attention_flops(shape, batch, shape.length * (shape.length - 1) / 2)
    # The backward pass has products for the gradients of inputs and of weights.
    read, written = ADAMW_TENSORS * nbytes(model) + nbytes(args), ADAMW_TENSORS * nbytes(model)
    work = Work(3 * forward, read + written, unit(dtype), written)
    return Problem(model, args, work, optimizer=ADAMW)


def attention_flops(shape: Shape, batch: int, pairs: float) -> float:
    """Return the operations of attending from `pairs` of positions: two products of the head's channels each."""
    return 4.0 * shape.layers * batch * shape.heads * shape.head * pairs


def _weights(model: Llama) -> int:
    return nbytes(model) - nbytes(model.embed)


def _cache(shape: Shape, batch: int, length: int, dtype: torch.dtype) -> int:
    return 2 * shape.layers * batch * shape.kv_heads * length * shape.head * dtype.itemsize


def vit(device: torch.device, dtype: torch.dtype, scale: str, batch: int) -> Problem:
    """Classify images with ViT-B/16."""
    *sizes, image = VIT[scale]
    return _of_images(partial(ViT, *sizes, image), (batch, 3, image, image), device, dtype)


def resnet(device: torch.device, dtype: torch.dtype, scale: str, batch: int) -> Problem:
    """Classify images with ResNet-50, channels last."""
    problem = _of_images(partial(ResNet, *RESNET[scale]), (batch, 3, IMAGE[scale], IMAGE[scale]), device, dtype)
    last: Any = {"memory_format": torch.channels_last}
    return replace(problem, fn=problem.fn.to(**last), args=(problem.args[0].contiguous(**last),))


def _of_images(make: Any, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Problem:
    model, images = made(make, device, dtype), torch.randn(shape, device=device, dtype=dtype)
    given, outputs = traced(make, (images,))
    return Problem(model, (images,), Work(given, nbytes(model, images) + outputs, unit(dtype), outputs))


def bert(device: torch.device, dtype: torch.dtype, scale: str, batch: int) -> Problem:
    """Encode texts of full length with BERT-base."""
    *_, vocab, length = BERT[scale]
    model = made(partial(Bert, *BERT[scale]), device, dtype)
    args = (tokens((batch, length), vocab, device),)
    return Problem(model, args, _bert_work(model, args[0], BERT[scale], dtype))


def _bert_work(model: Bert, read: torch.Tensor, sizes: tuple[int, ...], dtype: torch.dtype) -> Work:
    given, _ = traced(partial(Bert, *sizes), (read,))
    row = sizes[1] * dtype.itemsize
    tables = (read.unique().numel() + read.shape[1]) * row  # only these rows of words and positions are read
    weights = nbytes(model) - nbytes(model.words, model.positions)
    written = read.numel() * row
    return Work(given, weights + tables + nbytes(read) + written, unit(dtype), written)


def sweep(device: torch.device, dtype: torch.dtype, scale: str, batch: int) -> Problem:
    """Encode texts of several lengths, one after the other, with one dynamic compile of a quarter of BERT-base."""
    sizes = (max(BERT[scale][0] // 4, 1), *BERT[scale][1:])
    model = made(partial(Bert, *sizes), device, dtype)
    args = tuple(tokens((batch, length), sizes[3], device) for length in SWEEP[scale])
    works = [_bert_work(model, read, sizes, dtype) for read in args]
    return Problem(model, args, _sum(works, unit(dtype)), sweep=True)


def _sum(works: list[Work], of: Unit) -> Work:
    figures = ((work.flops, work.bytes, work.written or 0) for work in works)
    flops, moved, written = map(sum, zip(*figures, strict=True))
    return Work(flops, moved, of, written)


def _sized(build: Any, batch: int, smoke: int) -> Any:
    return lambda device, dtype, scale: build(device, dtype, scale, batch if scale == "full" else smoke)


SMOKE, DEV = "smoke", "dev"
CASES: tuple[Case, ...] = (
    Case("llama_prefill", "model", _sized(prefill, 1, 2), suites=frozenset({DEV})),
    Case("llama_decode_b1", "model", _sized(decode, 1, 1), suites=frozenset({SMOKE, DEV}), headline=True),
    Case("llama_decode_b16", "model", _sized(decode, 16, 2)),
    Case("llama_train", "model", _sized(train, 4, 2), modes=("train",), suites=frozenset({SMOKE})),
    Case("vit_b16_b128", "model", _sized(vit, 128, 2)),
    Case("resnet50_b128", "model", _sized(resnet, 128, 2), suites=frozenset({DEV})),
    Case("resnet50_b1", "model", _sized(resnet, 1, 1)),
    Case("bert_base_32x512", "model", _sized(bert, 32, 2)),
    Case("bert_sweep", "model", _sized(sweep, 8, 2)),
)

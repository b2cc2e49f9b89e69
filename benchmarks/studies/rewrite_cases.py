"""Cases for rewrites of the graph: patterns alone, and whole cases with their bars and the estimates made before."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from backend_kwargs.compare.comparison import Mode
from benchmarks.workloads.case import Problem
from benchmarks.workloads.cases.models import decode
from benchmarks.workloads.cases.norms import layer_norm, layer_norm_arguments
from benchmarks.workloads.user_models import model_case

Made = tuple[Callable[..., Any], tuple[Any, ...]]


@dataclass(frozen=True)
class Place:
    """Where a case is built; without `full` it is small enough for a CPU."""

    device: torch.device
    dtype: torch.dtype = torch.bfloat16
    full: bool = True

    @property
    def scale(self) -> str:
        """Return the suite's name for this size."""
        return "full" if self.full else "smoke"

    def random(self, *shape: int) -> Tensor:
        """Return normal data: an H200 is faster on zeros."""
        return torch.randn(*shape, device=self.device, dtype=self.dtype)

    def images(self, batch: int, channels: int, side: int) -> Tensor:
        """Return a batch in the layout that convolutions like."""
        return self.random(batch, channels, side, side).contiguous(memory_format=torch.channels_last)

    def ready(self, module: nn.Module) -> nn.Module:
        """Return the module here, in eval mode."""
        return module.to(self.device, self.dtype).eval()


@dataclass(frozen=True)
class RewriteCase:
    """A function with its inputs, and what is asked of `auto` beside what it does anyway.

    `rewrite` is expected to match, the bar is a gain of `auto` with rewrites over `auto` without, and `estimate` is the
    gain that was written down before: time in the pattern times the saving that the pattern had alone.
    """

    make: Callable[[Place], Made]
    rewrite: str = ""
    bar: float | None = None
    estimate: float | None = None
    named: tuple[str, ...] | None = None
    mode: Mode = "inference"
    race_s: float = 30.0


def with_statistics(model: nn.Module) -> nn.Module:
    """Give batch norms statistics that differ from their beginning, as training leaves them."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean, -0.1, 0.1)
            nn.init.uniform_(module.running_var, 0.8, 1.2)
    return model


def timm(name: str, batch: int, side: int, place: Place) -> Made:
    """Return a model of timm in eval mode, channels last."""
    spec = f"timm:{name}?batch={batch if place.full else 1}" + ("" if place.full else f"&img_size={side}")
    problem = model_case(spec if "swin" in name or place.full else spec.partition("&")[0]).build(
        place.device, place.dtype, place.scale
    )
    model = with_statistics(problem.fn).to(memory_format=torch.channels_last)
    inputs = (value if place.full else value[..., :side, :side] for value in problem.args)
    return model, tuple(value.contiguous(memory_format=torch.channels_last) for value in inputs)


def transformer(spec: str, small: str, place: Place) -> Made:
    """Return a model of transformers in eval mode."""
    problem = model_case(f"transformers:{spec if place.full else small}").build(place.device, place.dtype, place.scale)
    return problem.fn, tuple(problem.args)


class Apart(nn.Module):
    """A linear layer whose outputs are those of several, as most models hold q, k and v, or gate and up."""

    def __init__(self, whole: nn.Linear, sizes: Sequence[int]) -> None:
        super().__init__()
        weights = whole.weight.detach().split(list(sizes))
        self.parts = nn.ModuleList(nn.Linear(whole.in_features, size, bias=False) for size in sizes)
        for part, weight in zip(self.parts, weights, strict=True):
            part.weight = nn.Parameter(weight.clone())

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], -1)


def decoder(rows: int, place: Place) -> Made:
    """Return one step of decoding with grouped queries and a cache; projections are layers of their own."""
    problem = decode(place.device, place.dtype, place.scale, rows)
    for module in [*problem.fn.modules()]:
        for name, size in (("qkv", "heads"), ("gate_up", "inner")):
            whole = getattr(module, name, None)
            if isinstance(whole, nn.Linear):
                setattr(module, name, Apart(whole, _sizes(whole, size)))
    return problem.fn, tuple(problem.args)


def _sizes(whole: nn.Linear, kind: str) -> tuple[int, ...]:
    if kind == "inner":
        return (whole.out_features // 2,) * 2
    rest = (whole.out_features - whole.in_features) // 2
    return whole.in_features, rest, rest


class Feed(nn.Module):
    """A linear layer with tanh-GELU."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.up(x), approximate="tanh")


def feed(rows: int, width: int, inner: int, place: Place) -> Made:
    """Return the first half of a transformer's MLP."""
    rows, width, inner = (rows, width, inner) if place.full else (16, 24, 32)
    return place.ready(Feed(width, inner)), (place.random(rows, width),)


class Windows(nn.Module):
    """Attention in windows with a bias of relative positions, as Swin has it."""

    def __init__(self, heads: int, tokens: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(heads, tokens, tokens))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1) + self.bias
        attended = weights.softmax(-1) @ v
        return attended.transpose(1, 2).flatten(2)


def windows(count: int, heads: int, tokens: int, place: Place) -> Made:
    """Return attention in windows."""
    count, heads = (count, heads) if place.full else (2, 3)
    return place.ready(Windows(heads, tokens)), tuple(place.random(count, heads, tokens, 32) for _ in range(3))


class Positions(nn.Module):
    """Positions by a convolution in groups, whose weights have a norm, as HuBERT and wav2vec2 have them."""

    def __init__(self, width: int, groups: int, kernel: int) -> None:
        super().__init__()
        layer = nn.Conv1d(width, width, kernel, padding=kernel // 2, groups=groups)
        self.conv = nn.utils.parametrizations.weight_norm(layer, dim=2)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.conv(x.transpose(1, 2))[:, :, :-1]).transpose(1, 2)


def positions(batch: int, tokens: int, width: int, groups: int, kernel: int, place: Place) -> Made:
    """Return the positions of a speech encoder, in half precision on a CPU too."""
    batch, tokens, width, groups, kernel = (batch, tokens, width, groups, kernel) if place.full else (2, 12, 32, 2, 8)
    return place.ready(Positions(width, groups, kernel)).bfloat16(), (place.random(batch, tokens, width).bfloat16(),)


class SegmentationHead(nn.Module):
    """The head of SegFormer: stages of several sizes, enlarged and joined, and a convolution of single pixels."""

    def __init__(self, widths: Sequence[int], inner: int, classes: int) -> None:
        super().__init__()
        self.projections = nn.ModuleList(nn.Conv2d(width, inner, 1) for width in widths)
        self.fuse = nn.Sequential(nn.Conv2d(inner * len(widths), inner, 1, bias=False), nn.BatchNorm2d(inner))
        self.classes = nn.Conv2d(inner, classes, 1)

    def forward(self, *stages: Tensor) -> Tensor:
        images = [
            F.interpolate(projection(stage), size=stages[0].shape[2:], mode="bilinear", align_corners=False)
            for stage, projection in zip(stages, self.projections, strict=True)
        ]
        result: Tensor = self.classes(F.relu(self.fuse(torch.cat(images[::-1], 1))))
        return result


def segmentation_head(batch: int, place: Place) -> Made:
    """Return the head of SegFormer-B2 and larger ones, for images of 512 pixels."""
    batch, side, inner = (batch, 128, 768) if place.full else (1, 16, 24)
    widths = (64, 128, 320, 512)
    head = place.ready(SegmentationHead(widths, inner, 150)).to(memory_format=torch.channels_last)
    return head, tuple(place.images(batch, width, side >> at) for at, width in enumerate(widths))


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    """Compute the mean cross-entropy."""
    return F.cross_entropy(logits, target)


def logits_and_targets(rows: int, classes: int, place: Place) -> Made:
    """Return what a loss is computed of."""
    rows, classes = (rows, classes) if place.full else (8, 40)
    return loss_of, (place.random(rows, classes).requires_grad_(), torch.randint(classes, (rows,), device=place.device))


def norm(place: Place) -> Made:
    """Return a layer norm to train."""
    arguments = layer_norm_arguments(place.device, place.dtype, place.scale)
    return layer_norm, tuple(each.requires_grad_() for each in arguments)


def of_problem(problem: Problem) -> Made:
    """Return a case of the suite."""
    return problem.fn, tuple(problem.args)


WINDOWS = "attention with relative-position bias, 1024 windows of 64, 8 heads of 32"
CASES: dict[str, RewriteCase] = {
    "ResNet-50, 128 images": RewriteCase(partial(timm, "resnet50", 128, 64), "convolution", 1.2, 1.14),
    "linear 16384 x (768 -> 3072) + tanh-GELU": RewriteCase(
        partial(feed, 16384, 768, 3072), "linear_activation", 1.2, 1.36
    ),
    WINDOWS: RewriteCase(partial(windows, 1024, 8, 64), "attention", 1.15, 2.0),
    "cross-entropy 8192 x 128256, forward and backward": RewriteCase(
        partial(logits_and_targets, 8192, 128256), "cross_entropy", 1.25, 1.35, mode="training"
    ),
    "Llama decode, 16 rows": RewriteCase(partial(decoder, 16), "packed", 1.05, 1.1, ("packed",)),
    "GPT-2, 8 x 1024 tokens": RewriteCase(
        partial(
            transformer,
            "GPT2Model?batch=8&tokens=1024&n_layer=12",
            "GPT2Model?batch=1&tokens=8&n_layer=1&n_embd=48&n_head=4",
        ),
        "linear_activation",
        1.05,
        1.10,
    ),
    "RegNetY-032, 128 images": RewriteCase(
        partial(timm, "regnety_032", 128, 64), "grouped_convolution", 1.1, 2.0, race_s=45
    ),
    "Swin-T, 128 images": RewriteCase(partial(timm, "swin_tiny_patch4_window7_224", 128, 56), "attention", None, 1.15),
    "layer norm 32768 x 4096, forward and backward": RewriteCase(
        norm, "layer_norm_backward", None, 1.02, mode="training"
    ),
    "positions of a speech encoder, 8 x 249 tokens": RewriteCase(
        partial(positions, 8, 249, 768, 16, 128), "convolution_as_product", 5.0, 30.0
    ),
    "positions of a speech encoder, 8 x 249 tokens, forward and backward": RewriteCase(
        partial(positions, 8, 249, 768, 16, 128), "convolution_as_product", None, 15.0, mode="training"
    ),
    "SegFormer's head, 2 images": RewriteCase(partial(segmentation_head, 2), "interpolation", 1.5, 2.0),
    "SegFormer's head, 8 images, forward and backward": RewriteCase(
        partial(segmentation_head, 8), "interpolation", None, 1.5, mode="training"
    ),
}


def case_of_model(spec: str) -> RewriteCase:
    """Return a user's model in eval mode; raise if `spec` names none."""
    case = model_case(spec)
    return RewriteCase(lambda place: of_problem(case.build(place.device, place.dtype, place.scale)))


# ---- patterns alone


def conv(channels: int, out: int, side: int, kernel: int, place: Place, *, residual: bool) -> Made:
    """Return a convolution, bias, a residual or none, and ReLU."""
    layer = place.ready(nn.Conv2d(channels, out, kernel, padding=kernel // 2)).to(memory_format=torch.channels_last)
    x = place.images(128, channels, side)
    if residual:
        return (lambda x, z: F.relu(layer(x) + z)), (x, place.images(128, out, side))
    return (lambda x: F.relu(layer(x))), (x,)


def conv_in_groups(channels: int, groups: int, side: int, kernel: int, stride: int, place: Place) -> Made:
    """Return a convolution in groups without what follows."""
    layer = nn.Conv2d(channels, channels, kernel, stride, kernel // 2, groups=groups, bias=False)
    layer = place.ready(layer).to(memory_format=torch.channels_last)
    return layer, (place.images(128, channels, side),)


def sequence_in_groups(channels: int, groups: int, length: int, kernel: int, stride: int, place: Place) -> Made:
    """Return a convolution of sequences in groups."""
    layer = place.ready(nn.Conv1d(channels, channels, kernel, stride, kernel // 2, groups=groups))
    return layer, (place.random(8, channels, length),)


def linear(rows: int, width: int, inner: int, activation: Callable[[Tensor], Tensor], place: Place) -> Made:
    """Return a linear layer with bias and an activation."""
    layer = place.ready(nn.Linear(width, inner))
    return (lambda x: activation(layer(x))), (place.random(rows, width),)


def tanh_gelu(x: Tensor) -> Tensor:
    """Compute GELU by tanh."""
    return F.gelu(x, approximate="tanh")


PATTERNS: dict[str, tuple[str, Callable[[Place], Made]]] = (
    {
        f"{kernel}x{kernel} conv {channels} -> {out} @{side}{' + residual' if residual else ''}": (
            "convolution",
            partial(conv, channels, out, side, kernel, residual=residual),
        )
        for channels, out, side, kernel in ((64, 64, 56, 3), (64, 256, 56, 1), (256, 64, 56, 1), (256, 1024, 14, 1))
        for residual in (False, True)
    }
    | {
        f"{kernel}x{kernel} conv of {channels} in {groups} groups @{side}, stride {stride}": (
            "grouped_convolution",
            partial(conv_in_groups, channels, groups, side, kernel, stride),
        )
        for channels, groups, side, kernel, stride in (
            (576, 24, 14, 3, 1),  # RegNetY
            (216, 9, 28, 3, 1),
            (216, 9, 56, 3, 2),
            (72, 3, 56, 3, 1),
            (128, 32, 56, 3, 1),  # ResNeXt
            (512, 32, 14, 3, 1),
            (96, 96, 56, 7, 1),  # ConvNeXt
            (384, 384, 14, 7, 1),
            (960, 960, 14, 3, 1),  # EfficientNetV2
        )
    }
    | {
        f"conv1d of {channels} in {groups} groups, {length} long, kernel {kernel}, stride {stride}": (
            "convolution_as_product",
            partial(sequence_in_groups, channels, groups, length, kernel, stride),
        )
        for channels, groups, length, kernel, stride in (
            (768, 16, 249, 128, 1),  # HuBERT, wav2vec2
            (1024, 16, 249, 128, 1),
            (1280, 16, 749, 128, 1),
            (768, 16, 249, 19, 1),  # data2vec
            (512, 8, 1500, 5, 2),
            (512, 64, 1500, 31, 1),
        )
    }
    | {
        f"{kernel}x{kernel} conv of {channels} in {groups} groups @{side}, as a product": (
            "convolution_as_product",
            partial(conv_in_groups, channels, groups, side, kernel, 1),
        )
        for channels, groups, side, kernel in ((576, 24, 14, 3), (216, 9, 28, 3), (512, 32, 14, 3), (512, 4, 14, 3))
    }
    | {
        "linear 16384 x (768 -> 3072) + tanh-GELU": ("linear_activation", partial(linear, 16384, 768, 3072, tanh_gelu)),
        "linear 16384 x (768 -> 3072) + ReLU": ("linear_activation", partial(linear, 16384, 768, 3072, F.relu)),
        "linear 8192 x (1024 -> 4096) + tanh-GELU": ("linear_activation", partial(linear, 8192, 1024, 4096, tanh_gelu)),
        "linear 8192 x (1024 -> 4096) + GELU": ("approximate_gelu", partial(linear, 8192, 1024, 4096, F.gelu)),
        "SegFormer's head": ("interpolation", CASES["SegFormer's head, 2 images"].make),
        "windows of 64, 8 heads of 32": ("attention", partial(windows, 1024, 8, 64)),
        "windows of 49, 4 heads of 32": ("attention", partial(windows, 2048, 4, 49)),
    }
)

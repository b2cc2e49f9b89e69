"""Models of transformers and timm, wrapped for the suite."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils import _pytree as pytree

# A small encoder and decoder, as classes of transformers name their sizes.
TINY_STACKS: Mapping[str, int] = {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
}


class Called(nn.Module):
    """A model called with its last arguments as keywords; returns one field of its output, or all tensors in it."""

    def __init__(self, model: Callable[..., Any], names: tuple[str, ...] = (), field: str = "") -> None:
        super().__init__()
        self.model, self.names, self.field = model, names, field

    def forward(self, *args: Any) -> Any:
        positional = len(args) - len(self.names)
        output = self.model(*args[:positional], **dict(zip(self.names, args[positional:], strict=True)))
        if self.field:
            return getattr(output, self.field)
        if isinstance(output, Tensor):
            return output
        return tuple(leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor))


class Cached(nn.Module):
    """A causal language model of transformers and its StaticCache, which a call fills starting at `position`.

    The cache's tensors are also buffers of this module, so that they are restored, copied and upcast with it. The
    position is an argument since the cache would otherwise count tokens, and a timed loop would exceed it.
    """

    def __init__(self, model: nn.Module, cache: Any) -> None:
        super().__init__()
        self.model, self.cache = model, cache
        for at, layer in enumerate(cache.layers):
            for name in ("keys", "values", "cumulative_length"):
                self.register_buffer(f"{name}_{at}", getattr(layer, name), persistent=False)

    def forward(self, input_ids: Tensor, position: Tensor) -> Tensor:
        for layer in self.cache.layers:
            layer.cumulative_length.copy_(position)
        return self.model(input_ids, past_key_values=self.cache, logits_to_keep=1).logits

    def _apply(self, *args: Any, **kwargs: Any) -> "Cached":
        super()._apply(*args, **kwargs)
        for at, layer in enumerate(self.cache.layers):
            layer.keys, layer.values = self._buffers[f"keys_{at}"], self._buffers[f"values_{at}"]
            layer.cumulative_length = self._buffers[f"cumulative_length_{at}"]
        return self


class Classifier(nn.Module):
    """A model of timm with its training loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(self.model(images), labels)

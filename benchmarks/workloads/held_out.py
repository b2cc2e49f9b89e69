"""Real models that nothing in the package was tuned on: rows of data, from the packages that people use.

They are held out: no case of the suite, no page of the docs and no example uses them, and none is dropped because of
its results. Weights are random, sizes are those of published models; where that would compile for minutes, there are
fewer layers of the published width. `scale` "tiny" is the same computation at sizes for a CPU.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, elu

from backend_kwargs.harness.named_models import imported
from benchmarks.workloads.nets.libraries import TINY_STACKS, Cached, Called, Classifier

Kind = Literal["inference", "decode", "training", "graphs"]
Scale = Literal["full", "tiny"]
Sizes = Mapping[str, Any]
Built = tuple[nn.Module, tuple[Tensor, ...]]
INPUTS = ("batch", "length", "cache", "image")  # sizes of the inputs; the rest are options of the model


@dataclass(frozen=True, slots=True)
class HeldOut:
    """One model: what it is, how it is called, and its sizes by scale.

    `make(sizes, **given)` builds it and its inputs on the current default device; a "training" model returns its loss.
    `graphs` is the number of graphs into which dynamo divides it.
    """

    name: str
    kind: Kind
    what: str
    make: Callable[..., Built]
    given: Mapping[str, Any]
    full: Sizes
    tiny: Sizes
    graphs: int = 1

    @property
    def training(self) -> bool:
        """Whether a call is a training step."""
        return self.kind == "training"

    def build(self, device: torch.device, dtype: torch.dtype, scale: Scale) -> Built:
        """Return the model in eval mode, since dropout differs between compilers, and its inputs."""
        torch.manual_seed(0)
        with device:
            model, inputs = self.make(self.full if scale == "full" else self.tiny, **self.given)
        model = model.to(device, dtype).eval()
        return model, tuple(each.to(dtype) if each.is_floating_point() else each for each in inputs)


# ---- transformers


def _config(kind: str, sizes: Sizes) -> tuple[Any, Any]:
    made_by = getattr(imported("transformers"), kind)
    return made_by, made_by.config_class(**{name: value for name, value in sizes.items() if name not in INPUTS})


def _ids(config: Any, sizes: Sizes) -> Tensor:
    return torch.randint(config.vocab_size, (sizes["batch"], sizes["length"]))


def text(sizes: Sizes, kind: str) -> Built:
    """Build a model of texts."""
    made_by, config = _config(kind, sizes)
    return Called(made_by(config), ("input_ids",)), (_ids(config, sizes),)


def text_loss(sizes: Sizes, kind: str) -> Built:
    """Build the loss of a causal language model."""
    made_by, config = _config(kind, sizes)
    return Called(made_by(config), ("input_ids", "labels"), "loss"), (_ids(config, sizes), _ids(config, sizes))


def image(sizes: Sizes, kind: str) -> Built:
    """Build a model of images from transformers."""
    made_by, config = _config(kind, sizes)
    return Called(made_by(config), ("pixel_values",)), (torch.randn(sizes["batch"], 3, sizes["image"], sizes["image"]),)


def speech(sizes: Sizes, kind: str) -> Built:
    """Build a model that reads sound and the beginning of its transcript."""
    made_by, config = _config(kind, sizes)
    sound = torch.randn(sizes["batch"], config.num_mel_bins, 2 * config.max_source_positions)
    return Called(made_by(config), ("input_features", "decoder_input_ids")), (sound, _ids(config, sizes))


def decode(sizes: Sizes, kind: str) -> Built:
    """Build a model that reads one token and has a static cache, three quarters of which are filled."""
    made_by, config = _config(kind, sizes)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cache = imported("transformers").StaticCache(config=config, max_cache_len=sizes["cache"])
    where, dtype = torch.empty(0).device, torch.get_default_dtype()
    cache.early_initialization(sizes["batch"], heads, width, dtype, where)
    for layer in cache.layers:
        layer.keys.normal_()
        layer.values.normal_()
    return Cached(made_by(config), cache), (_ids(config, sizes), torch.tensor(sizes["cache"] * 3 // 4))


# ---- timm


def vision(sizes: Sizes) -> Built:
    """Build a classifier of images, channels last."""
    options = {name: value for name, value in sizes.items() if name not in ("name", *INPUTS)}
    model = imported("timm").create_model(sizes["name"], pretrained=False, **options)
    images = torch.randn(sizes["batch"], 3, sizes["image"], sizes["image"])
    last: Any = {"memory_format": torch.channels_last}
    return model.to(**last), (images.to(**last),)


def vision_loss(sizes: Sizes) -> Built:
    """Build the loss of a classifier of images."""
    model, (images,) = vision(sizes)
    return Classifier(model), (images, torch.randint(1000, (len(images),)))


# ---- torch_geometric


class GraphLoss(nn.Module):
    """A graph network with the loss of classifying whole graphs."""

    def __init__(self, width: int, hidden: int, layers: int, classes: int, graphs: int) -> None:
        super().__init__()
        models = imported("torch_geometric.nn.models")
        self.body = models.GIN(width, hidden, layers, dropout=0.0)
        self.head, self.graphs = nn.Linear(hidden, classes), graphs

    def forward(self, x: Tensor, edges: Tensor, graph: Tensor, labels: Tensor) -> Tensor:
        """Sum the nodes of each graph, and return the loss."""
        nodes = self.body(x, edges)
        pooled = nodes.new_zeros(self.graphs, nodes.shape[1]).index_add(0, graph, nodes)
        return cross_entropy(self.head(pooled), labels)


def graph_loss(sizes: Sizes) -> Built:
    """Build a training step on a batch of graphs of equal size, such as molecules."""
    graphs, nodes, edges = sizes["graphs"], sizes["nodes"], sizes["edges"]
    model = GraphLoss(sizes["width"], sizes["hidden"], sizes["layers"], sizes["classes"], graphs)
    ends = torch.randint(nodes, (2, graphs, edges)) + nodes * torch.arange(graphs)[:, None]
    features = torch.randn(graphs * nodes, sizes["width"])
    owner = torch.arange(graphs).repeat_interleave(nodes)
    return model, (features, ends.reshape(2, -1), owner, torch.randint(sizes["classes"], (graphs,)))


class WatchedGat(nn.Module):
    """Graph attention of five layers that stops at the first one whose results are not finite.

    Each check is a branch on data, at which dynamo divides the function. Written out, since dynamo compiles no loop
    that it would have to divide.
    """

    def __init__(self, width: int, hidden: int, heads: int, classes: int) -> None:
        super().__init__()
        # Self-loops are among the edges already: to add them, torch_geometric looks for some, at which dynamo breaks.
        conv = partial(imported("torch_geometric.nn").GATConv, add_self_loops=False)
        self.first = conv(width, hidden, heads)
        self.second, self.third, self.fourth = (conv(hidden * heads, hidden, heads) for _ in range(3))
        self.last = conv(hidden * heads, classes, heads, concat=False)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        """Return the logits of each node."""
        x = elu(self.first(x, edges))
        if not torch.isfinite(x).all():
            raise FloatingPointError("The first layer has returned NaN or infinity.")
        x = elu(self.second(x, edges))
        if not torch.isfinite(x).all():
            raise FloatingPointError("The second layer has returned NaN or infinity.")
        x = elu(self.third(x, edges))
        if not torch.isfinite(x).all():
            raise FloatingPointError("The third layer has returned NaN or infinity.")
        x = elu(self.fourth(x, edges))
        if not torch.isfinite(x).all():
            raise FloatingPointError("The fourth layer has returned NaN or infinity.")
        logits: Tensor = self.last(x, edges)
        return logits


def graph_attention(sizes: Sizes) -> Built:
    """Build a network of attention over the edges of one graph."""
    model = WatchedGat(sizes["width"], sizes["hidden"], sizes["heads"], sizes["classes"])
    nodes = sizes["nodes"]
    edges = torch.cat([torch.randint(nodes, (2, sizes["edges"])), torch.arange(nodes).expand(2, -1)], dim=1)
    return model, (torch.randn(nodes, sizes["width"]), edges)


# ---- the rows

TINY_TEXT: Sizes = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "batch": 2,
    "length": 8,
}
TINY_GROUPED: Sizes = {**TINY_TEXT, "num_key_value_heads": 1}
TINY_IMAGES: Sizes = {"batch": 2, "image": 64}
UNCACHED: Sizes = {"use_cache": False}
SWIN: Sizes = {"name": "swin_tiny_patch4_window7_224", "batch": 32, "image": 224}
MAMBA: Sizes = {"num_hidden_layers": 2, "chunk_size": 128, "n_groups": 1}

# Those with short compiles first: what a run that ends early leaves are the slow ones.
HELD_OUT: tuple[HeldOut, ...] = (
    HeldOut(
        "gat_watched",
        "graphs",
        "GAT of five layers, 20,000 nodes, 160,000 edges, results checked after each layer",
        graph_attention,
        {},
        {"width": 128, "hidden": 64, "heads": 4, "classes": 40, "nodes": 20_000, "edges": 160_000},
        {"width": 8, "hidden": 4, "heads": 2, "classes": 3, "nodes": 20, "edges": 60},
        graphs=5,
    ),
    HeldOut(
        "whisper_base",
        "inference",
        "Whisper base, 4 x 30 s of sound, 64 tokens",
        speech,
        {"kind": "WhisperForConditionalGeneration"},
        {
            **UNCACHED,
            "d_model": 512,
            "encoder_layers": 6,
            "decoder_layers": 6,
            "encoder_attention_heads": 8,
            "decoder_attention_heads": 8,
            "encoder_ffn_dim": 2048,
            "decoder_ffn_dim": 2048,
            "batch": 4,
            "length": 64,
        },
        {
            **UNCACHED,
            "vocab_size": 64,
            **TINY_STACKS,
            "num_mel_bins": 8,
            "max_source_positions": 10,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
            "batch": 2,
            "length": 4,
        },
    ),
    HeldOut(
        "qwen2_train",
        "training",
        "Qwen2 0.5B, 6 of 24 layers, training step, 4 x 512 tokens",
        text_loss,
        {"kind": "Qwen2ForCausalLM"},
        {
            **UNCACHED,
            "vocab_size": 151_936,
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 6,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
            "batch": 4,
            "length": 512,
        },
        {**UNCACHED, **TINY_GROUPED},
    ),
    HeldOut(
        "qwen3_decode",
        "decode",
        "Qwen3 0.6B, 14 of 28 layers, one token, cache of 2048",
        decode,
        {"kind": "Qwen3ForCausalLM"},
        {
            "vocab_size": 151_936,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 14,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "tie_word_embeddings": True,
            "batch": 1,
            "length": 1,
            "cache": 2048,
        },
        {**TINY_GROUPED, "head_dim": 16, "length": 1, "cache": 16},
    ),
    HeldOut(
        "gin_train",
        "training",
        "GIN of five layers, training step, 512 graphs of 26 nodes",
        graph_loss,
        {},
        {"width": 128, "hidden": 300, "layers": 5, "classes": 2, "graphs": 512, "nodes": 26, "edges": 56},
        {"width": 8, "hidden": 12, "layers": 2, "classes": 2, "graphs": 3, "nodes": 5, "edges": 8},
    ),
    HeldOut(
        "modernbert",
        "inference",
        "ModernBERT base, 16 x 512 tokens",
        text,
        {"kind": "ModernBertModel"},
        {"batch": 16, "length": 512},
        {**TINY_TEXT, "pad_token_id": 0},
    ),
    HeldOut(
        "deberta_v3",
        "inference",
        "DeBERTa V3 base, 8 x 256 tokens",
        text,
        {"kind": "DebertaV2Model"},
        {
            "vocab_size": 128_100,
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "intermediate_size": 3072,
            "type_vocab_size": 0,
            "relative_attention": True,
            "position_buckets": 256,
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
            "pos_att_type": ["p2c", "c2p"],
            "position_biased_input": False,
            "batch": 8,
            "length": 256,
        },
        {
            **TINY_TEXT,
            "type_vocab_size": 0,
            "relative_attention": True,
            "position_buckets": 8,
            "max_position_embeddings": 16,
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
            "pos_att_type": ["p2c", "c2p"],
            "position_biased_input": False,
        },
    ),
    HeldOut(
        "pythia_decode",
        "decode",
        "Pythia 410M, 12 of 24 layers, 8 x one token, cache of 1024",
        decode,
        {"kind": "GPTNeoXForCausalLM"},
        {
            "vocab_size": 50_304,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 12,
            "num_attention_heads": 16,
            "batch": 8,
            "length": 1,
            "cache": 1024,
        },
        {**TINY_TEXT, "length": 1, "cache": 16},
    ),
    HeldOut(
        "segformer_b2",
        "inference",
        "SegFormer B2, 4 images of 512 x 512",
        image,
        {"kind": "SegformerForSemanticSegmentation"},
        {
            "depths": [3, 4, 6, 3],
            "hidden_sizes": [64, 128, 320, 512],
            "decoder_hidden_size": 768,
            "num_labels": 150,
            "batch": 4,
            "image": 512,
        },
        {
            "depths": [1, 1, 1, 1],
            "hidden_sizes": [8, 16, 24, 32],
            "num_attention_heads": [1, 2, 2, 4],
            "decoder_hidden_size": 16,
            **TINY_IMAGES,
        },
        graphs=2,  # of its own
    ),
    HeldOut(
        "olmoe",
        "inference",
        "OLMoE 7B of 64 experts, 4 of 16 layers, 1024 tokens",
        text,
        {"kind": "OlmoeForCausalLM"},
        {**UNCACHED, "intermediate_size": 1024, "num_hidden_layers": 4, "batch": 1, "length": 1024},
        {**UNCACHED, **TINY_GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0},
    ),
    HeldOut(
        "convnextv2_tiny",
        "inference",
        "ConvNeXt V2 tiny, 32 images of 224 x 224",
        vision,
        {},
        {"name": "convnextv2_tiny", "batch": 32, "image": 224},
        {"name": "convnextv2_atto", "depths": (1, 1, 1, 1), "dims": (8, 8, 8, 8), **TINY_IMAGES},
    ),
    HeldOut(
        "mobilenetv4_train",
        "training",
        "MobileNetV4 medium, training step, 64 images of 224 x 224",
        vision_loss,
        {},
        {"name": "mobilenetv4_conv_medium", "batch": 64, "image": 224},
        {"name": "mobilenetv4_conv_small", **TINY_IMAGES},
    ),
    HeldOut(
        "caformer_s18",
        "inference",
        "CAFormer S18, 32 images of 224 x 224",
        vision,
        {},
        {"name": "caformer_s18", "batch": 32, "image": 224},
        {"name": "caformer_s18", **TINY_IMAGES},
    ),
    HeldOut(
        "hrnet_w18_small",
        "inference",
        "HRNet W18 small, 16 images of 224 x 224",
        vision,
        {},
        {"name": "hrnet_w18_small", "batch": 16, "image": 224},
        {"name": "hrnet_w18_small", **TINY_IMAGES},
    ),
)
# Not held out: rewrites were made for them.
WITH_REWRITES = (
    HeldOut(
        "mamba2",
        "inference",
        "Mamba-2 of width 2048, 2 layers, 4 x 1024 tokens",
        text,
        {"kind": "Mamba2Model"},
        {**UNCACHED, **MAMBA, "hidden_size": 2048, "num_heads": 64, "head_dim": 64, "batch": 4, "length": 1024},
        {**UNCACHED, **MAMBA, "hidden_size": 32, "num_heads": 4, "head_dim": 16, "batch": 1, "length": 16},
    ),
    HeldOut(
        "mixer_b16",
        "inference",
        "Mixer B/16, 32 images of 224 x 224",
        vision,
        {},
        {"name": "mixer_b16_224", "batch": 32, "image": 224},
        {"name": "mixer_s32_224", "img_size": 64, **TINY_IMAGES},
    ),
    HeldOut(
        "swin_tiny",
        "inference",
        "Swin tiny, 32 images of 224 x 224",
        vision,
        {},
        SWIN,
        {**SWIN, "img_size": 64, "window_size": 2, **TINY_IMAGES},
    ),
    HeldOut(
        "swin_train",
        "training",
        "Swin tiny, training step, 32 images of 224 x 224",
        vision_loss,
        {},
        SWIN,
        {**SWIN, "img_size": 64, "window_size": 2, **TINY_IMAGES},
    ),
)
BY_NAME: Mapping[str, HeldOut] = {each.name: each for each in HELD_OUT}
# Built small on a CPU, too: the five models of the comparison of races on two cores.
ON_A_CPU = ("whisper_base", "qwen3_decode", "gin_train", "deberta_v3", "convnextv2_tiny")

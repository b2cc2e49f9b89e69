"""Cases of real models: classes of transformers and timm, random weights, a few layers of published widths."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from backend_kwargs.harness.named_models import imported
from benchmarks.workloads.case import Case, Problem
from benchmarks.workloads.cases.models import ADAMW, tokens
from benchmarks.workloads.nets.libraries import TINY_STACKS, Cached, Called, Classifier

SUITE = "models"
Sizes = Mapping[str, Any]
Scales = Mapping[str, Sizes]

# Differences from the published configuration by scale, and `batch` and `length` of the inputs.
MISTRAL: Sizes = {"sliding_window": None, "num_hidden_layers": 4}
TINY_GROUPED: Sizes = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
PREFILL: Scales = {
    "full": {**MISTRAL, "batch": 1, "length": 2048, "cache": 2048},
    "smoke": {**MISTRAL, **TINY_GROUPED, "batch": 2, "length": 8, "cache": 8},
}
DECODE: Scales = {
    "full": {**MISTRAL, "batch": 4, "length": 1, "cache": 2048},
    "smoke": {**MISTRAL, **TINY_GROUPED, "batch": 2, "length": 1, "cache": 8},
}
MIXTRAL: Scales = {
    "full": {"num_hidden_layers": 2, "use_cache": False, "batch": 1, "length": 512},
    "smoke": {**TINY_GROUPED, "num_local_experts": 4, "use_cache": False, "batch": 2, "length": 8},
}
TINY_GPT2: Sizes = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 1, "n_head": 2}
GPT2: Scales = {
    "full": {"n_layer": 6, "use_cache": False, "batch": 4, "length": 512},
    "smoke": {**TINY_GPT2, "use_cache": False, "batch": 2, "length": 8},
}
TINY_ENCODER: Sizes = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
}
ROBERTA: Scales = {
    "full": {
        "vocab_size": 50_265,
        "max_position_embeddings": 514,
        "type_vocab_size": 1,
        "num_hidden_layers": 6,
        "batch": 16,
        "length": 256,
    },
    "smoke": {**TINY_ENCODER, "batch": 2, "length": 8},
}
# Without dropout, which would differ between peers. GPT-2 with labels breaks its graph, since transformers logs a
# warning in each forward.
ROBERTA_TRAINING: Scales = {
    scale: {**sizes, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    for scale, sizes in ROBERTA.items()
}
BART: Scales = {
    "full": {"encoder_layers": 3, "decoder_layers": 3, "use_cache": False, "batch": 8, "length": 256},
    "smoke": {
        "vocab_size": 64,
        **TINY_STACKS,
        "max_position_embeddings": 16,
        "use_cache": False,
        "batch": 2,
        "length": 8,
    },
}
FALCON_MAMBA: Scales = {
    "full": {
        "vocab_size": 65_024,
        "hidden_size": 4096,
        "num_hidden_layers": 4,
        "use_cache": False,
        "batch": 2,
        "length": 32,
    },
    "smoke": {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "state_size": 4,
        "time_step_rank": 4,
        "use_cache": False,
        "batch": 2,
        "length": 4,
    },
}
DETR: Scales = {
    "full": {"encoder_layers": 3, "decoder_layers": 3, "batch": 2, "image": (480, 640)},
    "smoke": {
        **TINY_STACKS,
        "num_queries": 5,
        "backbone": {"embedding_size": 8, "hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1]},
        "batch": 1,
        "image": (64, 64),
    },
}
DEIT: Scales = {
    "full": {"name": "deit_base_patch16_224", "depth": 6, "batch": 64, "image": 224},
    "smoke": {"name": "deit_tiny_patch16_224", "depth": 1, "img_size": 32, "batch": 2, "image": 32},
}
EFFICIENTNET: Scales = {
    "full": {"name": "tf_efficientnetv2_b0", "batch": 64, "image": 224},
    "smoke": {"name": "test_efficientnet", "batch": 2, "image": 32},
}
REGNET: Scales = {
    "full": {"name": "regnetx_032", "batch": 64, "image": 224},
    "smoke": {"name": "regnetx_002", "batch": 2, "image": 32},
}
REGNET_TRAINING: Scales = {**REGNET, "full": {**REGNET["full"], "batch": 32}}
INPUTS = ("batch", "length", "cache", "image")  # sizes of the inputs; the rest are options of the model
SGD = partial(torch.optim.SGD, lr=1e-3, momentum=0.9)


def made(kind: str, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Any:
    """Make a class of transformers from its own configuration, for inference."""
    transformers = imported("transformers")
    made_by = getattr(transformers, kind)
    given = {name: value for name, value in sizes.items() if name not in INPUTS}
    with device:
        return made_by(made_by.config_class(**given)).to(dtype).eval()


def text(device: torch.device, dtype: torch.dtype, scale: str, kind: str, scales: Scales) -> Problem:
    """Build a model on texts."""
    sizes = scales[scale]
    model = made(kind, sizes, device, dtype)
    return Problem(Called(model, ("input_ids",)), (_tokens(model, sizes, device),))


def masked_loss(device: torch.device, dtype: torch.dtype, scale: str) -> Problem:
    """Build the loss of RoBERTa as a masked language model."""
    sizes = ROBERTA_TRAINING[scale]
    model = made("RobertaForMaskedLM", sizes, device, dtype)
    given = tuple(_tokens(model, sizes, device) for _ in range(2))
    return Problem(Called(model, ("input_ids", "labels"), "loss"), given, optimizer=ADAMW)


def cached(device: torch.device, dtype: torch.dtype, scale: str, scales: Scales) -> Problem:
    """Build a model that reads tokens into a static cache: as many as it has room for, or one at the end."""
    sizes = scales[scale]
    model = made("MistralForCausalLM", sizes, device, dtype)
    config, room = model.config, sizes["cache"]
    cache = imported("transformers").StaticCache(config=config, max_cache_len=room)
    heads, width = config.num_key_value_heads, config.head_dim
    cache.early_initialization(sizes["batch"], heads, width, dtype, device)
    for layer in cache.layers:
        layer.keys.normal_()
        layer.values.normal_()
    position = 0 if sizes["length"] == room else room * 3 // 4
    return Problem(Cached(model, cache), (_tokens(model, sizes, device), torch.tensor(position, device=device)))


def translation(device: torch.device, dtype: torch.dtype, scale: str) -> Problem:
    """Build a model that reads a text and the beginning of its translation."""
    sizes = BART[scale]
    model = made("BartForConditionalGeneration", sizes, device, dtype)
    given = tuple(_tokens(model, sizes, device) for _ in range(2))
    return Problem(Called(model, ("input_ids", "decoder_input_ids")), given)


def detection(device: torch.device, dtype: torch.dtype, scale: str) -> Problem:
    """Build DETR on a ResNet of transformers, which finds objects in images."""
    sizes = dict(DETR[scale])
    backbone = imported("transformers").ResNetConfig(**sizes.pop("backbone", {}), out_features=["stage4"])
    model = made(
        "DetrForObjectDetection",
        {**sizes, "backbone_config": backbone, "use_timm_backbone": False, "use_pretrained_backbone": False},
        device,
        dtype,
    )
    images = torch.randn(sizes["batch"], 3, *sizes["image"], device=device, dtype=dtype)
    return Problem(Called(model, ("pixel_values",)), (images,))


def vision(device: torch.device, dtype: torch.dtype, scale: str, scales: Scales) -> Problem:
    """Build a model of timm that classifies images, channels last."""
    model, images = _of_images(device, dtype, scales[scale])
    return Problem(model, (images,))


def vision_loss(device: torch.device, dtype: torch.dtype, scale: str, scales: Scales) -> Problem:
    """Build the loss of classifying images with a model of timm, channels last."""
    model, images = _of_images(device, dtype, scales[scale])
    labels = torch.randint(model.num_classes, (len(images),), device=device)
    return Problem(Classifier(model), (images, labels), optimizer=SGD)


def _of_images(device: torch.device, dtype: torch.dtype, sizes: Sizes) -> tuple[Any, torch.Tensor]:
    given = {name: value for name, value in sizes.items() if name not in ("name", *INPUTS)}
    with device:
        model = imported("timm").create_model(sizes["name"], pretrained=False, **given)
    images = torch.randn(sizes["batch"], 3, sizes["image"], sizes["image"], device=device, dtype=dtype)
    last: Any = {"memory_format": torch.channels_last}
    return model.to(dtype, **last).eval(), images.to(**last)


def _tokens(model: Any, sizes: Sizes, device: torch.device) -> torch.Tensor:
    return tokens((sizes["batch"], sizes["length"]), model.config.vocab_size, device)


def _case(name: str, build: Any, **given: Any) -> Case:
    return Case(name, "model", partial(build, **given), suites=frozenset({SUITE}))


def _training(name: str, build: Any, **given: Any) -> Case:
    return replace(_case(name, build, **given), modes=("train",))


# The models with short compiles first, in case the budget ends early.
CASES: tuple[Case, ...] = (
    _case("roberta", text, kind="RobertaForSequenceClassification", scales=ROBERTA),
    _case("mistral_decode", cached, scales=DECODE),
    _case("gpt2", text, kind="GPT2LMHeadModel", scales=GPT2),
    _case("deit", vision, scales=DEIT),
    _case("mistral_prefill", cached, scales=PREFILL),
    _training("roberta_train", masked_loss),
    _case("bart", translation),
    _case("mixtral", text, kind="MixtralForCausalLM", scales=MIXTRAL),
    _case("regnet", vision, scales=REGNET),
    _case("detr", detection),
    # Without its own kernels the scan is a loop over tokens, which is unrolled.
    replace(_case("falcon_mamba", text, kind="FalconMambaForCausalLM", scales=FALCON_MAMBA), version=2),
    _training("regnet_train", vision_loss, scales=REGNET_TRAINING),
    _case("efficientnetv2", vision, scales=EFFICIENTNET),
)

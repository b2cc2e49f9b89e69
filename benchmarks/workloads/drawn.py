"""Models drawn by a seed from the model lists of transformers, timm and torch_geometric, which nobody has chosen.

    python -m benchmarks.workloads.drawn SEED  # prints the models, for drawn.json, which has each draw by its seed

The seed is the hash of a commit in which the lists and this rule stand; nothing is dropped afterwards. Of each stratum
the list is shuffled, and the first models are taken that have at most MOST_PARAMETERS, and whose call fails on the meta
device in no other way than by asking for a value; what then fails in eager on a GPU has no figure. Of timm a module is
drawn, then one of its models. Models of transformers have the widths of their default configuration, and at most LAYERS
layers.
"""

import json
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from backend_kwargs.harness.named_models import imported
from benchmarks.workloads import held_out
from benchmarks.workloads.held_out import Built, HeldOut, Kind, Sizes

MOST_PARAMETERS, LAYERS, IMAGE = 3e9, 4, 224
LAYER_OPTIONS = (
    "num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers", "depth",
)  # fmt: skip
HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Stratum:
    """So many models of a list, and how each is built."""

    count: int
    names: str
    kind: Kind
    build: Callable[[Sizes, str], Built]
    sizes: Sizes


def _configured(build: Callable[..., Built], sizes: Sizes, name: str) -> Built:
    """Build a model of transformers with fewer layers."""
    config = getattr(imported("transformers"), name).config_class()
    given = {each: getattr(config, each, None) for each in LAYER_OPTIONS}
    layers = {each: min(value, LAYERS) for each, value in given.items() if isinstance(value, int)}
    size = getattr(config, "image_size", None)
    image = {"image": size if isinstance(size, int) else IMAGE} if "image" in sizes else {}
    cache = {"use_cache": False} if "cache" not in sizes and hasattr(config, "use_cache") else {}
    return build({**sizes, **layers, **image, **cache}, name)


class Layers(nn.Module):
    """A graph network, which classifies the nodes of one graph."""

    def __init__(self, name: str, width: int, hidden: int, layers: int, classes: int) -> None:
        super().__init__()
        self.body = getattr(imported("torch_geometric.nn.models"), name)(width, hidden, layers, classes)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        """Return the logits of each node."""
        return self.body(x, edges)  # type: ignore[no-any-return]


def _graph(sizes: Sizes, name: str) -> Built:
    model = Layers(name, sizes["width"], sizes["hidden"], LAYERS, sizes["classes"])
    nodes, edges = sizes["nodes"], sizes["edges"]
    return model, (torch.randn(nodes, sizes["width"]), torch.randint(nodes, (2, edges)))


def _timm(build: Callable[[Sizes], Built], sizes: Sizes, name: str) -> Built:
    _, *size = imported("timm").get_pretrained_cfg(name).input_size
    return build({**sizes, "name": name, "image": size[0]})


TEXT: Sizes = {"batch": 8, "length": 256}
GRAPH: Sizes = {"width": 128, "hidden": 256, "classes": 40, "nodes": 20_000, "edges": 160_000}
STRATA: Mapping[str, Stratum] = {
    "text": Stratum(6, "text", "inference", partial(_configured, held_out.text), TEXT),
    "image": Stratum(3, "image", "inference", partial(_configured, held_out.image), {"batch": 16, "image": IMAGE}),
    "timm": Stratum(6, "timm", "inference", partial(_timm, held_out.vision), {"batch": 32}),
    "decode": Stratum(
        3, "causal", "decode", partial(_configured, held_out.decode), {"batch": 1, "length": 1, "cache": 1024}
    ),
    "text_loss": Stratum(2, "causal", "training", partial(_configured, held_out.text_loss), TEXT),
    "timm_loss": Stratum(2, "timm", "training", partial(_timm, held_out.vision_loss), {"batch": 32}),
    "graph": Stratum(2, "graph", "inference", _graph, GRAPH),
}


def row(stratum: str, name: str) -> HeldOut:
    """Return a drawn model as it is measured."""
    of = STRATA[stratum]
    sizes = of.sizes
    return HeldOut(f"{stratum}_{name}", of.kind, f"{name}, {stratum}", of.build, {"name": name}, sizes, sizes)


DRAWS = {
    seed: {model.name: model for model in (row(*each) for each in models)}
    for seed, models in json.loads((HERE / "drawn.json").read_text()).items()
}
MODELS = {**held_out.BY_NAME, **{each.name: each for each in held_out.WITH_REWRITES}}
for _drawn in DRAWS.values():
    MODELS |= _drawn
DRAWS["drawn"] = [*DRAWS.values()][-1]


def draw(seed: str, say: Callable[[str], None]) -> Iterator[tuple[str, str]]:
    """Yield the stratum and the name of each model."""
    lists, order = json.loads((HERE / "drawn_lists.json").read_text()), random.Random(seed)  # noqa: S311 - no secret
    for stratum, of in STRATA.items():
        names = lists[of.names]
        names = [order.choice(several) for several in names.values()] if isinstance(names, dict) else list(names)
        order.shuffle(names)
        fitting = (name for name in names if fits(row(stratum, name), say))
        yield from ((stratum, name) for _, name in zip(range(of.count), fitting, strict=False))


def fits(model: HeldOut, say: Callable[[str], None]) -> bool:
    """Return whether a model is small enough and can be called."""
    try:
        with torch.no_grad():
            built, inputs = model.build(torch.device("meta"), torch.bfloat16, "full")
            count = sum(each.numel() for each in built.parameters())
            why = f"{count:.2g} parameters" if count > MOST_PARAMETERS else ""
            why or built(*inputs)
    except Exception as error:  # noqa: BLE001 - another library may raise anything
        why = "" if "meta tensors" in str(error) else repr(error)[:150]
    say(f"{model.name}: {why or 'taken'}")
    return not why


if __name__ == "__main__":
    found = [list(each) for each in draw(sys.argv[1], partial(print, file=sys.stderr, flush=True))]
    print(json.dumps(found, indent=1))

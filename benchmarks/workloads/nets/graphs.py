"""A network on a graph: features of nodes, averaged over neighbours."""

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

NODES, EDGES = 2048, 16384
FEATURES, HIDDEN, CLASSES = 128, 256, 47


class Sage(nn.Module):
    """GraphSAGE's mean aggregator: a product of a node's own features plus one of its neighbours' mean."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.own, self.neighbours = nn.Linear(width, out), nn.Linear(width, out, bias=False)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        total = x.new_zeros(x.shape).index_add(0, target, x[source])
        count = x.new_zeros(len(x)).index_add(0, target, x.new_ones(len(target)))
        return self.own(x) + self.neighbours(total / count.clamp(min=1)[:, None])


class GraphSage(nn.Module):
    """Two layers, logits for each node."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Sage(FEATURES, HIDDEN), Sage(HIDDEN, CLASSES)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.second(relu(self.first(x, edges)), edges)


def graph_sage() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """Return the network and a random graph, as `backend-kwargs compare` takes them."""
    return GraphSage().eval(), (torch.randn(NODES, FEATURES), torch.randint(NODES, (2, EDGES)))

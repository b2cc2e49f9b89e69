"""Linear layers that share an input as one product (q, k and v, or gate and up), their weights joined in each call.

Small products leave most of a GPU idle. To copy such weights takes less time than one product saves over several, of
which the backward pass has two for each layer.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.fx import GraphModule, Node

from backend_kwargs.backends import Inputs
from backend_kwargs.graphs.writes import copy_of_graph, has_transforms, storages_of, written_between, written_storages
from backend_kwargs.rewrites.matching import HALF, arguments_of, hint, known_true, same_sizes
from backend_kwargs.rewrites.packed import LINEAR
from backend_kwargs.rewrites.places import Wanted, every
from backend_kwargs.rewrites.table import Rewrite
from backend_kwargs.rewrites.traced import Change, example, examples, is_only_computed_with, is_plain

REWRITE = Rewrite(
    "Linear layers that share an input as one product of weights that are joined in each call",
    traced=f"{__name__}:join",
    needs=("gpu",),
    applies="half precision; in training, and in inference at most 64 rows or 512 columns",
    costs="memory for the joined weights",
    fitting=lambda stats: stats.gpu and stats.gemms > 1,
    order=158,
)

# Functions that begin or end a mode, in which other operators are recorded or cast.
MODES = ("_set_grad_enabled", "_enter_autocast", "_exit_autocast", "_enter_inference_mode", "_exit_inference_mode")
VIEWS = ("view", "view_as", "unflatten")  # methods that give other sizes
FEW_ROWS, NARROW = 64, 512  # in inference larger products keep a GPU busy by themselves
MOST_NUMBERS = 16 << 20  # of a layer's weight: to copy more takes longer than a product saves


def join(gm: GraphModule, example_inputs: Inputs, wanted: Wanted = every) -> Change | None:
    """Return the graph with each group of linear layers as one, or None if no layers share an input."""
    if has_transforms(gm) or not [*_groups(gm)]:
        return None
    joined = copy_of_graph(gm)
    groups = [each for each in _groups(joined) if wanted(each)]
    for group in groups:
        _join(group)
    if not groups:
        return None
    joined.graph.lint()
    joined.recompile()
    return Change(joined, example_inputs, len(groups))


def _groups(gm: GraphModule) -> Iterator[list[Node]]:
    """Yield the groups of two or more linear layers that share an input that stays the same, in the graph's order."""
    sharing: dict[Hashable, list[Node]] = defaultdict(list)
    changes = 0
    for node in gm.graph.nodes:
        changes += getattr(node.target, "__name__", "") in MODES
        if node.target in LINEAR and (kind := _kind(node)) is not None:
            sharing[changes, kind].append(node)
    for group in sharing.values():
        if len(group) > 1 and not written_between(group[0], group[-1], {each for one in group for each in _read(one)}):
            yield group


def _read(node: Node) -> list[Node]:
    """Return the input, the weight and the bias, if there is one, of a linear layer."""
    return [each for each in (arguments_of(node) or {}).values() if isinstance(each, Node)]


def _kind(node: Node) -> Hashable | None:
    """Return what linear layers share that are joined; None for a layer that is joined with no other."""
    values = examples(node, *_read(node))
    if values is None or not all(map(is_plain, (node, *_read(node)))):
        return None
    result, x, weight, *biases = values
    if weight.dim() != 2 or not all(isinstance(size, int) for size in weight.shape):
        return None
    if result.dtype not in HALF or not _pays(x, weight):
        return None
    if any(each.op != "placeholder" for each in _read(node)[1:]):
        return None
    if not all(same_sizes(each.shape, weight.shape[:1]) for each in biases):
        return None
    return _read(node)[0], result.dtype, weight.shape[1], *((each.dtype, each.requires_grad) for each in values[2:])


def _pays(x: Tensor, weight: Tensor) -> bool:
    """Return whether one product may be faster than several of this size."""
    few = hint(x.numel()) <= FEW_ROWS * x.shape[-1] or x.shape[-1] <= NARROW
    trains = weight.requires_grad and torch.is_grad_enabled()
    return hint(weight.numel()) <= MOST_NUMBERS and (trains or few)


def _is_divided(node: Node, columns: int) -> bool:
    """Return whether a result, or a view of it, is in the parts of one product what it is alone.

    No method gives a view in which rows of one part are together, and nothing is written: the parts share the version
    by which autograd knows whether what it has saved was written.
    """
    memory = storages_of(example(node))
    return not any(memory & written_storages(user) for user in node.users) and all(
        (each.target not in VIEWS or _keeps_rows(each.meta["example_value"], columns)) and _is_divided(each, columns)
        for each in node.users
        if memory & storages_of(example(each))
    )


def _keeps_rows(view: Tensor, columns: int) -> bool:
    """Return whether each dimension of a view goes through whole rows, or stays within one."""
    return all(
        known_true((size - 1) * stride < columns) or known_true(stride % max(columns, 1) == 0)
        for size, stride in zip(view.shape, view.stride(), strict=True)
    )


def _join(group: Sequence[Node]) -> None:
    """Replace linear layers by parts of the result of one."""
    first, start = group[0], 0
    graph, dtype = first.graph, first.meta["example_value"].dtype
    with graph.inserting_before(first):
        parameters = []
        for nodes in zip(*(_read(each)[1:] for each in group), strict=True):
            # Under autocast each is rounded where it is copied.
            rounded = [graph.call_method("to", (each, dtype)) for each in nodes]
            parameters.append(graph.call_function(torch.cat, (rounded,)))
        whole = graph.call_function(F.linear, (_read(first)[0], *parameters))
        for each in group:
            size = each.meta["example_value"].shape[-1]
            part = graph.call_function(torch.narrow, (whole, -1, start, size))
            if not (is_only_computed_with(each) and _is_divided(each, size)):
                part = graph.call_method("clone", (part,), {"memory_format": torch.contiguous_format})
            each.replace_all_uses_with(part)
            start += size
    for each in group:
        graph.erase_node(each)

"""Nested lists, tuples and dictionaries of tensors: `torch.utils._pytree` has no public name up to torch 2.15."""

from torch.utils._pytree import (
    TreeSpec,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_structure,
    tree_unflatten,
)

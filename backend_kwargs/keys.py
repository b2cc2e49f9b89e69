"""One hash for all keys, and what is in the key of each: two things with one key are treated as equal."""

import hashlib
import json
from collections.abc import Mapping

# Each field of a key, the kinds of keys that have it, and what would go wrong without it. "decision": in stores and
# locks. "computation": a graph at any sizes. "kept": a graph of a bundle. "verdict": of a place, in its name.
# "kernel": a place in a lock where kernels are chosen.
FIELDS: Mapping[str, tuple[str, str]] = {
    "structure": ("decision computation kept", "other operators are another function"),
    "signature": ("decision kept", "other sizes and strides have other code, and another winner"),
    "kinds": ("computation", "so do other ranks, dtypes and devices, whatever the sizes"),
    "ambient": ("decision computation kept", "torch's modes change how the same graph computes"),
    "device": ("decision", "another one has another winner"),
    "asked": ("decision computation", "other candidates, and another aim, have another winner"),
    "tensors": ("kept", "values in a graph become part of its code"),
    "release": ("verdict", "a rewrite may change with each release of this package"),
    "machine": ("verdict", "torch, Triton and the threads decide how fast both sides are"),
    "options": ("verdict", "the user's options are compiled into both sides"),
    "around": ("verdict", "so is what Inductor would fuse with the place"),
    "inputs": ("kernel", "layouts decide which kernel is fastest"),
    "output": ("kernel", "so does its own layout"),
    "kernels": ("kernel", "a lock chooses among those that there were"),
}
DIGITS = {"computation": 16, "verdict": 8, "kernel": 16}  # of keys that stand in names, beside others


def key(kind: str, **fields: object) -> str:
    """Return the key of a kind, whose fields are those of the table."""
    names = [name for name, (kinds, _) in FIELDS.items() if kind in kinds.split()]
    assert {*names} == {*fields}, f"A key of kind {kind!r} has {names}."
    return digest([fields[name] for name in names], DIGITS.get(kind, 64))


def digest(value: object, digits: int = 64, *, sort_keys: bool = False) -> str:
    """Return the first hexadecimal digits of the SHA-256 of bytes, or of a value as JSON."""
    if not isinstance(value, bytes | memoryview):
        value = json.dumps(value, sort_keys=sort_keys, default=repr).encode()
    return hashlib.sha256(value).hexdigest()[:digits]

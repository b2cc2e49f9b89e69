"""A lock: what timing chose for a model, as TOML that can be reviewed and committed."""

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import asdict

from backend_kwargs.auto.decisions_toml import toml_lines
from backend_kwargs.auto.machine import FIELDS, Machine, in_words
from backend_kwargs.errors import BackendKwargsError, shown
from backend_kwargs.facts import Decision, PinnedKernel, Pins, Value
from backend_kwargs.facts.decision import check, has_form
from backend_kwargs.files import read_toml, write_whole

VERSION = 2  # 1 had other keys
HEAD = """\
# What timing chose, for make_backend(..., reproducible="pinned", lock=THIS FILE), which times nothing.
# Written by `backend-kwargs pin`; pin again for another machine or release."""


class _Decided(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A decision in a lock: what is compiled, and for people which graph it is."""

    graph: str
    winner: str
    options: dict[str, Any] = {}
    model: str = ""
    inputs: tuple[str, ...] = ()


class _Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A lock's content; a name that it does not have is a mistake of who edited the file."""

    version: int
    machine: dict[str, Value]
    decisions: dict[str, _Decided] = {}
    kernels: dict[str, PinnedKernel] = {}
    configurations: dict[str, dict[str, int | str | bool]] = {}


def write_lock(pins: Pins, path: Path) -> None:
    """Write a lock, sorted by keys, so that only what has changed differs from the one before."""
    for options in (*(each.options for each in pins.decisions.values()), *pins.configurations.values()):
        for name, value in options.items():
            if not has_form(value):
                raise BackendKwargsError(f"Option {name!r} is {shown(value)}, which cannot be pinned; leave it out.")
    machine: dict[str, Value] = {name: value for name, value in pins.machine.items() if value}
    decisions = {
        key: _Decided(each.graph, each.winner, {**each.options}, each.model, each.inputs)
        for key, each in pins.decisions.items()
    }
    configurations: dict[str, Any] = {**pins.configurations}
    document = _Document(VERSION, machine, decisions, pins.kernels, configurations)
    write_whole(path, "\n".join([HEAD, *toml_lines(msgspec.to_builtins(document, order="deterministic"))]) + "\n")


def read_lock(path: str | Path) -> Pins:
    """Return what a lock pins; raise with the reason if it is none, or of a newer release."""
    if not os.path.exists(path):  # noqa: PTH110 - False too for a name that is too long
        raise BackendKwargsError(
            f"There is no lock {str(path)!r}: write it by `backend-kwargs pin FACTORY --lock {path}`, or bk.pin(...)."
        )
    tables = read_toml(path, "a lock")
    version = tables.get("version")
    if type(version) is int and version != VERSION:
        later = "update backend-kwargs" if version > VERSION else "pin again"
        raise BackendKwargsError(f"Lock {str(path)!r} has version {shown(version)}, not {VERSION}: {later}.")
    try:
        document = msgspec.convert(tables, _Document)
        decisions = {key: Decision(key, made=0.0, **asdict(each)) for key, each in document.decisions.items()}
        for each in decisions.values():
            check(each)
    except (ValueError, TypeError, RecursionError) as error:
        raise BackendKwargsError(f"{str(path)!r} is not a lock: {str(error).rstrip('.')}.") from None
    configurations: dict[str, Mapping[str, Value]] = {**document.configurations}
    return Pins(str(path), document.machine, decisions, document.kernels, configurations)


def pinned_machine(here: Machine) -> dict[str, Value]:
    """Return what a lock records of a machine."""
    return {name: here.get(name) for name, field in FIELDS.items() if field.in_locks}


def check_machine(pins: Pins, here: Machine, devices: Collection[str]) -> None:
    """Raise if a lock is of another release, or of another machine for a graph on these kinds of devices."""
    device = "cuda" if "cuda" in devices else "cpu"
    if words := in_words([name for name, field in FIELDS.items() if device in field.in_locks], pins.machine, here):
        raise BackendKwargsError(
            f"Lock {pins.label!r} was written for {words}: write one here by `backend-kwargs pin`, or bk.pin(...)."
        )

"""What runs once the options are final: one module for each kind of compiler."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from backend_kwargs.layers import Layer
from backend_kwargs.options import Option
from backend_kwargs.requirements import Limit, Requirement
from backend_kwargs.trust import Check


@dataclass(frozen=True, slots=True)
class Reading:
    """What one source of options asks for: the templates it names, and its layers, lowest first."""

    templates: tuple[str, ...]
    layers: tuple[Layer, ...]


class Compiler(Protocol):
    """A way to turn a graph into a callable, and what it knows of its own options. Compares by value."""

    @property
    def name(self) -> str:
        """How a spec spells it."""

    def dynamo_name(self, templates: Sequence[str]) -> str:
        """Return a name for this compiler that dynamo has registered, where there is one."""

    def summary(self, templates: Sequence[str]) -> str:
        """Say in one line what this compiler under these templates is."""

    def option(self, name: str) -> Option:
        """Return the option called `name`, or raise with the nearest."""

    def options(self) -> Mapping[str, Option]:
        """Return every option that is known by its name."""

    def unchecked(self) -> str:
        """Say what it takes besides those, unchecked: "" where it takes nothing else."""

    def template(self, name: str) -> Layer:
        """Return the layer of the template called `name`, or raise with the nearest."""

    def verify(self, templates: Sequence[str], options: Mapping[str, Any], tell: Callable[[Limit], None]) -> None:
        """Raise where these cannot compile; `tell` where a documented fallback would run in their place."""

    def read(self, source: str, given: Mapping[str, Any], check: Check) -> Reading:
        """Check what `source` gave and put it in order: templates, then the mode, then options."""

    def inert(self, options: Mapping[str, Any]) -> Mapping[str, str]:
        """Return, for each of `options` that cannot act on this machine or beside the others, the reason."""

    def impeded(self, options: Mapping[str, Any]) -> Mapping[str, Requirement]:
        """Return, for each of `options` that cannot act on this machine, what it lacks."""

    def compile(
        self, gm: Any, example_inputs: Sequence[Any], options: Mapping[str, Any], name: str | None
    ) -> Callable[..., Any]:
        """Compile `gm` under `options`; `name` is the region's, where torch gave one."""

    def config(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the whole configuration that `options` amount to."""

    def reset(self, options: Mapping[str, Any]) -> None:
        """Drop what compiling under `options` keeps in this process."""

"""What runs once the options are final: one module for each kind of compiler."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from backend_kwargs.layers import Layer
from backend_kwargs.options import Option
from backend_kwargs.requirements import Limit
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

    @property
    def takes_inductor_options(self) -> bool:
        """Whether its options are Inductor's."""

    def found_by_name(self) -> bool:
        """Tell whether a spec of this name finds this compiler, also in another process."""

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

    def read(self, source: str, given: Mapping[str, Any], coerce: Check) -> Reading:
        """Check what `source` gave and put it in order: templates, then the mode, then options."""

    def limits(self, options: Mapping[str, Any]) -> Mapping[str, Limit]:
        """Return, for each of `options` that cannot act on this machine or beside the others, why."""

    def compile(
        self, gm: Any, example_inputs: Sequence[Any], options: Mapping[str, Any], name: str | None
    ) -> Callable[..., Any]:
        """Compile `gm` under `options`; `name` is the region's, where torch gave one."""

    def config(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the whole configuration that `options` amount to."""

    def reset(self, options: Mapping[str, Any]) -> None:
        """Drop what compiling under `options` keeps in this process."""

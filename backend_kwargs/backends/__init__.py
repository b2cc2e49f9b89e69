"""Compilers, which run once the options are final: one module or folder for each kind."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from backend_kwargs.options.layers import Layer
from backend_kwargs.options.option import Option
from backend_kwargs.options.requirements import Limit
from backend_kwargs.options.trust import Check


@dataclass(frozen=True, slots=True)
class Reading:
    """The contents of one source of options: the templates it names, and its layers, lowest first."""

    templates: tuple[str, ...]
    layers: tuple[Layer, ...]


class Compiler(Protocol):
    """A way to compile a graph, with the checks of its own options. Compares by value."""

    @property
    def name(self) -> str:
        """Its name in a spec."""

    @property
    def takes_inductor_options(self) -> bool:
        """Whether its options are Inductor's."""

    def found_by_name(self) -> bool:
        """Return whether a spec with this name finds this compiler, also in another process."""

    def dynamo_name(self, templates: Sequence[str]) -> str:
        """Return a name under which dynamo has registered this compiler, if there is one."""

    def summary(self, templates: Sequence[str]) -> str:
        """Return a one-line description of this compiler with these templates."""

    def option(self, name: str) -> Option:
        """Return the option called `name`, or raise with the closest name."""

    def options(self) -> Mapping[str, Option]:
        """Return all options with a known name."""

    def unchecked(self) -> str:
        """Describe the arguments that it accepts beyond those without a check, "" if there are none."""

    def template(self, name: str) -> Layer:
        """Return the layer of the template called `name`, or raise with the closest name."""

    def verify(self, templates: Sequence[str], options: Mapping[str, Any], tell: Callable[[Limit], None]) -> None:
        """Raise if these cannot compile; call `tell` for each limit that has a documented fallback."""

    def read(self, source: str, given: Mapping[str, Any], coerce: Check) -> Reading:
        """Check the options of `source` and order them: templates, then the mode, then options."""

    def limits(self, options: Mapping[str, Any]) -> Mapping[str, Limit]:
        """Return the reason for each of `options` that has no effect on this machine or with the other options."""

    def compile(
        self, gm: Any, example_inputs: Sequence[Any], options: Mapping[str, Any], name: str | None
    ) -> Callable[..., Any]:
        """Compile `gm` with `options`; `name` is the region's, if torch gave one."""

    def config(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the whole configuration that results from `options`."""

    def reset(self, options: Mapping[str, Any]) -> None:
        """Free what compiling with `options` keeps in this process."""

"""Base of the compilers without templates, whose options are the fields of a dataclass."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from backend_kwargs.backends import CapturedGraph, Compiler, Reading, Stage, Tell
from backend_kwargs.errors import wrong_value
from backend_kwargs.facts import Compiled
from backend_kwargs.options import (
    Check,
    Layer,
    Limit,
    Need,
    Option,
    Options,
    Rule,
    copied,
    limits_of_options,
    lookup,
    require,
)
from backend_kwargs.options.machine import installed_version, machine

if TYPE_CHECKING:
    from backend_kwargs.backends.partitioned import PartCompiler


@dataclass(frozen=True)
class DeclaredCompiler(Compiler):
    """A compiler as a descriptor: what the registry, the docs, `doctor`, `explain` and `auto` know about it.

    An instance has one of the names by which a spec can refer to it.
    """

    name: str
    stages: tuple[Stage, ...] = field(default=(), compare=False, repr=False)

    library: ClassVar[str]  # in error messages
    registered: ClassVar[str]  # its name in dynamo's registry; without "tmpl-" it is the name in docs
    line: ClassVar[str]
    declared: ClassVar[Mapping[str, Option]]
    rules: ClassVar[tuple[Rule, ...]]
    distributions: ClassVar[tuple[str, ...]]  # as packages are installed
    needs: ClassVar[tuple[Need, ...]] = ()  # without which it cannot work
    variants: ClassVar[tuple[Options, ...]] = ({},)  # options under which `doctor` judges it
    raced: ClassVar[bool] = False  # whether `effort="full"` races it on a CPU
    # In a race: the option that makes parameters constants, whether they always are, and whether it compiles training.
    freeze_option: ClassVar[str] = ""
    freezes: ClassVar[bool] = False
    trains: ClassVar[bool] = True

    def dynamo_name(self, templates: Sequence[str]) -> str:
        return self.registered

    def summary(self, templates: Sequence[str]) -> str:
        return self.line

    def versions(self) -> dict[str, str | None]:
        """Return the version of each distribution that it needs, or None if one is not installed."""
        return {name: installed_version(name) for name in self.distributions}

    def installed(self) -> str:
        """Return the versions that are installed, as text for people to read."""
        versions = [f"{name} {version}" for name, version in self.versions().items() if version]
        return ", ".join(versions) or "none"

    def why_not_in(self, precision: str) -> str:
        """Return why it cannot compute in one of its `precisions` on this machine, "" if it can."""
        return ""

    def options(self) -> Mapping[str, Option]:
        return self.declared

    def option(self, name: str) -> Option:
        shows = f"`backend-kwargs explain {self.registered.removeprefix('tmpl-')} '*'` shows all."
        return lookup(name, self.declared, f"{self.library} option", shows)

    def verify(self, templates: Sequence[str], options: Options, tell: Tell) -> None:
        require(f"Backend {self.name!r}", *self.needs)

    @abstractmethod
    def part_compiler(self, options: Options) -> "PartCompiler":
        """Return what compiles the parts of a graph with these options; libraries are imported here."""

    def compile(self, graph: CapturedGraph, options: Options) -> Compiled:
        from backend_kwargs.backends.partitioned import compile_by_parts  # imports torch

        return compile_by_parts(graph, options, self.part_compiler(options))

    def checked(self, option: Option, value: object, coerce: Check) -> object:
        """Return `value` converted to the option's type, or raise."""
        return coerce(option, value, f"{self.library} option")

    def read(self, source: str, given: Options, coerce: Check) -> Reading:
        given = dict(given)
        if "template" in given:
            self.template(given["template"])
        mapping = given.pop("options", None) or {}
        if not isinstance(mapping, Mapping):
            raise wrong_value("'options'", "a mapping of options", mapping)
        known = [(self.option(name), value) for name, value in {**mapping, **given}.items()]
        checked = {option.name: copied(self.checked(option, value, coerce)) for option, value in known}
        return Reading((), (Layer(source, MappingProxyType(checked)),))

    def limits(self, options: Options) -> Mapping[str, Limit]:
        return limits_of_options(options, lambda name: self.declared[name].default, machine(), self.rules)

    def config(self, options: Options) -> dict[str, Any]:
        return {name: options.get(name, option.default) for name, option in self.declared.items()}

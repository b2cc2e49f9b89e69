"""Compilers: what one is, and a module or folder for each kind.

`Backend` has no code for Inductor: a compiler reads its own options, says what limits them here, and compiles.

`inductor/` is Inductor, and `dynamo` any other function `(gm, example_inputs, **kwargs)`. `tvm/`, `onnxruntime/` and
`openvino/` compile parts of graphs: each is a `DeclaredCompiler`, a row of `others.COMPILERS`, whose
`partitioned.PartCompiler` says which nodes it takes and how a part is compiled.
`generated_code` finds Inductor's code behind a callable.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from backend_kwargs.errors import BackendKwargsError, shown, wrong_value
from backend_kwargs.facts import Call, Compiled, Pins
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
from backend_kwargs.options.machine import Machine, installed_version, machine

if TYPE_CHECKING:
    from torch.fx import GraphModule

Tell = Callable[[Limit], None]
Inputs: TypeAlias = Sequence[Any]  # tensors, and integers or torch.SymInt for dynamic sizes
CompileInner: TypeAlias = Callable[..., Call]  # compiles one lowered graph: Inductor's `compile_fx_inner`
Wrap: TypeAlias = Callable[[CompileInner], CompileInner]


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """A graph that dynamo captured, with its example inputs and what its caller asks besides options.

    `region` is the name of a region, if torch gave one. `compile_fx(compile_fx, gm, example_inputs, ...)` is called in
    place of Inductor's function, which it gets: a bundle keeps code there, or loads it. `around_inner` are functions
    that wrap the function that compiles each lowered graph, the innermost first. `error_is_measured`: the caller
    measures the error of a lower precision. `pins` is what a lock says about it, or is noted for one.
    """

    gm: "GraphModule"
    example_inputs: Inputs
    region: str | None = None
    compile_fx: Callable[..., Call] | None = None
    around_inner: tuple[Wrap, ...] = ()
    error_is_measured: bool = False
    pins: Pins | None = None

    def wrap_inner_compile(self, wrap: Wrap) -> "CapturedGraph":
        """Return the same, with another function around the one that compiles each lowered graph."""
        return replace(self, around_inner=(*self.around_inner, wrap))


CompileFn = Callable[[CapturedGraph, Options], Compiled]


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of a compile, and the options that it owns.

    `apply(compiler, graph, options, following)` compiles by `following(graph, options)`, once, several times or not at
    all; it is called where `option` asks for something. The rest is for a compiler that shows a stage's options as its
    own, as Inductor does: `verify(options, machine, tell)`, called where one of them asks for something, raises if they
    cannot work and calls `tell` for each limit of the machine, `rules` say where one has no effect, `reads` turns short
    spellings of a value into its type, and `removed` says what serves in place of options that it owned.
    """

    option: str
    options: Mapping[str, Option]
    apply: Callable[["Compiler", CapturedGraph, Options, CompileFn], Compiled]
    verify: Callable[[Options, Machine, Tell], None] = lambda options, here, tell: None
    rules: tuple[Rule, ...] = ()
    reads: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    removed: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reading:
    """The contents of one source of options: the templates it names, and its layers, lowest first."""

    templates: tuple[str, ...]
    layers: tuple[Layer, ...]


class Compiler(ABC):
    """A way to compile a graph, with the checks of its own options. Compares by value.

    `name` is its name in a spec, and `stages` are what a compile goes through before `compile`, the outermost first.
    `precisions` are the lower ones that it computes in by itself, under the options that `computing_in` returns.
    """

    name: str
    stages: tuple[Stage, ...] = ()
    takes_inductor_options: ClassVar[bool] = False
    precisions: ClassVar[tuple[str, ...]] = ()

    def computing_in(self, precision: str) -> Options:
        """Return the options under which it computes in one of its `precisions`; none for any other precision."""
        return {}

    def found_by_name(self) -> bool:
        """Return whether a spec with this name finds this compiler, also in another process."""
        return True

    @abstractmethod
    def dynamo_name(self, templates: Sequence[str]) -> str:
        """Return a name under which dynamo has registered this compiler, if there is one."""

    @abstractmethod
    def summary(self, templates: Sequence[str]) -> str:
        """Return a one-line description of this compiler with these templates."""

    @abstractmethod
    def option(self, name: str) -> Option:
        """Return the option called `name`, or raise with the closest name."""

    @abstractmethod
    def options(self) -> Mapping[str, Option]:
        """Return all options with a known name."""

    def unchecked(self) -> str:
        """Describe the arguments that it accepts beyond those without a check, "" if there are none."""
        return ""

    def template(self, name: str) -> Layer:
        """Return the layer of the template called `name`, or raise with the closest name."""
        raise BackendKwargsError(f"Backend {self.name!r} has no templates, got {shown(name)}.")

    @abstractmethod
    def verify(self, templates: Sequence[str], options: Options, tell: Tell) -> None:
        """Raise if these cannot compile; call `tell` for each limit that has a documented fallback."""

    def read(self, source: str, given: Options, coerce: Check) -> Reading:
        """Check the options of `source` and order them: templates, then the mode, then options."""
        given = dict(given)
        mapping = given.pop("options", None) or {}
        if not isinstance(mapping, Mapping):
            raise wrong_value("'options'", "a mapping of options", mapping)
        known = [(self.option(name), value) for name, value in {**mapping, **given}.items()]
        checked = {option.name: copied(self.checked(option, value, coerce)) for option, value in known}
        return Reading((), (Layer(source, MappingProxyType(checked)),))

    def checked(self, option: Option, value: object, coerce: Check) -> object:
        """Return `value` converted to the option's type, or raise."""
        return coerce(option, value, f"backend {self.name!r}: option")

    def limits(self, options: Options) -> Mapping[str, Limit]:
        """Return the reason for each of `options` that has no effect on this machine or with the other options."""
        return {}

    @abstractmethod
    def compile(self, graph: CapturedGraph, options: Options) -> Compiled:
        """Compile a graph with `options`, without the stages."""

    @abstractmethod
    def config(self, options: Options) -> dict[str, Any]:
        """Return the whole configuration that results from `options`."""

    def reset(self, options: Options) -> None:  # noqa: B027 - most keep nothing
        """Free what compiling with `options` keeps in this process."""


@dataclass(frozen=True)
class DeclaredCompiler(Compiler):
    """A compiler as a descriptor: what the registry, the docs, `doctor`, `explain` and `auto` know about it.

    It has no templates, and its options are the fields of a dataclass. An instance has one of the names by which a spec
    can refer to it.
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
    def part_compiler(self, options: Options) -> Any:
        """Return the `partitioned.PartCompiler` with these options; torch and the library are imported here."""

    def compile(self, graph: CapturedGraph, options: Options) -> Compiled:
        return self.part_compiler(options).compile_graph(graph, options)  # type: ignore[no-any-return]

    def checked(self, option: Option, value: object, coerce: Check) -> object:
        return coerce(option, value, f"{self.library} option")

    def read(self, source: str, given: Options, coerce: Check) -> Reading:
        if "template" in given:
            self.template(given["template"])
        return super().read(source, given, coerce)

    def limits(self, options: Options) -> Mapping[str, Limit]:
        return limits_of_options(options, lambda name: self.declared[name].default, machine(), self.rules)

    def config(self, options: Options) -> dict[str, Any]:
        return {name: options.get(name, option.default) for name, option in self.declared.items()}

"""Compilers: what one is, and a module or folder for each kind.

`Backend` has no code for Inductor: a compiler reads its own options, says what limits them here, and compiles.

`inductor/` is Inductor, and `dynamo` any other function `(gm, example_inputs, **kwargs)`. `tvm/`, `onnxruntime/` and
`openvino/` compile parts of graphs: each is a `declared.DeclaredCompiler`, a row of `others.COMPILERS`, whose
`partitioned.PartCompiler` says which nodes it takes and how a part is compiled.
`generated_code` finds Inductor's code behind a callable.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from backend_kwargs.errors import BackendKwargsError, shown
from backend_kwargs.facts import Call, Compiled, Pins
from backend_kwargs.options import Check, Layer, Limit, Option, Options, Rule
from backend_kwargs.options.machine import Machine

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


def _accept(options: Options, here: Machine, tell: Tell) -> None:
    """Accept all options."""


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
    verify: Callable[[Options, Machine, Tell], None] = _accept
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

    @abstractmethod
    def read(self, source: str, given: Options, coerce: Check) -> Reading:
        """Check the options of `source` and order them: templates, then the mode, then options."""

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

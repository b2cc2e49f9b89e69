"""The TVM compiler: checks options and compiles with Relax. TVM is imported when the first graph arrives."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from backend_kwargs.backends import DeclaredCompiler
from backend_kwargs.backends.tvm import settings as of_tvm
from backend_kwargs.errors import BackendKwargsError, warn_once
from backend_kwargs.options.machine import CannotWorkError, Limit, Rule
from backend_kwargs.options.option import Check, Option, Options

if TYPE_CHECKING:
    from backend_kwargs.backends.partitioned import PartCompiler


@dataclass(frozen=True)
class TVMCompiler(DeclaredCompiler):
    """TVM, by Relax and its virtual machine."""

    library: ClassVar[str] = "TVM"
    registered: ClassVar[str] = "tmpl-tvm"  # "tvm" is dynamo's own backend
    line: ClassVar[str] = "Apache TVM under options: Relax, tuned or untuned kernels, eager for what TVM lacks"
    declared: ClassVar[Mapping[str, Option]] = of_tvm.OPTIONS
    rules: ClassVar[tuple[Rule, ...]] = of_tvm.RULES
    distributions: ClassVar[tuple[str, ...]] = tuple(of_tvm.WORKING)
    raced: ClassVar[bool] = True
    freeze_option: ClassVar[str] = "freeze"
    variants: ClassVar[tuple[Options, ...]] = ({}, {"target": "cuda"})

    def installed(self) -> str:
        versions = super().installed()
        return versions if versions == "none" else f"{versions}, {'with' if of_tvm.has_cuda() else 'without'} CUDA"

    def option(self, name: str) -> Option:
        if name in of_tvm.REMOVED:
            raise BackendKwargsError(f"TVM option {name!r} {of_tvm.REMOVED[name]}.")
        return super().option(name)

    def checked(self, option: Option, value: object, coerce: Check) -> object:
        # A list of names is as good as a tuple.
        return super().checked(option, tuple(value) if isinstance(value, list) else value, coerce)

    def verify(self, templates: Sequence[str], options: Options, tell: Callable[[Limit], None]) -> None:
        if reason := of_tvm.unfit():
            raise CannotWorkError(Limit(f"Backend {self.name!r}", reason, of_tvm.INSTALL))
        of_tvm.verify(options, tell)

    def part_compiler(self, options: Options) -> "PartCompiler":
        of_tvm.import_tvm()
        import torch

        from backend_kwargs.backends.tvm.part_compiler import TVM

        settings = of_tvm.TVMOptions.of(options)
        if settings.freeze and torch.is_grad_enabled():
            warn_once("Option 'freeze' is inert while gradients are recorded: call the model under torch.no_grad().")
        return TVM(settings)

"""TVM: options in, Relax in between, what its virtual machine runs out. TVM is imported when a graph arrives."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from backend_kwargs.compilers import Reading
from backend_kwargs.compilers.tvm.checks import checked
from backend_kwargs.compilers.tvm.settings import OPTIONS, RULES, Settings, tvm_option, verify
from backend_kwargs.compilers.tvm.versions import require_tvm, unfit
from backend_kwargs.errors import BackendKwargsError, shown, wrong_value
from backend_kwargs.layers import Layer, copied
from backend_kwargs.options import Option
from backend_kwargs.requirements import INSTALL_TVM, CannotWorkError, Limit, Requirement, impeded, inert, machine
from backend_kwargs.trust import Check


@dataclass(frozen=True, slots=True)
class TVMCompiler:
    """TVM under one of the names that a spec may spell it by."""

    name: str

    def dynamo_name(self, templates: Sequence[str]) -> str:
        return "tmpl-tvm"  # dynamo's own "tvm" is another

    def summary(self, templates: Sequence[str]) -> str:
        return "Apache TVM under options: Relax, its kernels tuned or not, eager where TVM cannot"

    def option(self, name: str) -> Option:
        return tvm_option(name)

    def options(self) -> Mapping[str, Option]:
        return OPTIONS

    def template(self, name: str) -> Layer:
        raise BackendKwargsError(f"Backend {self.name!r} has no templates, got {shown(name)}.")

    def read(self, source: str, given: Mapping[str, Any], check: Check) -> Reading:
        given = dict(given)
        if "template" in given:
            self.template(given["template"])
        mapping = given.pop("options", None) or {}
        if not isinstance(mapping, Mapping):
            raise wrong_value("'options'", "a mapping of options", mapping)
        known = [(self.option(name), value) for name, value in {**mapping, **given}.items()]
        return Reading((), (Layer(source, {o.name: copied(checked(o, value, check)) for o, value in known}),))

    def verify(self, templates: Sequence[str], options: Mapping[str, Any], tell: Callable[[Limit], None]) -> None:
        if reason := unfit():
            raise CannotWorkError(Limit(f"Backend {self.name!r}", reason, INSTALL_TVM))
        verify(options, tell)

    def inert(self, options: Mapping[str, Any]) -> Mapping[str, str]:
        return inert(options, _default, machine(), RULES)

    def impeded(self, options: Mapping[str, Any]) -> Mapping[str, Requirement]:
        return impeded(options, _default, machine(), RULES)

    def compile(
        self, gm: Any, example_inputs: Sequence[Any], options: Mapping[str, Any], name: str | None
    ) -> Callable[..., Any]:
        require_tvm()
        from backend_kwargs.compilers.tvm.capture import compile_graph

        return compile_graph(gm, example_inputs, Settings.of(options))

    def config(self, options: Mapping[str, Any]) -> dict[str, Any]:
        return {name: options.get(name, option.default) for name, option in OPTIONS.items()}

    def reset(self, options: Mapping[str, Any]) -> None:
        pass


def _default(name: str) -> Any:
    return OPTIONS[name].default

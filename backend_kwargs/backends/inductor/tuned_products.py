"""Which products max_autotune tunes: Inductor's choices of kernels, with the library's alone for all other products."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from backend_kwargs.backends import CompileInner
from backend_kwargs.facts import Call
from backend_kwargs.options.layers import Options
from backend_kwargs.torch_internals.autotuning import ExternKernelChoice, InductorChoices, choices_replaced


def product_name(m: object, n: object, k: object) -> str:
    """Return the name of a product of m rows, n columns and k summands: of one matrix, if there is a batch."""
    return f"{m}x{n}x{k}"


class TunedProducts(InductorChoices):
    """Inductor's choices for graphs in which only the products called `names`, as "MxNxK", are tuned.

    Grouped products and FlexAttention are tuned in any case: Inductor asks nobody about these.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = frozenset(names)

    def uuid(self) -> str:
        """Return the choices' part of Inductor's cache key."""
        return " ".join(("backend_kwargs.tuned_products", *sorted(self.names)))

    def get_template_configs(
        self, kernel_inputs: Any, templates: Sequence[Any], op_name: str, *args: Any, **kwargs: Any
    ) -> Any:
        """Return the kernels to choose from for one product."""
        library = [each for each in templates if isinstance(each, ExternKernelChoice)]
        if library and product_name(*kernel_inputs.mnk_hinted()) not in self.names:
            templates = library
        return super().get_template_configs(kernel_inputs, list(templates), op_name, *args, **kwargs)

    def get_conv_configs(self, *args: Any, **kwargs: Any) -> Any:
        """Return the function that returns the configurations of a convolution's kernel."""
        configs = super().get_conv_configs(*args, **kwargs)

        def of_tuned(m: object, n: object, k: object, **given: object) -> Any:
            return configs(m, n, k, **given) if product_name(m, n, k) in self.names else iter(())

        return of_tuned


@dataclass(frozen=True, slots=True)
class _Made:
    """Makes the choices: a value of Inductor's option, by which its caches tell graphs apart."""

    names: tuple[str, ...]

    def __call__(self) -> TunedProducts:
        return TunedProducts(self.names)


def with_tuned(patches: Options, names: Sequence[str]) -> dict[str, Any]:
    """Return Inductor's options under which only the products `names` are tuned, with `tuning_only`."""
    return {**patches, "inductor_choices_class": _Made(tuple(sorted(names)))}


def tuning_only(inner_compile: CompileInner, names: Sequence[str]) -> CompileInner:
    """Return `inner_compile`, which tunes only the products `names`."""

    def compile_one(*args: object, **kwargs: object) -> Call:
        with choices_replaced(TunedProducts(names)):
            return inner_compile(*args, **kwargs)

    return compile_one

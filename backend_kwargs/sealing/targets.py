"""What can be sealed: a function or module that torch.compile returned, one after `compile()`, or a CompiledModule."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from backend_kwargs.bundles.module import CompiledModule
from backend_kwargs.bundles.running import without_gradients
from backend_kwargs.bundles.samples import Sample, samples_of, zeros_of
from backend_kwargs.errors import BackendKwargsError, error_text, wrong_value
from backend_kwargs.facts import Call
from backend_kwargs.sealing.declared import UndeclaredError
from backend_kwargs.torch_internals import pytree, sealing

COMPILED = "what torch.compile returned, a module after .compile(), or a CompiledModule"
Missed = Callable[[str], None]


@dataclass(frozen=True)
class Target:
    """A compiled callable, and the ways to call it.

    `compiling` is the user's, `eager` the same without dynamo. `serving` returns a call that compiles nothing and tells
    of each frame that ran in eager; `look` says why no code fits some arguments, "" if some does, and
    None where there was no frame to look at.
    """

    name: str
    signature: inspect.Signature
    compiling: Call
    eager: Call
    serving: Callable[[Missed], Call]
    look: Callable[..., str | None]
    module: torch.nn.Module | None

    def named_leaves(self, sample: Sample) -> dict[str, Any]:
        """Return the arguments of a call by name, those in dicts, lists and tuples as "x.key" and "x.0"."""
        return {
            ".".join([name, *map(_key, path)]): leaf
            for name, slot in self._slots(sample)
            for path, leaf in pytree.tree_flatten_with_path(_at(sample, slot))[0]
        }

    def with_leaves(self, sample: Sample, changed: Mapping[str, Any]) -> Sample:
        """Return the arguments of a call with some of its leaves replaced; keywords stay keywords.

        Of a function that takes `**kwargs`, as torch's own modules do when they are compiled, they are another call.
        """
        args, kwargs = list(sample.args), dict(sample.kwargs)
        for name, slot in self._slots(sample):
            paths, spec = pytree.tree_flatten_with_path(_at(sample, slot))
            leaves = [changed.get(".".join([name, *map(_key, path)]), leaf) for path, leaf in paths]
            of: Any = args if isinstance(slot, int) else kwargs
            of[slot] = pytree.tree_unflatten(leaves, spec)
        return Sample(tuple(args), kwargs)

    def _slots(self, sample: Sample) -> list[tuple[str, int | str]]:
        """Return the name and the position or keyword of each argument of a call, in the signature's order."""
        try:
            bound = self.signature.bind(*range(len(sample.args)), **{name: name for name in sample.kwargs})
        except TypeError as error:
            raise BackendKwargsError(f"The example inputs do not fit {self.name!r}: {error}.") from None
        return [
            (".".join([name, *map(_key, path)]), slot)
            for name, slots in bound.arguments.items()
            for path, slot in pytree.tree_flatten_with_path(slots)[0]
        ]


def _at(sample: Sample, slot: int | str) -> Any:
    return sample.args[slot] if isinstance(slot, int) else sample.kwargs[slot]


def _key(key: Any) -> str:
    """Return a part of a path in a tree as text."""
    return str(next(getattr(key, name) for name in ("idx", "key", "name") if hasattr(key, name)))


def target_of(compiled: object) -> Target:
    """Return how to call a compiled callable; raise if it is none that can be sealed."""
    if isinstance(compiled, CompiledModule):
        return _bundle(compiled)
    parts = sealing.wrapped(compiled)
    if parts is None:
        raise wrong_value("seal's `compiled`", COMPILED, compiled)
    if sealing.has_own_hooks(compiled):
        raise BackendKwargsError(
            "seal would leave out the hooks of what torch.compile returned: register them on the module itself."
        )
    module = sealing.module_of(compiled)
    eager = sealing.uncompiled(compiled, parts)
    return Target(
        name=type(module).__name__ if module is not None else getattr(parts.function, "__name__", "function"),
        signature=inspect.signature(module.forward if module is not None else parts.function),
        compiling=compiled,  # type: ignore[arg-type]
        eager=sealing.in_eager(eager),
        serving=partial(sealing.without_compiling, parts),
        look=sealing.looking(parts),
        module=module,
    )


def _bundle(compiled: CompiledModule) -> Target:
    """Return how to call a module of a bundle: its own check comes first, where it is deployed."""
    own: Any = compiled.serving()
    parts = sealing.wrapped(own.call.func)
    assert parts is not None

    def serving(missed: Missed) -> Call:
        run = without_gradients(partial(sealing.without_compiling(parts, missed), *own.call.args))

        def checked(*args: object, **kwargs: object) -> Any:
            try:
                own.check(args, kwargs)
            except BackendKwargsError as error:
                raise UndeclaredError(str(error).rstrip(".")) from None
            return run(*args, **kwargs)

        return checked if own.check is not None else run

    return Target(
        name=type(own.module).__name__,
        signature=inspect.signature(own.module.forward),
        compiling=compiled,
        eager=sealing.in_eager(own.eager),
        serving=serving,
        look=without_gradients(partial(sealing.looking(parts), *own.call.args)),
        module=own.module,
    )


def example_of(compiled: object, example_inputs: object) -> Sample:
    """Return the arguments of the example call: the given ones, or the first sample of a CompiledModule as zeros."""
    if example_inputs is not None:
        return samples_of([example_inputs])[0]
    if not isinstance(compiled, CompiledModule):
        raise BackendKwargsError(
            "seal must have the arguments of one call: seal(compiled, example_inputs, ...), a tensor, a tuple of "
            "arguments, a dict of keywords, or (args, kwargs)."
        )
    own = compiled.serving()
    device = compiled.device
    assert device  # one that is built has it
    try:
        args, kwargs = zeros_of(own.samples[0], device)
    except Exception as error:
        raise BackendKwargsError(
            f"The bundle's sample cannot be made: {error_text(error)}. Pass example_inputs."
        ) from error
    return Sample(tuple(args), dict(kwargs))

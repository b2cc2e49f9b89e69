"""The targets of dynamo's entry points: one attribute per backend and template, made when it is requested."""

from backend_kwargs.backend import Backend
from backend_kwargs.backends.others import COMPILERS, is_former, removed
from backend_kwargs.options.templates import BUILT_IN
from backend_kwargs.registry import PLAIN, make_backend

SPECS = {spec.replace("-", "_"): spec for spec in (PLAIN, *(compiler.registered for compiler in COMPILERS))}
SPECS |= {name: f"{PLAIN}:{name}" for name in BUILT_IN}


def __getattr__(name: str) -> Backend:
    if is_former(former := name.replace("_", "-")):
        raise removed(former)
    if name not in SPECS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Not registered here: dynamo registers the result of its lookup, and asserts that the name is new.
    return make_backend(SPECS[name])

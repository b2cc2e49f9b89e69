"""dynamo's own backends, as its sources declare them."""

from importlib.metadata import entry_points
from inspect import getdoc

from torch._dynamo.backends.registry import _COMPILER_FNS

from backend_kwargs.torch_internals import dynamo
from backend_kwargs.torch_internals.backend_sources import own_backends

OTHERS = {"dynamo_minifier_backend", "dynamo_accuracy_minifier_backend"}  # torch debugs itself with these


def test_the_sources_declare_what_dynamo_registers():
    """Names and first lines are those of the loaded registry, without other packages' backends."""
    dynamo.list_backends()
    plugins = {each.name for each in entry_points(group="torch_dynamo_backends")}
    known = {name: fn for name, fn in _COMPILER_FNS.items() if name not in OTHERS | plugins}
    own = {name: fn for name, fn in known.items() if str(fn.__module__).startswith("torch.")}
    docs = {name: (getdoc(fn) or "") if hasattr(fn, "__qualname__") else "" for name, fn in own.items()}
    assert own_backends() == {name: doc.partition("\n")[0] for name, doc in docs.items()}

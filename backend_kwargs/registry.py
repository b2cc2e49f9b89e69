"""Backends and templates by name: make, register and list them."""

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Unpack, overload

from backend_kwargs.auto.settings import check_keys
from backend_kwargs.backend import OURS, Backend, CompilerFn, backend_of_function, find_backend, find_in_dynamo
from backend_kwargs.backends.others import FORMER
from backend_kwargs.errors import BackendKwargsError, wrong_value
from backend_kwargs.facts.decision import EAGER
from backend_kwargs.files import check_plain
from backend_kwargs.options import Check, Options, check, check_name, consent, convert, untrusted, with_users
from backend_kwargs.options.inductor_names import InductorKeywords, InductorOptions
from backend_kwargs.options.templates import (
    Template,
    add_templates,
    derive,
    find_template,
    is_published,
    read_templates,
    template_names,
)
from backend_kwargs.pipeline import OWN

PLAIN = "tmpl-inductor"  # the only spec to which the environment variables apply
TEMPLATE_VARIABLE = "BACKEND_KWARGS_TEMPLATE"
OPTIONS_VARIABLE = "BACKEND_KWARGS_OPTIONS"

_interned: dict[str, Backend] = {}


@overload  # for editors, which complete Inductor's names; any other backend's keywords fit the second
def make_backend(
    spec: str, options: InductorOptions | None = None, /, **kwargs: Unpack[InductorKeywords]
) -> Backend: ...


@overload
def make_backend(spec: str | CompilerFn, options: Options | None = None, /, **kwargs: object) -> Backend: ...


def make_backend(
    spec: str | CompilerFn, options: InductorOptions | Options | None = None, /, **kwargs: object
) -> Backend:
    """Return the backend that `spec` names, with `options` and `kwargs` bound to it and checked at once.

    Args:
        spec: "backend", "backend:template+template", "dynamo:NAME", "package.module:function", a function
            `(gm, example_inputs, **kwargs)`, or a Backend to bind more options to.
        options: options by name, for names that are not Python identifiers, such as "triton.cudagraphs".
        kwargs: options by name; they override `options`. For Inductor also `template`, `mode` and `inductor_config`.

    Raises:
        BackendKwargsError: if a name, a type or a value is wrong, or with `strict=True` a template has no effect here.

    """
    if options is not None and not isinstance(options, Mapping):
        raise wrong_value("make_backend's `options`", "a mapping", options)
    base = find_backend(spec) if isinstance(spec, str) else backend_of_function(spec)
    if spec == PLAIN:
        base = _with_environment(base)
    backend = base.bind("make_backend", {**(options or {}), **kwargs})
    backend.verify(tell=lambda message: None)
    if backend.takes_inductor_options:
        check_keys(backend.options)
        if lock := backend.options.get("lock"):
            from backend_kwargs.auto.lock import read_lock

            read_lock(lock)
    return backend if options or kwargs or not isinstance(spec, str) else _intern(spec, backend)


def decided(winner: str, options: Options, fixed: Options, compiler: str = "") -> Backend:
    """Return the backend that compiles as `auto` decided: the winner's options, with the user's own on top.

    A `compiler` other than Inductor gets only its own options.

    Raises:
        BackendKwargsError: if eager won, or a value of the user's was not stored.

    """
    if winner == EAGER:
        raise BackendKwargsError("Eager won here, so there are no options to compile under.")
    if compiler:
        return find_backend(compiler).bind("decision", options)
    if lost := [name for name, value in fixed.items() if value is None and name != "clone_outputs"]:
        raise BackendKwargsError(f"The value of option {lost[0]!r} was not kept with the decision; set it yourself.")
    return find_backend(PLAIN).bind("decision", with_users(options, fixed))


def register_backend(name: str, compiler_fn: CompilerFn) -> Backend:
    """Make `torch.compile(..., backend=name)` call `compiler_fn` with options bound by its signature, and checked.

    `compiler_fn` takes `(gm, example_inputs, **kwargs)`, or is a Backend. Registering the same one again is allowed.
    """
    check_name("A backend", name)
    backend = compiler_fn if isinstance(compiler_fn, Backend) else backend_of_function(compiler_fn, name)
    if name in OURS or not _publish(name, backend):
        raise BackendKwargsError(f"Backend {name!r} exists and is another; choose another name.")
    return find_backend(name)


def register_template(name: str, options: Options | None = None, *, base: str | None = None, summary: str = "") -> None:
    """Define the template "tmpl-inductor:NAME" as the template `base` ("a" or "a+b") with `options` merged on top."""
    if options is not None and not isinstance(options, Mapping):
        raise wrong_value("A template's `options`", "a mapping", options)
    _register({name: derive(base, options or {}, summary)}, check)


def load_templates(path: str | Path, *, trust: bool = False) -> list[str]:
    """Register each template of a TOML file, all or none; return their names.

    An option that is code, such as a compiler's path or a function to import, raises unless you pass `trust=True`.
    """
    templates = read_templates(path, OWN)
    _register(templates, convert if consent(trust) else untrusted(convert))
    return list(templates)


def list_backends() -> list[str]:
    """Return every name that `make_backend` takes: this package's, registered, and dynamo's with entry points."""
    from backend_kwargs.torch_internals import dynamo as registry

    return sorted({*OURS, *registry.list_backends()} - {f"tmpl-{name}" for name in FORMER})


def list_templates() -> list[str]:
    """Return the names of every template: built in, registered, or offered by an installed package."""
    return template_names()


def get_template(name: str) -> Template:
    """Return the template called `name`: its summary, options, costs and needs."""
    return find_template(name)


def _with_environment(backend: Backend) -> Backend:
    """Return `backend` with the values of the two environment variables, converted to each option's type."""
    template, text = os.environ.get(TEMPLATE_VARIABLE), os.environ.get(OPTIONS_VARIABLE)
    try:
        options = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        options = text
    if not isinstance(options, dict):
        raise wrong_value(f"The environment variable {OPTIONS_VARIABLE}", "a JSON object", options)
    check_plain(f"The environment variable {OPTIONS_VARIABLE}", options)
    values = {**options, **({"template": template} if template else {})}
    return backend.bind("environment", values, convert)


def _intern(spec: str, backend: Backend) -> Backend:
    # dynamo guards on the backend with `==`: an equal one that is another object costs two comparisons in each call.
    if _interned.setdefault(spec, backend) != backend:  # the environment has changed
        _interned[spec] = backend
    return _interned[spec]


def _register(templates: Mapping[str, Template], coerce: Check) -> None:
    plain = find_backend(PLAIN)
    checked = {n: replace(t, options=plain.bind("template", t.options, coerce).options) for n, t in templates.items()}
    for name in checked:
        if not is_published(name) and find_in_dynamo(f"{PLAIN}:{name}"):
            raise BackendKwargsError(f"Backend '{PLAIN}:{name}' exists and is another; choose another name.")
    add_templates(checked)
    for name in checked:
        spec = f"{PLAIN}:{name}"
        _publish(spec, _intern(spec, find_backend(spec)))


def _publish(name: str, backend: Backend) -> bool:
    """Register `backend` with dynamo; return whether `name` now refers to it."""
    known = find_in_dynamo(name)
    if known is None:  # register_backend() asserts that no backend has the name
        from backend_kwargs.torch_internals.dynamo import register_backend

        register_backend(backend, name=name)
    return known is None or known == backend

"""Arguments that several commands share, and the conversion of their text to values."""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Annotated, Literal

import typer

from backend_kwargs.backend import Backend, find_backend
from backend_kwargs.errors import BackendKwargsError, BrokenPluginError, warn_once
from backend_kwargs.explain import Verdict, verdict
from backend_kwargs.harness.models import LIBRARIES, check_factory, spec_of
from backend_kwargs.options import DYNAMO_BACKENDS, CannotWorkError, convert, limits, split_assignment
from backend_kwargs.options.catalogue import inductor_options
from backend_kwargs.registry import make_backend


def checked_model(model: str | None) -> str | None:
    """Return a model's name; raise if it names a file or function that does not exist, before torch is imported."""
    if model and model.partition(":")[0] not in LIBRARIES:
        check_factory(model)
    return model


_MODEL = typer.Argument(
    callback=checked_model,
    metavar="MODEL",
    help="timm:NAME, transformers:CLASS?option=value, or FILE_OR_MODULE:FACTORY that returns (model, example_inputs).",
)
Model = Annotated[str, _MODEL]
MaybeModel = Annotated[str | None, _MODEL]
Assignments = Annotated[
    list[str] | None,
    typer.Option("--option", metavar="NAME=VALUE", help="An option; may be given several times."),
]
As = Annotated[
    Literal["inductor-config", "aoti-config"] | None,
    typer.Option(
        "--as", help="Print the options as JSON for code that calls Inductor, such as vLLM, or for AOTInductor alone."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def given_to(context: typer.Context) -> Iterator[str]:
    """Yield the names of the parameters that the command line gives."""
    for name in context.params:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            yield name


def assigned(assignments: Iterable[str] | None) -> dict[str, str]:
    """Parse `NAME=VALUE` texts."""
    return dict(map(split_assignment, assignments or ()))


def backend_from_text(spec: str, options: dict[str, str]) -> Backend:
    """Make a backend from options given as text; `spec` may also be "file.py:function"."""
    return make_backend(spec_of(spec)).bind("command line", options, convert)


@contextmanager
def options_alone() -> Iterator[None]:
    """Let a command that compiles nothing read Inductor's options without dynamo: three seconds sooner."""
    from backend_kwargs.torch_internals.inductor_config import config_alone

    with config_alone() as alone:
        inductor_options()
    try:
        yield
    finally:
        if alone:  # their types name classes that are loaded again
            inductor_options.cache_clear()


def judged_by_name(name: str) -> Verdict:
    """Return the verdict on a backend of dynamo's by what is known of its name: it is not loaded."""
    lacking = limits(name, DYNAMO_BACKENDS.get(name, ()))
    return Verdict("cannot", lacking[0].reason, lacking[0].remedy) if lacking else Verdict("works")


def judged(spec: str, **options: object) -> tuple[Verdict, str]:
    """Return the verdict on `spec` on this machine, and its summary; a broken plug-in must not hide the others."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a package's own, when its backend is imported
            backend = find_backend(spec).bind("judged", options)
        return verdict(backend), backend.summary
    except CannotWorkError as error:
        (limit,) = error.args
        return Verdict("cannot", limit.reason, limit.remedy), ""
    except BackendKwargsError as error:
        if isinstance(error, BrokenPluginError):
            warn_once(error)
        return Verdict("cannot", str(error)), ""

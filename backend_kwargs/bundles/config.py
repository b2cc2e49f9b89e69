"""The configuration of a CompiledModule: a value, checked when it is made, written as JSON and read back equal."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from backend_kwargs.backend import OURS, Backend, find_backend
from backend_kwargs.errors import BackendKwargsError, removed, shown, wrong_value
from backend_kwargs.files import check_plain, read_json, write_whole
from backend_kwargs.keys import digest
from backend_kwargs.options import Options, Tolerance, check, consent, copied, declared, lookup, same
from backend_kwargs.registry import PLAIN, make_backend

CONFIG_VERSION = 1
KIND = "CompileConfig field"
DTYPES = ("autocast_dtype", "output_dtype")
INSTEAD = {
    "mode": "set the field `mode`",
    "template": "name it in `backend`, as 'tmpl-inductor:NAME'",
    "options": "set each option by its name",
    "inductor_config": "set each option by its name",
}
# Fields of earlier releases, with what to write instead.
REMOVED = {
    "kind": "leave it out; torch's own aoti_compile_and_package makes ahead-of-time packages with "
    "inductor_configs=bk.make_backend(...).inductor_config(ahead_of_time=True)"
}


@dataclass(frozen=True, eq=False)
class CompileConfig:
    """What to compile a module with; immutable, compares by value.

    Has the fields of AITune's TorchInductorBackendConfig, with their names. `mode` and `options` can be combined: an
    option overrides the mode's.

    Raises:
        BackendKwargsError: at construction, for a wrong field, option, mode or backend.

    """

    backend: Annotated[Any, "the backend: a spec for make_backend, or a Backend"] = "tmpl-inductor"
    options: Annotated[dict[str, Any] | None, "options of the backend"] = None
    mode: Annotated[str | None, "a mode of torch.compile"] = None
    fullgraph: Annotated[bool, "raise if the module is not one graph"] = False
    dynamic: Annotated[bool | None, "dynamic shapes; None: if the samples' shapes differ"] = None
    autocast_enabled: Annotated[bool, "run the module under torch.autocast"] = False
    autocast_dtype: Annotated[Any, "autocast's dtype; None: torch's default for the device"] = None
    output_dtype: Annotated[Any, "dtype of floating outputs; None: under autocast, the module's without autocast"] = (
        None
    )
    check_numbers: Annotated[Literal["raise", "warn", "off"], "the action if results are wrong after a build"] = "raise"
    unmatched: Annotated[
        Literal["raise", "eager"], "the action for inputs that compiled code was not built for: an error, or eager"
    ] = "raise"
    tolerance: Annotated[Tolerance | None, "absolute and relative tolerance; None: 1e-3"] = None
    resolved: Backend = field(init=False, repr=False)

    def __new__(cls, *_: object, **fields: object) -> "CompileConfig":
        """Raise if a field is unknown, with the nearest name: a dataclass alone raises a TypeError."""
        for name in fields:
            if name in REMOVED:
                raise removed(f"{KIND} {name!r}", REMOVED[name])
            lookup(name, FIELDS, KIND)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name, option in FIELDS.items():
            field_value = getattr(self, name)
            what = f"{KIND} {name!r}"
            value = floating_dtype(what, field_value) if name in DTYPES else check(option, field_value, KIND)
            object.__setattr__(self, name, copied(value))
        for name in self.options or {}:
            if name in INSTEAD:
                raise BackendKwargsError(f"CompileConfig's options must not hold {name!r}: {INSTEAD[name]}.")
        if callable(self.backend) and not isinstance(self.backend, Backend):
            object.__setattr__(self, "backend", make_backend(self.backend))
        mode = {} if self.mode is None else {"mode": self.mode}
        object.__setattr__(self, "resolved", make_backend(self.backend, {**(self.options or {}), **mode}))

    def describe(self) -> str:
        """Return the fields that are not the default, as `name=value,name=value`."""
        values = {name: getattr(self, name) for name in FIELDS}
        return ",".join(f"{name}={v!r}" for name, v in values.items() if not same(v, FIELDS[name].default))

    def key(self) -> str:
        """Return the class's name and a hash of all fields, which does not depend on the order of options."""
        return f"{type(self).__name__}_{digest(self.to_dict(), 32, sort_keys=True)}"

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as JSON values, dtypes by name; raise if JSON cannot represent an option."""
        written = {name: getattr(self, name) for name in FIELDS}
        written |= {name: written[name] and str(written[name]).removeprefix("torch.") for name in DTYPES}
        written["backend"] = self.backend if isinstance(self.backend, str) else self.backend.to_config()
        written["options"] = (
            None if self.options is None else self._bare().bind("config", self.options).to_config()["options"]
        )
        return {"version": CONFIG_VERSION, **written}

    def _bare(self) -> Backend:
        """Return the backend without its templates, so that options which a template sets are written too."""
        spec = self.backend if isinstance(self.backend, str) else self.backend.spec
        head = spec.partition(":")[0]
        return find_backend(head if head in OURS else spec)

    @classmethod
    def from_dict(cls, data: Options, *, trust: bool = False) -> "CompileConfig":
        """Make a config from the data of `to_dict`, or from the fields of AITune's TorchInductorBackendConfig.

        A backend or an option that is code raises unless you pass `trust=True`.
        """
        if not isinstance(data, Mapping):
            raise wrong_value("A compile config", "a mapping", data)
        check_plain("A compile config", data)
        fields = dict(data)
        version = fields.pop("version", CONFIG_VERSION)
        if type(version) is not int or version not in range(1, CONFIG_VERSION + 1):
            raise BackendKwargsError(
                f"Compile config version {shown(version)} is not 1 to {CONFIG_VERSION}; update backend-kwargs."
            )
        if fields.get("kind") == "inductor":  # as earlier releases wrote it
            del fields["kind"]
        elif "kind" in fields:
            raise removed(f"{KIND} 'kind'", REMOVED["kind"])
        known = {lookup(name, FIELDS, KIND).name: value for name, value in fields.items()}
        backend, options = known.get("backend", PLAIN), known.get("options")
        if isinstance(backend, Mapping):
            known["backend"] = Backend.from_config(backend, trust=trust)
        elif isinstance(backend, str):
            find_backend(backend, trust=consent(trust))
        if isinstance(options, Mapping):
            # As Backend.from_config reads them: a list becomes a tuple, and code is read only if it is trusted.
            read = cls(backend=known.get("backend", PLAIN))._bare()
            bound = Backend.from_config({"backend": read.spec, "options": options}, trust=trust)
            known["options"] = {name: bound.options[name.replace("-", "_")] for name in options}
        return cls(**known)

    def to_json(self, path: str | Path) -> None:
        """Write `to_dict()` to a file atomically."""
        write_whole(Path(path), json.dumps(self.to_dict(), indent=2) + "\n")

    @classmethod
    def from_json(cls, path: str | Path, *, trust: bool = False) -> "CompileConfig":
        """Make a config from a file written by `to_json`; `trust` as in `from_dict`."""
        return cls.from_dict(read_json(path, "a compile config"), trust=trust)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CompileConfig):
            return NotImplemented
        return all(same(getattr(self, name), getattr(other, name)) for name in FIELDS)

    def __hash__(self) -> int:
        return hash((self.resolved, self.fullgraph, self.dynamic))


# Read from the class itself, so that each field is declared once; `resolved` is derived from the others.
FIELDS = declared(CompileConfig)


def floating_dtype(what: str, value: object) -> Any:
    """Return a floating dtype of torch that is given, or named, None for None; raise for anything else."""
    import torch

    dtype = getattr(torch, value.removeprefix("torch."), None) if isinstance(value, str) else value
    if value is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise wrong_value(what, "a floating torch.dtype, or the name of one", value)
    return dtype

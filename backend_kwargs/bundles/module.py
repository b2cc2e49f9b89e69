"""CompiledModule: a module that is built, activated, saved, loaded elsewhere, and served; with states as in AITune."""

import gc
import threading
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from backend_kwargs.bundles.config import CompileConfig
from backend_kwargs.errors import BackendKwargsError, printable, removed, wrong_value

if TYPE_CHECKING:
    import torch
    from torch.types import Device

    from backend_kwargs.bundles.running import Built, Running

Call = Literal["build", "activate", "deactivate", "deploy", "infer", "save"]


class State(Enum):
    """A state of a CompiledModule."""

    INIT = "init"
    ACTIVE = "active"
    INACTIVE = "inactive"
    CHECKPOINT_LOADED = "checkpoint_loaded"
    DEPLOYED = "deployed"


class StateError(BackendKwargsError, RuntimeError):
    """A call that is not allowed in the CompiledModule's state."""


ONCE = "Cannot build {name} again: make another CompiledModule."
UNBUILT = "Cannot {call} {name} before it is built: call build() or load() first."
ONLY_LOADED = "Cannot deploy {name} in state {state!r}: save it, load the bundle, and deploy what load() returns."
INIT, ACTIVE, INACTIVE, LOADED, DEPLOYED = State

# The next state of each call in each state (the same state: the call has no effect on it), or the error that it raises.
TABLE: Mapping[Call, Mapping[State, State | str]] = MappingProxyType(
    {
        "build": {INIT: ACTIVE, ACTIVE: ONCE, INACTIVE: ONCE, LOADED: ONCE, DEPLOYED: ONCE},
        "activate": {
            INIT: UNBUILT,
            ACTIVE: ACTIVE,
            INACTIVE: ACTIVE,
            LOADED: ACTIVE,
            DEPLOYED: "Cannot activate {name}: it is deployed, and ready as it is.",
        },
        "deactivate": {
            INIT: UNBUILT,
            ACTIVE: INACTIVE,
            INACTIVE: INACTIVE,
            LOADED: "Cannot deactivate {name}: it was loaded and not yet activated.",
            DEPLOYED: "Cannot deactivate {name}: it is deployed, for good.",
        },
        "deploy": {
            INIT: ONLY_LOADED,
            ACTIVE: ONLY_LOADED,
            INACTIVE: ONLY_LOADED,
            LOADED: DEPLOYED,
            DEPLOYED: ONLY_LOADED,
        },
        "infer": {
            INIT: UNBUILT,
            ACTIVE: ACTIVE,
            INACTIVE: "Cannot run {name}: it is inactive; call activate() first.",
            LOADED: "Cannot run {name}: it is loaded; call activate() or deploy() first.",
            DEPLOYED: DEPLOYED,
        },
        "save": {INIT: UNBUILT, ACTIVE: ACTIVE, INACTIVE: INACTIVE, LOADED: LOADED, DEPLOYED: DEPLOYED},
    }
)


GUARDED = (
    "call deploy(), which traces the module; a function of one graph that must not be traced is for torch's own "
    "torch.compile(..., fullgraph=True).aot_compile()"
)


class CompiledModule:
    """A module compiled with a CompileConfig, through the states built, active, inactive, saved, loaded, deployed.

    TABLE lists the calls allowed in each state, as in AITune. For inference: calls record no
    gradient. Any number of threads may call it at once.

    Attributes:
        config: the configuration.

    """

    def __init__(self, config: CompileConfig | None = None) -> None:
        if config is not None and not isinstance(config, CompileConfig):
            raise wrong_value("CompiledModule's `config`", "a CompileConfig", config)
        self.config = config or CompileConfig()
        self._state = State.INIT
        self._built: Built | None = None
        self._running: Running | None = None
        self._notes: list[str] = []
        self._lock = threading.RLock()
        self._call: Callable[..., Any] = self._not_ready

    @property
    def name(self) -> str:
        """The name used in errors."""
        return type(self).__name__

    @property
    def state(self) -> State:
        """The current state."""
        return self._state

    @property
    def is_active(self) -> bool:
        """Whether the state is ACTIVE; a deployed module is ready too."""
        return self._state is State.ACTIVE

    @property
    def device(self) -> "torch.device | None":
        """The device that it runs on, None before it is built."""
        return self._built.device if self._built else None

    def build(
        self,
        module: "torch.nn.Module",
        data: list[Any],
        device: "Device" = None,
        cache_dir: str | Path | None = None,
    ) -> "CompiledModule":
        """Compile `module` for the samples in `data` and return this object, active.

        A copy of the module is compiled and called once for each sample, and its results are compared with those of
        float64, else float32. The module itself, the samples and torch's random generators do not change. If it raises,
        nothing has changed, and it may be called again.

        Args:
            module: the module, on the device where it will run.
            data: samples: each a tensor, a tuple of arguments, a dict of keywords, or a pair (args, kwargs).
            device: where the module must be; None: where it is.
            cache_dir: None; earlier releases wrote ahead-of-time packages there.

        """
        with self._lock:
            state = self._after("build")
            if cache_dir is not None:
                raise removed("build's `cache_dir`", "leave it out; only ahead-of-time packages were written there")
            from backend_kwargs.bundles.running import build

            self._built, running = build(self.config, module, data, device)
            self._ready(state, running)
        return self

    def activate(self) -> None:
        """Make the module ready for inference; code that was compiled before is not compiled again."""
        with self._lock:
            state = self._after("activate")
            if self._state is not state:
                from backend_kwargs.bundles.running import running

                built = self._known()
                self._ready(state, running(built, built.module, keep=True))

    def deactivate(self) -> None:
        """Free this module's compiled code and its memory; activate() brings it back."""
        with self._lock:
            state = self._after("deactivate")
            if self._state is state:
                return
            running, self._running = self._running, None
            self._state, self._call = state, self._not_ready
            if running:
                running.free()
            del running
        gc.collect()  # compiled code consists of reference cycles

    def deploy(self, device: "Device" = None, *, guards: bool = True) -> None:
        """Make a loaded module ready to serve, for good, at the lowest cost per call.

        Inputs must be like the samples (dtype, shape, device and layout of each tensor), or BackendKwargsError is
        raised. Calls record no gradient, and the process's state (autocast, threads, ...) is not compared.

        Args:
            device: where it runs; None: the device that it was built for.
            guards: True; earlier releases served without dynamo's guards.

        """
        with self._lock:
            state = self._after("deploy")
            if not guards:
                raise removed("deploy(guards=False)", GUARDED)
            from backend_kwargs.bundles.running import deployed, device_of

            built = self._known()
            if device is not None:
                built.device = device_of(built.module, device)
            self._running, self._call = deployed(built)
            self._state = state

    def infer(self, *args: object, **kwargs: object) -> Any:
        """Return the module's output, without gradients."""
        return self._call(*args, **kwargs)

    __call__ = infer

    def serving(self) -> "tuple[Built, Running]":
        """Return what is called, and what runs it, for `seal`."""
        self._after("infer")
        assert self._running
        return self._known(), self._running

    def save(self, path: str | Path, *, signing_key: object = None) -> None:
        """Write a bundle: config, weights, samples' metadata, compiled code, and a manifest with each part's SHA-256.

        An old bundle at `path` stays intact until the new one is complete; a folder with anything else is not replaced.
        `signing_key` is an Ed25519 private key of the package cryptography, or the path of its PEM file.
        """
        with self._lock:
            self._after("save")
            from backend_kwargs.bundles.disk.contents import save

            save(self._known(), _path(path, "save"), signing_key)

    @classmethod
    def load(
        cls,
        path: str | Path,
        module: "torch.nn.Module",
        *,
        trust: bool = False,
        trusted_keys: Iterable[object] | None = (),
        device: "Device" = None,
    ) -> "CompiledModule":
        """Load a bundle's weights into `module`, and return a CompiledModule to activate() or deploy().

        A bundle's compiled code can run anything, so it is loaded only with `trust=True`, or if one of `trusted_keys`
        (Ed25519 public keys of the package cryptography, or paths of PEM files) signed the bundle. If there are keys
        and none of them signed it, this raises, also with `trust=True`. Otherwise, or if
        this machine differs from the one that built it, the module is compiled again; `describe()` gives the reason. If
        it raises, `module` is unchanged.
        """
        from backend_kwargs.bundles.disk.contents import load

        built, notes = load(_path(path, "load"), module, device, trust=trust, trusted_keys=trusted_keys)
        loaded = cls(built.config)
        loaded._built, loaded._state, loaded._notes = built, State.CHECKPOINT_LOADED, notes
        return loaded

    @staticmethod
    def to_dict(*_: object, **__: object) -> NoReturn:
        """Raise: it was removed, as `from_dict` was."""
        raise removed("to_dict() or from_dict()", "save(path) and load(path, module)")

    from_dict = to_dict

    def describe(self) -> str:
        """Return the config's changed fields, then facts about the code, one per line."""
        head = f"{self.name}({self.config.describe()})"
        if self._built is None:
            return f"{head}\nstate: {self._state.value}"
        from backend_kwargs.bundles.running import facts

        lines = [f"state: {self._state.value} on {self.device}", *facts(self._built, self._running), *self._notes]
        return "\n".join(map(printable, [head, *lines]))  # notes of a bundle may contain anything

    def key(self) -> str:
        """Return the class's name and the hash of the config."""
        return f"{self.name}_{self.config.key().rpartition('_')[2]}"

    def __repr__(self) -> str:
        return f"<{self.name}({self.config.describe()}) {self._state.value}>"

    def _after(self, call: Call) -> State:
        """Return the next state after `call`; raise StateError if it is not allowed in this one."""
        to = TABLE[call][self._state]
        if isinstance(to, str):
            raise StateError(to.format(call=call, name=self.name, state=self._state.value))
        return to

    def _known(self) -> "Built":
        assert self._built
        return self._built

    def _ready(self, state: State, running: "Running") -> None:
        """Call the compiled code from now on, without gradients."""
        from backend_kwargs.bundles.running import without_gradients

        self._running, self._call, self._state = running, without_gradients(running.call), state

    def _not_ready(self, *args: object, **kwargs: object) -> NoReturn:
        self._after("infer")
        raise AssertionError("a state that is ready has its own call")


def _path(path: object, call: str) -> Path:
    """Return the path of a bundle; raise if it is none."""
    if not isinstance(path, str | Path):
        raise wrong_value(f"{call}'s `path`", "the path of a folder", path)
    return Path(path)

"""accelerate and the Trainer of transformers: a plugin that accepts any backend."""

from typing import Any

from accelerate.utils import TorchDynamoPlugin as _TorchDynamoPlugin

from backend_kwargs.errors import BackendKwargsError
from backend_kwargs.registry import make_backend


class TorchDynamoPlugin(_TorchDynamoPlugin):  # type: ignore[misc]
    """accelerate's plugin for `Accelerator(dynamo_plugin=...)`, whose `backend` is what `make_backend` accepts.

    `plugin.backend` is the enum member that accelerate compares, `plugin.compiler_fn` the Backend.
    """

    backend: Any

    def __post_init__(self) -> None:
        self.compiler_fn = make_backend("tmpl-inductor" if self.backend is None else self.backend)
        self.backend = "inductor"
        super().__post_init__()
        mode = {} if self.mode == "default" else {"mode": self.mode}
        self.compiler_fn.bind("TorchDynamoPlugin", {**(self.options or {}), **mode})  # raises if one is wrong

    def to_kwargs(self) -> dict[str, Any]:
        """Return the keyword arguments of torch.compile."""
        return {**super().to_kwargs(), "backend": self.compiler_fn}

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as accelerate does, without the Backend."""
        fields: dict[str, Any] = super().to_dict()
        del fields["compiler_fn"]
        return fields


class TrainerMixin:
    """Adds `dynamo_plugin` to a Trainer: `class MyTrainer(TrainerMixin, Trainer)`, `MyTrainer(dynamo_plugin=...)`.

    Overrides a private method of Trainer, which accepts no plugin.
    """

    def __init__(self, *args: object, dynamo_plugin: TorchDynamoPlugin | None = None, **kwargs: object) -> None:
        self._dynamo_plugin = dynamo_plugin
        super().__init__(*args, **kwargs)

    def _build_accelerator_args(self, **kwargs: object) -> dict[str, Any]:
        args: dict[str, Any] = super()._build_accelerator_args(**kwargs)  # type: ignore[misc]
        if self._dynamo_plugin is None:
            return args
        if self.args.torch_compile:  # type: ignore[attr-defined]
            raise BackendKwargsError("`dynamo_plugin` and TrainingArguments(torch_compile=True) exclude each other.")
        return args | {"dynamo_plugin": self._dynamo_plugin}

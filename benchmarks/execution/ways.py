"""The ways in which a held-out model is compiled, and the calls that are timed of each."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Kept = Literal["plain", "cloned", "raw"]
AGAIN = "default again"
FULL_S = 120.0  # added to a compile under effort="full"
CLONE, RAW = "+clone", "+raw gradients"


@dataclass(frozen=True, slots=True)
class Way:
    """One way: a mode of torch.compile, or `auto` with these options; `replays` says that CUDA graphs hold its results.

    `limit_s` is the time for its first call; ways of the same `stage` compile at the same time.
    """

    name: str
    stage: int
    limit_s: float
    mode: str | None = None
    auto: Mapping[str, Any] | None = None
    replays: bool = False

    def compile(self, model: Callable[..., Any]) -> Callable[..., Any]:
        """Return the model as a user compiles it."""
        import torch

        if self.name == "eager":
            return model
        if self.auto is None:
            return torch.compile(model, mode=self.mode)
        from backend_kwargs import make_backend

        return torch.compile(model, backend=make_backend("tmpl-inductor:auto", dict(self.auto)))

    def calls(self, *, training: bool) -> dict[str, Kept]:
        """Return the calls that are timed, by name: with results of CUDA graphs cloned, or as they are."""
        if self.replays:
            raw: dict[str, Kept] = {f"{self.name}{RAW}": "raw"} if training else {}
            return {f"{self.name}{CLONE}": "cloned", **raw}
        return {self.name: "plain", **({AGAIN: "plain"} if self.name == "default" else {})}


# Modes whose first call no bar mentions are compiled at the same time as eager makes its reference.
ALL = (
    Way("eager", 0, 240.0),
    Way("reduce-overhead", 0, 240.0, mode="reduce-overhead", replays=True),
    Way("max-autotune", 0, 420.0, mode="max-autotune", replays=True),
    Way("default", 1, 240.0),
    Way("auto", 2, 300.0, auto={}),
    Way("auto-full", 3, 420.0, auto={"effort": "full", "budget_s": FULL_S}),
)
WAYS: Mapping[str, Way] = {way.name: way for way in ALL}
BASELINES = ("default", f"reduce-overhead{CLONE}", f"max-autotune{CLONE}")

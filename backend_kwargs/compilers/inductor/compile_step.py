"""The function that compiles a graph once options are final: Inductor's `compile_fx`, or a replacement set here."""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

# Called like compile_fx, with compile_fx itself as the first argument.
stand_in: ContextVar[Callable[..., Any] | None] = ContextVar("stand_in", default=None)

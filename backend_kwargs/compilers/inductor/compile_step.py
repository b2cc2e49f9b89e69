"""Who compiles a graph whose options are final: Inductor's `compile_fx`, or what stands in for it here."""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

# Called as compile_fx is, with compile_fx itself before its arguments.
stand_in: ContextVar[Callable[..., Any] | None] = ContextVar("stand_in", default=None)

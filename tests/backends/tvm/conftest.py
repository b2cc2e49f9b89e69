"""Tests that need apache-tvm: `pip install -e ".[tvm]"`. Without it each of them is skipped by name."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from backend_kwargs import make_backend
from backend_kwargs.backends import CapturedGraph
from backend_kwargs.backends.tvm.settings import unfit

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if reason := unfit():
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=f"no TVM: {reason}"))


@pytest.fixture(autouse=True)
def _seeded(fresh_dynamo: None) -> None:
    torch.manual_seed(0)


@dataclass
class Compiled:
    """A callable compiled under tmpl-tvm, with a summary of each of its graphs."""

    call: Callable[..., Any]
    summaries: list[Any] = field(default_factory=list)

    def __call__(self, *args: Any) -> Any:
        return self.call(*args)

    @property
    def graphs(self) -> list[str]:
        """The graph of each part that TVM runs."""
        return [part.graph for summary in self.summaries for part in summary.partitions]

    @property
    def operators(self) -> int:
        """The number of operators that TVM runs."""
        return sum(part.operators for summary in self.summaries for part in summary.partitions)

    @property
    def fallbacks(self) -> dict[str, str]:
        """The operators that run in eager, with reasons."""
        return {op: reason for summary in self.summaries for op, reason in summary.fallbacks.items()}


@pytest.fixture
def compiled() -> Callable[..., Compiled]:
    """Return a function that compiles a callable under tmpl-tvm with options."""

    def compile_with(fn: Any, *, dynamic: bool | None = None, **options: Any) -> Compiled:
        backend = make_backend("tmpl-tvm", **options)
        summaries: list[Any] = []

        def compiler_fn(gm: Any, example_inputs: Any) -> Any:
            made = backend.compile(CapturedGraph(gm, example_inputs))
            summaries.append(made.facts.parts)
            return made.call

        return Compiled(torch.compile(fn, backend=compiler_fn, dynamic=dynamic), summaries)

    return compile_with

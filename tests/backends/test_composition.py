"""Operators composed at random give eager's results, with TVM and with each of Inductor's CPU templates.

BACKEND_KWARGS_COMPOSITION_SECONDS sets how long graphs are drawn, half of the time for TVM; beyond the default, each
run draws different ones.
"""

import os
import sys
import time
import warnings
from collections.abc import Sequence

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from backend_kwargs import BackendKwargsWarning, make_backend
from backend_kwargs.backends.tvm.settings import unfit
from backend_kwargs.options.templates import template_names
from tests.backends import composition
from tests.backends.composition import SHAPES, Expression, graph_of, wrong

VARIABLE = "BACKEND_KWARGS_COMPOSITION_SECONDS"
SECONDS = float(os.environ.get(VARIABLE, "30"))
# `auto` chooses one of the others, `debug` is for its files, and those for a GPU have no effect here.
OTHERS = ("auto", "debug", "cudagraphs", "coordinate_descent", "triton", "cutlass", "tma")
TEMPLATES = [f"tmpl-inductor:{name}" for name in template_names() if name not in OTHERS]
TVM = pytest.param("tmpl-tvm", marks=pytest.mark.skipif(bool(unfit()), reason=f"no TVM: {unfit()}"))


def run(backend: str, expressions: Sequence[Expression], shape: tuple[int, int]) -> list[int]:
    """Return the expressions that a backend gets wrong in one graph; all if it fails to compile."""
    torch._dynamo.reset()
    tensors = composition.inputs(shape)
    with torch.no_grad(), warnings.catch_warnings():
        # Templates that are for a GPU in part say so.
        warnings.simplefilter("ignore", BackendKwargsWarning)
        compiled = torch.compile(graph_of(expressions), backend=make_backend(backend), fullgraph=True, dynamic=False)
        try:
            results = compiled(**tensors)
        except torch._dynamo.exc.BackendCompilerFailed as error:
            sys.stdout.write(f"{backend}: {error}\n")
            return [*range(len(expressions))]
        return wrong(expressions, tensors, results)


def bisected(backend: str, expressions: list[Expression], at: int, shape: tuple[int, int]) -> list[Expression]:
    """Return the fewest expressions that are wrong together, with the smallest wrong part of one."""
    culprit, others = expressions[at], [*expressions[:at], *expressions[at + 1 :]]
    while others and 0 not in run(backend, [culprit], shape):
        half = len(others) // 2
        halves = others[:half], others[half:]
        kept = next((part for part in halves if 0 in run(backend, [culprit, *part], shape)), None)
        if kept is None or len(others) == 1:
            return [culprit, *others]
        others = kept
    while part := next((part for part in culprit.parts if part.parts and run(backend, [part], shape)), None):
        culprit = part
    return [culprit]


@pytest.mark.parametrize("backend", [TVM, *TEMPLATES])
def test_compositions_are_eagers(backend, fresh_dynamo):
    """Twenty expressions in one graph equal eager's; where plain Inductor differs too, they are only listed."""
    share = SECONDS / 2 if backend == "tmpl-tvm" else SECONDS / 2 / len(TEMPLATES)
    end, compared, listed, failure = time.monotonic() + share, 0, [], []

    @settings(
        max_examples=5 + int(share),  # a graph takes longer than a second, or the time ends first
        deadline=None,
        database=None,
        derandomize=VARIABLE not in os.environ,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(composition.GRAPH, st.sampled_from(SHAPES))
    def draw(expressions, shape):
        nonlocal compared
        if failure or time.monotonic() > end:
            return
        found = run(backend, expressions, shape)
        plain = run("inductor", expressions, shape) if found else []
        # Inductor rounds to half precision only where a kernel ends, and templates end kernels elsewhere.
        plain += [at for at in found if at not in plain and run("inductor", [expressions[at]], shape)]
        listed.extend(str(expressions[at]) for at in found if at in plain)
        compared += len(expressions) - len(set(found) & set(plain))
        if others := [at for at in found if at not in plain]:
            failure.extend(bisected(backend, expressions, others[0], shape))
            failure.append(Expression(f"inputs of shape {shape}", ""))

    draw()
    sys.stdout.write(f"{backend}: {compared} expressions compared, {len(listed)} as wrong under plain Inductor:\n")
    sys.stdout.writelines(f"{each}\n" for each in listed)
    assert not failure, "\n".join(map(str, failure))
    assert compared

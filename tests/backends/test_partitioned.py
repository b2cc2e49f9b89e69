"""The driver of compilers of parts, with a compiler that needs no library."""

import gc
import weakref
from typing import Any, ClassVar

import pytest
import torch
from torch import fx, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.testing import assert_close

from backend_kwargs.backends import CapturedGraph
from backend_kwargs.backends.partitioned import CompiledPart, PartCompiler, compile_by_parts
from backend_kwargs.errors import BackendKwargsWarning
from backend_kwargs.facts import Partition, PartsSummary, left_to_eager

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Interpreter(PartCompiler):
    """Runs parts in eager; for each test with other facts."""

    name: ClassVar[str] = "Interpreter"
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32,)
    denied: ClassVar[dict[str, str]] = {"sin": "it has no sines"}

    def __init__(self, **facts: Any) -> None:
        vars(self).update(facts)
        self.parts: list[fx.GraphModule] = []

    def decompositions(self, trains: bool) -> dict[Any, Any]:
        return {}

    def aten_ops(self, node: fx.Node) -> tuple[str, ...]:
        return ()

    def lacks(self, node: fx.Node) -> str:
        return ""

    def compile(self, part: fx.GraphModule) -> CompiledPart:
        self.parts.append(part)

        def run(args: Any) -> list[torch.Tensor]:
            result = part(*args)
            return [result] if isinstance(result, torch.Tensor) else list(result)

        return CompiledPart(run)


def compiled_by(compiler: PartCompiler, fn: Any) -> tuple[Any, list[PartsSummary]]:
    """Return a compiled function, and the list of its graphs' summaries."""
    summaries: list[Any] = []

    def backend(gm: Any, inputs: Any) -> Any:
        compiled = compile_by_parts(CapturedGraph(gm, inputs), {}, compiler)
        summaries.append(compiled.facts.parts)
        return compiled.call

    return torch.compile(fn, backend=backend), summaries


def split(x: torch.Tensor) -> torch.Tensor:
    return (x * 2 + 1).sin().cos() * 3


X = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))


def test_what_it_does_not_take_runs_in_eager():
    """The operators before and after one that is denied are two parts, and the reason is kept."""
    call, summaries = compiled_by(Interpreter(), split)
    assert_close(call(X), split(X))
    (summary,) = summaries
    assert [(each.graph, each.operators) for each in summary.partitions] == [("inference", 2), ("inference", 2)]
    assert summary.fallbacks == {"sin": "it has no sines"}


@torch.no_grad()
def test_parameters_are_constants():
    """A part has them as attributes; those of another module compile again."""
    compiler = Interpreter()
    call, summaries = compiled_by(compiler, lambda model, x: model(x))
    for model in (nn.Linear(4, 4), nn.Linear(4, 4)):
        assert_close(call(model, X), model(X))
    assert [len([*part.buffers()]) for part in compiler.parts] == [2, 2]
    assert len(summaries) == 2


@pytest.mark.parametrize("trains", [False, True])
def test_gradients(trains):
    """With `trains` it compiles forward and backward graphs; otherwise eager runs the graph, with a warning."""
    model, x = nn.Linear(4, 4), X.clone().requires_grad_()
    call, summaries = compiled_by(Interpreter(trains=trains), model)
    if trains:
        call(x).sum().backward()
    else:
        with pytest.warns(
            BackendKwargsWarning, match="^Interpreter compiles for inference only. A graph runs in eager"
        ):
            call(x).sum().backward()
    given, x.grad = x.grad, None
    model(x).sum().backward()
    assert_close(given, x.grad)
    assert [each.graph for each in summaries[0].partitions] == (["forward", "backward"] if trains else [])


def fails(*_: Any) -> Any:
    raise RuntimeError("no luck")


@pytest.mark.parametrize(
    ("facts", "fallbacks"),
    [
        pytest.param({"lacks": fails}, {"mul": "RuntimeError: no luck"}, id="a node"),
        pytest.param({"compile": fails}, {"mul": "RuntimeError: no luck"}, id="a part"),
        pytest.param(
            {"decompositions": fails},
            {"the graph": "AOTAutograd cannot trace it with Interpreter's decompositions: RuntimeError: no luck"},
            id="the whole",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::backend_kwargs.errors.BackendKwargsWarning")
def test_what_fails_runs_in_eager(facts, fallbacks):
    """Whatever it raises is the reason."""
    call, summaries = compiled_by(Interpreter(**facts), lambda x: x * 2)
    assert_close(call(X), X * 2)
    assert (summaries[0].partitions, summaries[0].fallbacks) == ([], fallbacks)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        pytest.param({}, "Interpreter cannot have 'sin': it has no sines. Write fallback='partition'", id="denied"),
        pytest.param({"decompositions": fails}, "RuntimeError: no luck", id="the whole"),
    ],
)
def test_with_error_nothing_may_run_in_eager(facts, message):
    call, _ = compiled_by(Interpreter(fallback="error", **facts), split)
    with pytest.raises(BackendCompilerFailed, match=message):
        call(X)


@pytest.mark.parametrize("verify", [False, True])
def test_a_compiled_graph_keeps_nothing_of_its_compiler(verify):
    """What a compiler keeps for one compile, such as kernels, is freed after it."""
    compiler = Interpreter(verify=verify)
    kept = weakref.ref(compiler)
    compiled = compile_by_parts(CapturedGraph(fx.symbolic_trace(lambda x: (split(x),)), [X]), {}, compiler).call
    del compiler
    gc.collect()
    assert kept() is None
    assert_close(compiled(X)[0], split(X))


def test_verify_finds_wrong_results():
    """A graph whose first results differ from eager's runs in eager, with a warning that names the output."""
    call, _ = compiled_by(
        Interpreter(verify=True, compile=lambda part: CompiledPart(lambda args: [args[0] * 3])), lambda x: x * 2
    )
    with pytest.warns(BackendKwargsWarning, match="^Interpreter's results differ from eager's, so the inference graph"):
        assert_close(call(X), X * 2)
    assert_close(call(X), X * 2)


def test_verify_compares_with_the_same_random_numbers():
    """A part that is a hundredth off is found also where the graph draws, which another dtype would do otherwise."""

    def noisy(x):
        return torch.rand_like(x) + x * 2

    compiler = Interpreter(verify=True, compile=lambda part: CompiledPart(lambda args: [part(*args) * 1.01]))
    call, _ = compiled_by(compiler, noisy)
    with pytest.warns(BackendKwargsWarning, match="RMSE to the reference"):
        call(X)


PART = Partition("inference", 3, 0.1, "llvm", 0, ())


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        pytest.param(None, "", id="unknown"),
        pytest.param(PartsSummary("TVM", [PART]), "", id="all parts run"),
        pytest.param(
            PartsSummary("TVM", [PART], {"aten.mm": "no rule", "aten.sort": "eager's order"}, 1),
            "TVM failed to run 1 of 2 partitions: aten.mm: no rule; aten.sort: eager's order",
            id="one failed",
        ),
        pytest.param(
            PartsSummary("TVM", [], {"aten.mm": "no rule"}),
            "all of it runs in eager: aten.mm: no rule",
            id="no part",
        ),
        pytest.param(PartsSummary("TVM"), "all of it runs in eager: there is nothing to compile", id="no operator"),
    ],
)
def test_why_eager_runs_a_graph(parts, why):
    """It is said where no part was compiled or one failed, with the reason of each operator."""
    assert left_to_eager(parts) == why

"""`report` of what people have in hand: modules with compiled parts, wrappers, methods, and nothing at all."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import backend_kwargs as bk
from backend_kwargs import compile_records
from backend_kwargs.report.found import SHARED

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    # torch's own warnings about FSDP with one process, and when dynamo reads `.grad` between two regions.
    pytest.mark.filterwarnings("ignore:.*FSDP", "ignore:The .grad attribute"),
]
SPEC = bk.make_backend("eager")


@pytest.fixture(autouse=True)
def _own_records(monkeypatch):
    """Let a report of the process have the graphs of one test, since those of others may be alive."""
    monkeypatch.setattr(compile_records, "_records", {})


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x).relu()


class Encoder(nn.Module):
    """A module with a method that people call in place of the module, as sentence-transformers has."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x):
        return self.block(x) + 1

    def encode(self, x):
        with torch.no_grad():
            return self.forward(x)


def blocks():
    return nn.Sequential(Block(), Block())


def compiled(module):
    return torch.compile(module, backend=SPEC)


def in_place(module):
    module.compile(backend=SPEC)
    return module


def parts_in_place(module, around=lambda block: block):
    for block in module:
        around(in_place(block))
    return module


def in_a_method(encoder):
    encoder.encode = compiled(encoder.encode)
    return encoder


class Trainer:
    """Something that holds a model, as a Trainer or a pipeline does."""

    def __init__(self, model) -> None:
        self.model = model

    def __call__(self, x):
        return self.model(x)


@pytest.fixture
def _one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: parts_in_place(blocks()), id="parts"),
        pytest.param(lambda: nn.Sequential(compiled(Block()), Block()), id="a compiled part"),
        pytest.param(lambda: Trainer(compiled(Block())), id="an object that holds a compiled model"),
        pytest.param(lambda: Trainer(parts_in_place(blocks())), id="an object that holds a model with parts"),
        pytest.param(lambda: functools.partial(compiled(Block())), id="partial"),
        pytest.param(lambda: torch.no_grad()(compiled(Block().forward)), id="a decorated function"),
        pytest.param(lambda: in_place(Encoder()).forward, id="a method of a compiled module"),
    ],
)
def test_what_holds_compiled_code_is_reported(make):
    """The graphs are found in whatever holds the results of torch.compile."""
    held = make()
    getattr(held, "__self__", held)(torch.ones(2, 8))
    found = bk.report(held)
    assert found == bk.report()
    assert {graph.backend for graph in found.graphs} == {"eager"}


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: DistributedDataParallel(compiled(Block())), id="DDP of a compiled module"),
        pytest.param(lambda: DistributedDataParallel(parts_in_place(blocks())), id="DDP of compiled parts"),
        pytest.param(lambda: compiled(DistributedDataParallel(Block())), id="a compiled DDP"),
        pytest.param(lambda: fully_shard(parts_in_place(blocks(), fully_shard)), id="FSDP2, each block compiled"),
        pytest.param(lambda: compiled(fully_shard(blocks())), id="a compiled FSDP2"),
        pytest.param(
            lambda: FullyShardedDataParallel(
                parts_in_place(blocks()), device_id=torch.device("cpu"), use_orig_params=True
            ),
            id="FSDP1 of compiled parts",
        ),
    ],
)
def test_wrappers_of_torch_distributed_are_reported(make):
    """The graphs below DDP and both kinds of FSDP are found."""
    module = make()
    module(torch.ones(2, 8)).sum().backward()
    found = bk.report(module)
    assert found.graphs
    assert found == bk.report()


def test_original_of_a_compiled_module_is_reported():
    """The module that torch.compile was given has the graphs too, as after an unwrap_model()."""
    original = Encoder()
    result = compiled(original)
    result(torch.ones(2, 8))
    assert len(bk.report(original).graphs) == 1
    with pytest.raises(bk.BackendKwargsError):
        bk.report(Encoder())


def test_compiled_method_is_reported():
    """A method that was replaced by its compiled version is found by the module and by itself."""
    encoder = in_a_method(Encoder())
    encoder.encode(torch.ones(2, 8))
    assert [len(bk.report(each).graphs) for each in (encoder, encoder.encode)] == [1, 1]


def test_own_graphs_are_not_those_of_the_same_module_compiled_again():
    """Two results of torch.compile for one module are kept apart."""
    block = Block()
    first = compiled(block)
    first(torch.ones(2, 8))
    second = torch.compile(block, backend=bk.make_backend("aot_eager"))
    second(torch.ones(2, 8))
    assert [[graph.backend for graph in bk.report(each).graphs] for each in (first, second)] == [
        ["eager"],
        ["aot_eager"],
    ]


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: compiled(Block()), id="a compiled module"),
        pytest.param(lambda: compiled(blocks()), id="a compiled module of torch's"),
        pytest.param(lambda: in_place(Block()), id="a module compiled in place"),
    ],
)
def test_graphs_of_a_model_that_is_gone_serve_the_next(make):
    """Where a cell that runs again replaces a model, the graphs of the old serve the new one, and are reported."""
    for _ in range(2):
        model = make()
        model(torch.ones(2, 8))
    found = bk.report(model)
    assert found.graphs == bk.report().graphs
    assert found.notes == (SHARED,)


def test_report_of_the_process_without_a_graph():
    """Without an argument and without a compiled graph there is nothing to report."""
    with pytest.raises(bk.BackendKwargsError) as raised:
        bk.report()
    assert str(raised.value).startswith("Nothing to report: call it first, and compile it by a backend of this package")


def test_method_that_runs_in_eager_is_told():
    """A compiled module of which only another method was called: the report says that it runs in eager."""
    module = compiled(Encoder())
    module.encode(torch.ones(2, 8))
    with pytest.raises(bk.BackendKwargsError) as raised:
        bk.report(module)
    assert str(raised.value).partition(". Encoder")[2] == (
        ".encode runs in eager even then, since torch.compile(model) compiles calls of the model alone: "
        "compile in place what it calls, such as model[0].compile(...)."
    )

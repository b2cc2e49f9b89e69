"""`report`, `compare` and the command line with TVM."""

import json

import pytest
import torch

import backend_kwargs as bk
from backend_kwargs.backends.tvm.settings import unfit
from backend_kwargs.compare import Candidate, compare
from backend_kwargs.compare.comparison import cells
from backend_kwargs.report import EngineShare, Graph, Partition
from backend_kwargs.report.advice import advice_on
from backend_kwargs.report.graphs import lines_of

if unfit():  # the tables below hold backends
    pytest.skip(f"no TVM: {unfit()}", allow_module_level=True)


@pytest.fixture
def chain():
    return lambda x: (x * 2 + 1).relu().sum(-1)


def compiled(fn, *args, **options):
    made = torch.compile(fn, backend=bk.make_backend("tmpl-tvm", **options))
    made(*args)
    return made


def test_partition_is_told(chain):
    """A graph that TVM compiles as a whole is one untuned partition, with its compile time."""
    (graph,) = bk.report(compiled(chain, torch.randn(4, 8))).graphs
    (partition,) = graph.relax.partitions
    assert (graph.backend, partition.graph, partition.tuned) == ("tmpl-tvm", "inference", 0)
    assert partition.operators > 2
    assert 0 < partition.seconds <= graph.seconds
    assert '"kind": "llvm"' in partition.target
    assert graph.relax.fallbacks == {}


def test_operator_that_stays_in_eager_is_told():
    """Operators that TVM cannot run are listed with reasons; the rest is in partitions."""

    def sorts(x):
        return torch.linalg.eigvalsh(x @ x.T).exp() + 1

    report = bk.report(compiled(sorts, torch.randn(4, 4)))
    (graph,) = report.graphs
    ((op, reason),) = graph.relax.fallbacks.items()
    assert op == "_linalg_eigh"
    assert f"  in eager: {op}, because {reason}" in str(report).splitlines()
    assert graph.relax.partitions


def test_backward_is_told(chain):
    """The partitions of forward and backward graphs are both shown."""
    x = torch.randn(4, 8, requires_grad=True)
    made = compiled(chain, x)
    made(x).sum().backward()
    (graph,) = bk.report(made).graphs
    assert {each.graph for each in graph.relax.partitions} == {"forward", "backward"}


def test_other_compilers_have_no_partitions(chain):
    """A graph of another compiler has no summary of TVM."""
    made = torch.compile(chain, backend=bk.make_backend("eager"))
    made(torch.randn(4, 8))
    report = bk.report(made)
    assert (report.graphs[0].relax, report.tuning) == (None, "")


def test_report_is_data(chain):
    """to_dict contains TVM's summary as plain data."""
    found = bk.report(compiled(chain, torch.randn(4, 8), seed=1)).to_dict()
    (graph,) = json.loads(json.dumps(found))["graphs"]
    assert graph["options"] == {"seed": 1}
    assert graph["relax"]["fallbacks"] == {}
    assert graph["relax"]["partitions"][0]["graph"] == "inference"


def graph_of(*partitions, fallbacks=None, **options):
    return Graph("0/0", "f", "tvm", options, 3.0, "off", "", None, (), EngineShare("TVM", partitions, fallbacks or {}))


def part(graph="inference", operators=3, tuned=0, notes=()):
    return Partition(graph, operators, 1.25, "llvm", tuned, notes)


HEAD = "graph 0/0 f: tvm, 3.0 s, cache off"


@pytest.mark.parametrize(
    ("graph", "lines"),
    [
        pytest.param(graph_of(part()), ["  inference: 3 operators in 1 partition of TVM, untuned; 1.2 s"], id="one"),
        pytest.param(
            graph_of(part("forward", 1), part("forward"), part("backward", tuned=1)),
            [
                "  forward: 4 operators in 2 partitions of TVM, untuned; 2.5 s",
                "  backward: 3 operators in 1 partition of TVM, 1 kernel tuned; 1.2 s",
            ],
            id="two graphs",
        ),
        pytest.param(
            graph_of(fallbacks={"mm": "no float8"}),
            ["  no partition of TVM", "  in eager: mm, because no float8"],
            id="all in eager",
        ),
        pytest.param(
            graph_of(part(tuned=2, notes=("5 trials failed",))),
            ["  inference: 3 operators in 1 partition of TVM, 2 kernels tuned; 1.2 s", "    5 trials failed"],
            id="notes",
        ),
    ],
)
def test_lines(graph, lines):
    """A graph's lines show its partitions by direction, whether they are tuned, and what runs in eager."""
    assert list(lines_of(graph)) == [HEAD, *lines]


@pytest.mark.parametrize(
    ("graph", "advice"),
    [
        pytest.param(
            graph_of(part(tuned=2), scheduler="meta_schedule"),
            ["2 kernels tuned, for this process only -> work_dir='tuning/' keeps the results"],
            id="lost",
        ),
        pytest.param(graph_of(part(tuned=2), work_dir="tuned"), [], id="kept"),
        pytest.param(graph_of(part()), [], id="untuned"),
    ],
)
def test_advice(graph, advice):
    """If the next process would tune again, the report says how to avoid it."""
    assert list(advice_on([graph])) == advice


def test_explain_shows_every_option():
    """explain shows TVM's options like Inductor's: value, layer, default, status."""
    assert str(bk.explain("tvm", {"freeze": True, "opt_level": 3, "trials": 64, "scheduler": "meta_schedule"})) == (
        "make_backend('tvm', {'freeze': True, 'opt_level': 3, 'trials': 64, 'scheduler': 'meta_schedule'})\n"
        "  freeze = True  (make_backend; default False; changed)\n"
        "  opt_level = 3  (make_backend; default None; inert because ignored by Relax)\n"
        "  trials = 64  (make_backend; default 64; same as default)\n"
        "  scheduler = 'meta_schedule'  (make_backend; default None; changed)"
    )


MODEL = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize(
    "backend", [pytest.param("tmpl-tvm", id="name"), pytest.param(bk.make_backend("tvm", seed=1), id="value")]
)
def test_candidate_of_compare(mode, backend):
    """compare checks and times TVM forward and backward, and its row says that it is untuned."""
    candidates = [Candidate("eager"), Candidate("TVM", backend)]
    eager, row = compare(MODEL, torch.randn(4, 8), candidates, mode=mode, rounds=2).rows
    assert (row.status, row.reason, row.graphs, row.tuning) == ("pass", "", 1, "untuned")
    assert row.speedup is not None
    assert cells(row)[-1].endswith("untuned")
    assert eager.tuning == ""


def test_candidates_do_not_share(tmp_path):
    """Two TVM candidates compile separately."""
    candidates = [Candidate("plain", "tmpl-tvm"), Candidate("compiled", "tmpl-tvm", options={"exec_mode": "compiled"})]
    rows = compare(MODEL, torch.randn(4, 8), candidates, rounds=1).rows
    assert [(row.status, row.graphs) for row in rows] == [("pass", 1)] * 2
    assert ["exec_mode='compiled'" in row.report for row in rows] == [False, True]

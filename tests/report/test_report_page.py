"""A report as a page: graphs with their options, kernels and code, and what broke them."""

from importlib import import_module

import pytest
import torch

import backend_kwargs as bk
from backend_kwargs.errors import BackendKwargsError
from backend_kwargs.facts.decision import RaceRow, Unraced
from backend_kwargs.page import read_document
from backend_kwargs.report import Break, Code, Graph, Race, Ran
from backend_kwargs.report.document import document_of, graph_of, warnings_on


def graph(**changed):
    about = {"options": {}, "seconds": 1.5, "cache": "miss", "recompiled": "", "ended_by": None, "codes": ()}
    return Graph("0/0", "forward", "tmpl-inductor:aten", **(about | changed))


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_report_is_written_as_a_page(tmp_path):
    """`to_html` writes a graph with its options and kernels."""
    model = torch.compile(torch.nn.GELU(), backend=bk.make_backend("tmpl-inductor", epilogue_fusion=False))
    model(torch.ones(64))
    report = bk.report(model)
    report.to_html(tmp_path / "page.html")
    (made,) = read_document(tmp_path / "page.html").graphs
    assert [(option.name, option.value, option.default, option.source) for option in made.options] == [
        ("epilogue_fusion", "False", "True", "user")
    ]
    assert [kernel.kind for kernel in made.kernels] == ["C++"]


def test_a_page_that_cannot_be_written_is_one_line(tmp_path):
    """The error names the file and the reason."""
    empty = bk.report.__globals__["Report"]((), ())
    with pytest.raises(BackendKwargsError) as raised:
        empty.to_html(tmp_path)
    assert str(raised.value) == f"Cannot write {str(tmp_path)!r}: Is a directory."


@pytest.mark.parametrize(
    ("what", "use"),
    {
        "to_html(with_code=True) was removed: the code is in `bk.report(compiled).graphs[0].codes[0].source`.": (
            lambda: bk.report.__globals__["Report"]((), ()).to_html("page.html", with_code=True)
        ),
        "Module backend_kwargs.compare.plot was removed: write `compare -o FILE.html`, whose plots are SVG.": (
            lambda: import_module("backend_kwargs.compare.plot")
        ),
    }.items(),
)
def test_what_was_removed_says_what_to_write(what, use):
    with pytest.raises(BackendKwargsError) as raised:
        use()
    assert str(raised.value) == what


def test_options_say_what_set_them():
    """A template's own value, the user's, and what auto chose; an option at its default is left out."""
    race = Race("", "", "cudagraphs", {"triton.cudagraphs": True}, seconds=1.0)
    given = {"max_autotune_gemm_backends": "ATEN", "epilogue_fusion": False, "max_autotune": False}
    options = graph_of(graph(options=given, race=race)).options
    assert {option.name: option.source for option in options} == {
        "max_autotune_gemm_backends": "template aten",
        "epilogue_fusion": "user",
        "triton.cudagraphs": "auto",
    }


def test_a_break_has_its_place():
    """A graph that ended early has the file and the line where, with the remedy."""
    (cause,) = graph_of(graph(ended_by=Break("/home/me/model.py:2", "a call of print", "remove it"))).causes
    assert (cause.kind, cause.reason, cause.hint) == ("break", "a call of print", "remove it")
    assert (cause.source.place, cause.source.line) == ("model.py:2", 2)


def test_a_recompile_has_the_line_of_its_guard():
    """Dynamo names the file and the line of a guard that failed."""
    guard = "tensor 'x' size mismatch at index 0. expected 4, actual 5  # y = x + 1  # /home/me/model.py:1 in forward"
    (cause,) = graph_of(graph(recompiled=guard)).causes
    assert (cause.kind, cause.source.place, cause.source.line) == ("recompile", "model.py:1", 1)


def test_what_a_reader_must_know_comes_first():
    """Fallbacks, breaks and advice are warnings, each with its graph."""
    fell_back = graph(ran=Ran("fell_back", "ran in eager: no partition"), ended_by=Break("m.py:3", "print", ""))
    assert [(warned.kind, warned.text, warned.where) for warned in warnings_on([fell_back])] == [
        ("fell back", "ran in eager: no partition", "graph 0/0"),
        ("break", "graph break at m.py:3: print", ""),
    ]


def test_a_raced_graph_has_its_race_and_verdict():
    """A report of one raced graph answers which candidate won, and by how much."""
    rows = (RaceRow("eager", seconds=2.0), RaceRow("default", seconds=1.0, won=True))
    document = document_of([graph(race=Race("", "", "default", {}, rows, seconds=3.0, cut_s=2.5))], "1 graph")
    assert [(each.over, each.ratio.median) for each in document.verdict.speedups] == [("eager", 2.0)]
    assert (document.races[0].winner, document.races[0].cut_s) == ("default", 2.5)
    assert [warned.kind for warned in document.warnings] == ["cut"]


@pytest.mark.parametrize(
    ("unraced", "why", "text"),
    [
        pytest.param(
            Unraced.LEFT,
            "timed out waiting for the racing rank",
            "timed out waiting for the racing rank, so that default was compiled by all ranks",
            id="late",
        ),
        pytest.param(
            Unraced.ALONE,
            "the process group's store cannot be reached",
            "the process group's store cannot be reached, so that default was compiled; other ranks may have compiled "
            "something else",
            id="unreachable",
        ),
    ],
)
def test_ranks_that_could_not_agree_are_a_warning(unraced, why, text):
    """A graph that was not raced has no race on the page; its reason is a note, and a warning if it is of the ranks."""
    race = Race("", "", "default", facts=why, unraced=unraced)
    document = document_of([graph(race=race)], "1 graph")
    assert [(warned.kind, warned.text, warned.where) for warned in document.warnings] == [("ranks", text, "graph 0/0")]
    assert (document.races, document.speedups, document.verdict.text) == ((), (), "1 graph")
    assert document.graphs[0].notes == (f"auto: default for a graph not raced: {why}",)


def test_notes_have_what_no_other_part_shows():
    """The fate of CUDA graphs is a note, unless they are off."""
    codes = (Code("forward", {}, "recorded twice", 1.0, "hit", ""), Code("backward", {}, "off", 1.0, "hit", ""))
    assert graph_of(graph(codes=codes)).notes == ("forward: CUDA graphs recorded twice",)

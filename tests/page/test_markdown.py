"""The summary for a pull request: what it says, and that names of users and files do nothing in it."""

import re

import pytest

from backend_kwargs.interval import Interval
from backend_kwargs.page.document import Change, Changes, Document, Row, Speedup, Speedups, Verdict, Warned
from backend_kwargs.page.markdown import code, to_markdown

HOSTILE = "x`</code>|\n<img src=x onerror=alert(1)> @org/team ![](https://a.b/c) [l](javascript:1) \x1b[31m"
ONE = Interval(1.0, 1.0, 1.0)
RATIO = Interval(1.25, 1.2, 1.3)


def test_the_summary_of_a_comparison():
    """The verdict, the candidates, what changed and what to know, in this order."""
    document = Document(
        title="model",
        subtitle="inference",
        verdict=Verdict(
            winner="a",
            speedups=(Speedup(over="eager", ratio=RATIO),),
            compile_s=3.0,
            pays_back_calls=1200,
            pays_back_over="eager",
            error=2e-4,
            paste="compile(model)",
        ),
        warnings=(Warned(text="noisy", where="a"),),
        speedups=(
            Speedups(
                over="eager",
                noise=Interval(1.0, 0.99, 1.01),
                rows=(Row(name="a", won=True, speedup=RATIO, latency=Interval(1e-3, 1e-3, 1e-3), compile_s=3.0),),
            ),
        ),
        changes=Changes(
            same=3, changes=(Change(kind="faster", name="a", before=Interval(1.0, 1.0, 1.0), after=RATIO),)
        ),
    )
    assert to_markdown(document) == (
        "### `model`\n"
        "\n"
        "`inference`\n"
        "\n"
        "**Use `a`: 1.25\u00d7 as fast as `eager`.**\n"
        "95 % intervals: 1.20 to 1.30 over `eager`.\n"
        "It compiles in 3 s; paid back after 1,200 calls against `eager`; error 2.0e-4.\n"
        "\n"
        "```python\n"
        "compile(model)\n"
        "```\n"
        "\n"
        "Speedup over `eager`, which is at 0.99 to 1.01 against itself\n"
        "\n"
        "| candidate | speedup | 95 % | a call | compile | memory | result |\n"
        "|---|---:|---:|---:|---:|---:|---|\n"
        "| **`a`** | 1.25\u00d7 | 1.20 to 1.30 | 1 ms | 3 s |  | `pass` |\n"
        "\n"
        "**Since the older report**\n"
        "\n"
        "- `a` became faster: `1.00\u00d7 (1.00 to 1.00)` → `1.25\u00d7 (1.20 to 1.30)`\n"
        "- 3 rows are the same within noise\n"
        "\n"
        "**Warnings**\n"
        "\n"
        "- `a`: `noisy`\n"
    )


def hostile(name):
    return Document(
        title=name,
        subtitle=name,
        verdict=Verdict(winner=name, speedups=(Speedup(over=name, ratio=RATIO),)),
        warnings=(Warned(text=name, where=name),),
        speedups=(Speedups(title=name, over=name, rows=(Row(name=name, status=name, reason=name, note=name),)),),
        changes=Changes(
            changes=(
                Change(kind="new", name=name, group=f"{name}!"),
                Change(kind="winner", name="w", old=name, new=name),
            ),
            differs=(name,),
        ),
        notes=(name,),
    )


def test_names_stay_inside_code_spans():
    """Outside code spans no character of a hostile name is left; the table keeps its columns."""
    lines = to_markdown(hostile(HOSTILE)).splitlines()
    outside = [re.sub(r"`[^`]*`", "", line) for line in lines]
    assert not [line for line in outside if re.search(r"[<>@\x1b]|onerror|!\[|\]\(|`", line)]
    assert {line.count("|") for line in lines if line.startswith("|")} == {8}


def test_code_to_paste_cannot_end_its_fence():
    """A fence is longer than any run of backticks in what it holds."""
    text = to_markdown(Document(title="t", verdict=Verdict(winner="w", paste="a\n````\n<script>")))
    fences = [line for line in text.splitlines() if line.startswith("`````")]
    assert fences == ["`````python", "`````"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("", "", id="nothing"),
        pytest.param("a\nb", "`a b`", id="one line"),
        pytest.param("a`b|c", "`a'b¦c`", id="marks"),
        pytest.param("a" * 300, f"`{'a' * 197}...`", id="long"),
    ],
)
def test_code_spans(text, expected):
    """A name is one line, without what ends a span or a cell."""
    assert code(text) == expected


def test_a_long_document_is_cut():
    """A comment of a pull request has a limit: what is left out is counted."""
    rows = tuple(Row(name=f"r{at}") for at in range(60))
    text = to_markdown(Document(title="t", speedups=tuple(Speedups(title=f"g{at}", rows=rows) for at in range(25))))
    assert "… and 10 more candidates" in text
    assert "… and 5 more tables" in text

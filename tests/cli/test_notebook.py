"""Output in a notebook: parts of a page of reports, explanations and comparisons, and no refreshed progress lines."""

import re

import pytest

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")

CELLS = {
    "setup": """
import sys, torch, backend_kwargs as bk
from backend_kwargs.compare import Candidate, compare
model, x = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU()).eval(), torch.randn(4, 16)
backend = bk.make_backend("tmpl-inductor:eager_numerics")
compiled = torch.compile(model, backend=backend)
with torch.no_grad():
    compiled(x)
""",
    "report": "bk.report(compiled)",
    "explain": "bk.explain(backend.spec, {'epilogue_fusion': False})",
    "comparison": "compare(model, x, [Candidate('eager'), Candidate('<b>ours</b>', backend)], rounds=3)",
    "command": "!{sys.executable} -m backend_kwargs compare factory.py:build --backends eager,aot_eager --rounds 3",
}
FACTORY = """
import torch

def build():
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()).eval(), (torch.randn(4, 8),)
"""


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """Run the notebook in a kernel, and return the output of each cell."""
    folder = tmp_path_factory.mktemp("notebook")
    (folder / "factory.py").write_text(FACTORY, encoding="utf-8")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code) for code in CELLS.values()])
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": folder}}).execute()
    return dict(zip(CELLS, (cell.outputs for cell in notebook.cells), strict=True))


def html(outputs):
    (result,) = [output for output in outputs if output.output_type == "execute_result"]
    return result.data["text/html"]


@pytest.mark.parametrize(
    ("cell", "texts"),
    [
        pytest.param("report", ["1 graph.", "graph 0/0", "emulate_precision_casts"], id="report"),
        pytest.param("explain", ["<th>layer</th>", "<td>epilogue_fusion</td><td>False</td>"], id="explain"),
        pytest.param("comparison", ["Speedups", "&lt;b&gt;ours&lt;/b&gt;", "Accuracy"], id="comparison"),
    ],
)
def test_results_are_tables(outputs, cell, texts):
    """The last value of a cell is shown with the parts of a page, or as a table, without script; text is escaped."""
    shown = html(outputs[cell])
    assert "<table" in shown
    assert "<script" not in shown
    assert not [text for text in texts if text not in shown], shown


def test_a_report_is_text_where_no_page_can_be_shown(outputs):
    """IPython in a terminal shows what print() does."""
    assert outputs["report"][0].data["text/plain"].startswith("1 graph, 0 breaks, 0 recompiles, ")


def test_command_prints_each_step_once(outputs):
    """A command in a notebook prints one line per compile, no refreshed bar, and full column names."""
    text = "".join(output.text for output in outputs["command"])
    assert re.findall(r"compiling (\S+)", text) == ["eager", "aot_eager"]
    assert "speedup" in text
    assert "\x1b" not in text

"""The page as a whole: each row has a section, each section's snippets run in a test, and what torch alone can do."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.frameworks.page import SECTIONS, TEXT, run, snippets

HERE = Path(__file__).parent


def test_each_row_has_its_section():
    """The table links to each section once, and to nothing else."""
    rows = re.findall(r"^\| \[(.+?)\]\(#(.+?)\)", TEXT, re.MULTILINE)
    assert [name for name, _ in rows] == [*SECTIONS]
    assert [anchor for _, anchor in rows] == [re.sub(r"[,]", "", name.lower()).replace(" ", "-") for name in SECTIONS]


@pytest.mark.parametrize("section", [name for name in SECTIONS if snippets(name)])
def test_each_snippet_is_run_by_a_test(section):
    """Every Python block of the page is run by a test."""
    code = "\n".join(path.read_text(encoding="utf-8") for path in sorted(HERE.glob("test_*.py")))
    calls = re.findall(rf'(?:run|snippets)\(\s*"{re.escape(section)}"(?:, (\d))?', code)
    assert {int(which or 0) for which in calls} >= {*range(len(snippets(section)))}


def test_aotinductor_snippet_runs():
    """The page's package gives eager's results."""
    model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU()).eval(), torch.randn(2, 8)
    with torch.no_grad():
        torch.testing.assert_close(run("AOTInductor", model=model, x=x)["result"], model(x))


def test_another_compiler_runs_the_snippet(capsys):
    """The model is one part of ONNX Runtime's, with eager's numbers."""
    pytest.importorskip("onnxruntime")
    model, x = nn.Sequential(nn.Linear(512, 512), nn.GELU()), torch.randn(4, 512)
    with torch.no_grad():
        wanted = model(x)
    result = run("OpenVINO, ONNX Runtime", model=model, x=x, torch=torch)["result"]
    torch.testing.assert_close(result, wanted, rtol=1e-4, atol=1e-5)
    assert "in 1 partition of ONNX Runtime" in capsys.readouterr().out


def test_cache_artifacts_snippet_runs():
    """The page's snippet of cache artifacts runs."""
    torch.compile(lambda x: x.sin() + 1, backend="tmpl-inductor:fast_compile")(torch.ones(3))
    assert run("Cache artifacts")["info"].inductor_artifacts


def test_fsdp2_snippet_runs(tmp_path):
    """The page's blocks train, sharded over a group of one."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'init'}", rank=0, world_size=1)
    try:
        model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.GELU()), nn.Sequential(nn.Linear(8, 8), nn.GELU()))
        x = torch.randn(4, 8)
        expected = model(x).detach()
        result = run("DDP, FSDP2, tensor parallel", model=model)["model"](x)
        torch.testing.assert_close(result, expected)
        result.sum().backward()
    finally:
        dist.destroy_process_group()

"""The recipe "add a compiler": a module and a row in `others.COMPILERS`, in a copy of the package."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import backend_kwargs

PACKAGE = Path(backend_kwargs.__file__).parent
MODULE = '''
"""A compiler that calls the graph itself."""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from backend_kwargs.backends import DeclaredCompiler
from backend_kwargs.options.option import declared
from backend_kwargs.options.machine import importable


@dataclass(frozen=True, slots=True)
class ToyOptions:
    aten_ops: Annotated[tuple[str, ...], "operators left to ATen"] = ()


@dataclass(frozen=True)
class ToyCompiler(DeclaredCompiler):
    library: ClassVar[str] = "Toy"
    registered: ClassVar[str] = "tmpl-toy"
    line: ClassVar[str] = "A toy"
    declared: ClassVar[Any] = declared(ToyOptions, data={"aten_ops"})
    rules: ClassVar[tuple[Any, ...]] = ()
    distributions: ClassVar[tuple[str, ...]] = ("torch",)
    needs: ClassVar[tuple[Any, ...]] = (importable("torch"),)
    trains: ClassVar[bool] = False

    def part_compiler(self, options):
        import torch

        from backend_kwargs.backends.partitioned import CompiledPart, PartCompiler

        class Toy(PartCompiler):
            name: ClassVar[str] = "Toy"
            dtypes: ClassVar[Any] = (torch.float32,)
            denied: ClassVar[Any] = {"cos": "the toy has no cosine"}

            def decompositions(self, trains):
                return {}

            def aten_ops(self, node):
                return options.get("aten_ops", ())

            def lacks(self, node):
                return ""

            def compile(self, part):
                return CompiledPart(lambda args: torch.utils._pytree.tree_leaves(part(*args)))

        return Toy()
'''
USES = """
import json, torch, backend_kwargs as bk
from typer.testing import CliRunner
from backend_kwargs.cli import app
from backend_kwargs.entry_points import SPECS

def printed(*arguments):
    return json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)

compiled = torch.compile(lambda x: (x.sin() + 1).cos(), backend=bk.make_backend("toy"))
x = torch.randn(4)
with torch.no_grad():
    torch.testing.assert_close(compiled(x), (x.sin() + 1).cos())
auto = bk.make_backend("tmpl-inductor:auto", candidates=['tmpl-toy[aten_ops=["sin"]]'], budget_s=20, store=None)
raced = torch.compile(lambda x: x.sin() @ x.exp(), backend=auto)
with torch.no_grad():
    raced(torch.randn(512, 512))
found = printed("doctor")
print(json.dumps({
    "doctor": [found["machine"]["Toy"].partition(" ")[0], found["backends"]["tmpl-toy"]["word"]],
    "list": [row["works"] for row in printed("list")["backends"] if row["name"] in ("toy", "tmpl-toy")],
    "options": [row["option"] for row in printed("explain", "toy", "*")],
    "explain": [effect.status for effect in bk.explain("toy", aten_ops=("sin",)).effects],
    "entry point": SPECS["tmpl_toy"],
    "report": [dict(graph.engine.fallbacks) for graph in bk.report(compiled).graphs],
    "race": [row.name for row in bk.report(raced).graphs[0].race.rows if row.name.startswith("tmpl-toy")],
}))
"""
ROW = "    OpenVINONativeCompiler,\n)"


@pytest.fixture(scope="module")
def uses(tmp_path_factory):
    """Add a compiler to a copy of the package, use it everywhere, and return what was seen."""
    root = tmp_path_factory.mktemp("copy")
    shutil.copytree(PACKAGE, root / "backend_kwargs", ignore=shutil.ignore_patterns("__pycache__"))
    (root / "backend_kwargs" / "backends" / "toy.py").write_text(MODULE)
    others = root / "backend_kwargs" / "backends" / "others.py"
    text = others.read_text().replace(ROW, ROW.replace(")", "    ToyCompiler,\n)"))
    text = text.replace("COMPILERS:", "from backend_kwargs.backends.toy import ToyCompiler\n\nCOMPILERS:", 1)
    others.write_text(text)
    ran = subprocess.run(
        [sys.executable, "-c", USES],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(root)},
        cwd=root,
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("reader", "seen"),
    [
        pytest.param("doctor", ["torch", "works"], id="doctor"),
        pytest.param("list", ["works"], id="list"),
        pytest.param("options", ["aten_ops"], id="options"),
        pytest.param("explain", ["changed"], id="explain"),
        pytest.param("entry point", "tmpl-toy", id="entry point"),
        pytest.param("report", [{"cos": "the toy has no cosine"}], id="report"),
        pytest.param("race", ['tmpl-toy[aten_ops=["sin"]]'], id="auto"),
    ],
)
def test_a_compiler_is_a_module_and_a_row(uses, reader, seen):
    """Two files are enough for every reader of the descriptor."""
    assert uses[reader] == seen

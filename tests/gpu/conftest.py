"""Tests for a CUDA GPU: `python -m pytest tests/gpu`. BACKEND_KWARGS_EVIDENCE=FILE keeps the tests' observations."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
EVIDENCE = "BACKEND_KWARGS_EVIDENCE"
WARNINGS = (
    # torch's advice to use TF32; these tests need exact float32.
    "ignore:TensorFloat32 tensor cores:UserWarning",
    # Inductor's, of a softmax whose reduction it splits.
    r"ignore:\s*Online softmax is disabled:UserWarning",
    # torch's, where the thread of a backward pass is the first to use cuBLAS.
    "ignore:Attempting to run cuBLAS:UserWarning",
    # torch's warning: CUDA-graph trees record an empty graph to get a pool.
    "ignore:The CUDA Graph is empty:UserWarning",
    # torch's warning at the second trace of a process.
    "ignore:Warning. Profiler clears events:UserWarning",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            for warning in WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(warning))
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="no CUDA GPU is visible"))


@pytest.fixture(autouse=True)
def _seeded(fresh_dynamo: None) -> None:
    torch.manual_seed(0)


LOADS_A_PACKAGE = """
import torch, torch._inductor
x = torch.ones(8, device="cuda")
path = torch._inductor.aoti_compile_and_package(torch.export.export(torch.nn.Tanh(), (x,)), package_path={path!r})
torch._inductor.aoti_load_package(path)(x)
"""


@pytest.fixture(scope="session")
def ahead_of_time(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skip if torch itself crashes when it loads an ahead-of-time package that it has just compiled."""
    path = tmp_path_factory.mktemp("ahead") / "model.pt2"
    code = LOADS_A_PACKAGE.format(path=str(path))
    alone = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True)
    if alone.returncode:
        pytest.skip(f"torch {torch.__version__} ends in {alone.returncode} as it loads an ahead-of-time package")


@pytest.fixture
def evidence() -> Callable[..., None]:
    """Return a function that appends a test's observations as JSON to the file in EVIDENCE, if set."""

    def record(template: str, case: str, **seen: Any) -> None:
        if path := os.environ.get(EVIDENCE):
            with Path(path).open("a") as file:
                file.write(json.dumps({"template": template, "case": case, **seen}, default=str) + "\n")

    return record

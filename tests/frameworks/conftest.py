"""Small models for each framework, and a torchvision that can be imported with a CPU build of torch."""

import os
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

MODULES = (
    "accelerate", "diffusers", "ipykernel", "lightning", "sentence_transformers", "timm", "torchtitan", "transformers",
)  # fmt: skip
MISSING = [name for name in MODULES if find_spec(name) is None]
# `make test-frameworks` has all of them and requires each row; elsewhere nothing is collected.
collect_ignore_glob = ["test_*.py"] if MISSING else []


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    """Reset dynamo, since the compiled code of an earlier test lives as long as its model or trainer."""
    torch._dynamo.reset()


def pytest_report_header():
    if not MISSING:
        return f"frameworks: {', '.join(f'{name} {version(name)}' for name in ('torch', *MODULES))}"
    return f"frameworks: not collected, without {', '.join(MISSING)}"


def _declare_torchvision():
    """Declare the operators that `import torchvision` needs, if its own, built for CUDA, cannot be loaded.

    timm and transformers import torchvision; none of the tests calls these operators.
    """
    try:
        torch.ops.load_library(Path(find_spec("torchvision").origin).parent / "_C.so")
    except OSError:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return library
    return None


torchvision_operators = None if MISSING else _declare_torchvision()  # kept alive, else the operators go with it


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch, fresh_dynamo):
    """Compile each test with an empty cache in its own folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def _own_environment():
    """Put the environment back: frameworks set variables by which others take the process for a rank."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture
def own_accelerator():
    """Forget what accelerate keeps for the process: a second Accelerator would take the plugin of the first."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    def forget():
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        PartialState._reset_state()

    forget()
    yield
    forget()


@pytest.fixture
def tokens():
    return torch.randint(1, 64, (8, 16), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def causal_lm():
    """A Llama with one layer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads)).eval()

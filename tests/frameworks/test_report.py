"""`report` of what frameworks return: their wrappers of a compiled model, and a model that they compiled."""

import pytest
import torch
from torch import nn

import backend_kwargs as bk
from tests import forks
from tests.frameworks.page import run
from tests.frameworks.test_models import sentence_transformer  # noqa: F401 - a fixture
from tests.frameworks.test_transformers import on_a_cpu  # noqa: F401 - a fixture

FAST = "tmpl-inductor:fast_compile"


def blocks():
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2)))


def specs(value):
    return {graph.backend for graph in bk.report(value).graphs}


@pytest.mark.filterwarnings("ignore")  # lightning's warnings about torch's pytrees
@pytest.mark.parametrize("original", [True, False], ids=["Fabric's", "the module below"])
def test_fabrics_wrapper(original):
    """What Fabric's setup() returns is reported, and so is the module that it was given."""
    import lightning

    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    wrapped = fabric.setup(torch.compile(blocks(), backend=FAST))
    wrapped(torch.ones(2, 8))
    assert specs(wrapped if original else wrapped.module) == {FAST}


PREPARED = """
import sys, warnings
warnings.simplefilter("ignore")
import torch
from accelerate import Accelerator
from torch import nn
import backend_kwargs as bk
from backend_kwargs.integrations.accelerate import TorchDynamoPlugin

plugin = TorchDynamoPlugin(backend=sys.argv[1], use_regional_compilation=sys.argv[2] == "True")
blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2)))
model = Accelerator(cpu=True, dynamo_plugin=plugin).prepare(blocks)
model(torch.ones(2, 8))
print({graph.backend for graph in bk.report(model).graphs})
"""


@pytest.mark.parametrize("regional", [True, False], ids=["regional", "whole"])
def test_what_accelerate_prepares(regional):
    """A model that accelerate compiled, whole or by regions, is reported; in a process of its own, as a script is."""
    ended = forks.run("-c", PREPARED, FAST, regional)
    assert ended.stdout.strip() == str({FAST}), ended.stderr


@pytest.mark.usefixtures("on_a_cpu")
def test_model_that_generate_compiled(causal_lm, tokens):
    """`generate` compiles a call of its own, which is found by the model, and by the method."""
    run("generate", model=causal_lm, prompt=tokens[:1])
    assert specs(causal_lm) == specs(causal_lm.generate) == {"tmpl-inductor:aten+fast_compile"}


def test_trainer_is_reported_by_its_model(causal_lm, tokens):
    """A Trainer holds the compiled model."""
    from transformers import Trainer, TrainingArguments

    causal_lm.compile(backend=FAST)
    causal_lm(tokens)
    assert specs(Trainer(model=causal_lm, args=TrainingArguments("out", report_to="none"))) == {FAST}


def test_encode_of_a_compiled_sentence_transformer_is_told(sentence_transformer):  # noqa: F811 - the fixture
    """`encode` of torch.compile(SentenceTransformer(...)) runs in eager, and the report says so."""
    compiled = torch.compile(sentence_transformer, backend=FAST)
    compiled.encode(["a sentence"])
    with pytest.raises(bk.BackendKwargsError, match=r"SentenceTransformer\.encode runs in eager even then"):
        bk.report(compiled)

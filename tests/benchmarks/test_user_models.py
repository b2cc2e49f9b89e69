"""A user's own models as cases: by name from transformers and timm, or from a factory."""

import pickle
from importlib.util import find_spec

import pytest
import torch

from backend_kwargs import BackendKwargsError
from benchmarks.workloads.user_models import model_case

CPU = torch.device("cpu")
TINY = "num_hidden_layers=1&hidden_size=32&num_attention_heads=2&intermediate_size=32&batch=2"
FACTORY = """
import torch

class Sum(torch.nn.Linear):
    def forward(self, x, *, scale):
        return {"sum": super().forward(x) * scale, "count": 2}

def named():
    return Sum(3, 4), {"x": torch.randn(2, 3), "scale": torch.ones(2, 1)}

def listed():
    return torch.nn.Linear(3, 4), [torch.randn(2, 3)]

def single():
    return torch.nn.Linear(3, 4), torch.randn(2, 3)

def function():
    return torch.sin, (torch.arange(4.0),)
"""


def outputs(case, dtype=torch.float32):
    problem = case.build(CPU, dtype, "full")
    with torch.no_grad():
        output = problem.fn(*problem.args)
    return output if isinstance(output, tuple) else (output,)


@pytest.mark.parametrize(
    ("spec", "shapes"),
    [
        pytest.param(f"BertModel?{TINY}&tokens=8", [(2, 8, 32), (2, 32)], id="text"),
        pytest.param(f"ViTModel?{TINY}&image_size=32", [(2, 5, 32), (2, 32)], id="image"),
        pytest.param(
            "T5Model?num_layers=1&d_model=16&d_kv=8&d_ff=16&num_heads=2&batch=2&tokens=4",
            [(2, 4, 16), (2, 4, 16)],
            id="encoder-decoder",
        ),
    ],
)
def test_transformers(spec, shapes):
    pytest.importorskip("transformers")
    made = outputs(model_case(f"transformers:{spec}"), torch.bfloat16)
    assert [tuple(tensor.shape) for tensor in made] == shapes
    assert all(tensor.dtype == torch.bfloat16 and tensor.isfinite().all() for tensor in made)


def test_transformers_is_one_graph(fresh_dynamo):
    pytest.importorskip("transformers")
    problem = model_case(f"transformers:BertModel?{TINY}&tokens=8").build(CPU, torch.float32, "full")
    with torch.no_grad():
        compiled = torch.compile(problem.fn, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(*problem.args), problem.fn(*problem.args))


def test_timm():
    if not find_spec("timm"):  # imported, it needs what `imported` declares of torchvision
        pytest.skip("no timm")
    (logits,) = outputs(model_case("timm:vit_tiny_patch16_224?batch=2&img_size=32&num_classes=7"))
    assert logits.shape == (2, 7)


@pytest.mark.parametrize("factory", ["named", "listed", "single", "function"])
def test_factory(factory, tmp_path):
    """A factory returns inputs by position or by name, one tensor or several, as for `backend-kwargs compare`."""
    file = tmp_path / "factories.py"
    file.write_text(FACTORY)
    (output,) = outputs(model_case(f"{file}:{factory}"), torch.float64)
    assert output.shape == ((4,) if factory == "function" else (2, 4))
    assert output.dtype == torch.float64


def test_case_travels_to_another_process():
    pytest.importorskip("transformers")
    case = model_case(f"transformers:BertModel?{TINY}&tokens=8", "train")
    sent = pickle.loads(pickle.dumps(case))
    assert (sent.name, sent.modes) == (case.name, ("train",))
    torch.manual_seed(0)
    here = outputs(case)
    torch.manual_seed(0)
    torch.testing.assert_close(outputs(sent), here)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        pytest.param(
            "BertModel",
            "A model must be 'transformers:CLASS?option=value', 'timm:NAME?option=value' or 'FILE:FACTORY', "
            "got 'BertModel' (str).",
            id="form",
        ),
        pytest.param(
            "transformers:BertModl", "Unknown model of transformers 'BertModl'. Did you mean 'BertModel'?", id="class"
        ),
        pytest.param(
            "transformers:BertModel?num_hidden_layer=2",
            "Unknown option of BertConfig 'num_hidden_layer'. Did you mean 'num_hidden_layers'?",
            id="option",
        ),
        pytest.param(
            "transformers:BertModel?num_hidden_layers=1&num_attention_heads=5",
            "The model BertModel cannot be created: ValueError: The hidden size (768) is not a multiple of the number "
            "of attention heads (5). Write a factory and pass FILE:FACTORY.",
            id="value",
        ),
        pytest.param(
            "transformers:CLIPModel",
            "Inputs for CLIPModel cannot be created: AttributeError: 'CLIPConfig' object has no attribute "
            "'vocab_size'. Write a factory and pass FILE:FACTORY.",
            id="inputs",
        ),
        pytest.param("nowhere.py:model", "No file 'nowhere.py'.", id="file"),
    ],
)
def test_error_message(spec, message):
    if spec.startswith("transformers"):
        pytest.importorskip("transformers")
    with pytest.raises(BackendKwargsError) as e:
        model_case(spec).build(CPU, torch.float32, "full")
    assert str(e.value) == message


def test_timm_names_the_nearest():
    if not find_spec("timm"):  # imported, it needs what `imported` declares of torchvision
        pytest.skip("no timm")
    with pytest.raises(BackendKwargsError) as e:
        model_case("timm:vit_tiny_patch16_225").build(CPU, torch.float32, "full")
    assert str(e.value) == "Unknown model of timm 'vit_tiny_patch16_225'. Did you mean 'vit_tiny_patch16_224'?"

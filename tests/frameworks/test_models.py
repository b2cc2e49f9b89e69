"""lightning, diffusers, torchtitan, sentence-transformers, timm and Jupyter, as in docs/frameworks.md."""

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.frameworks.page import SECTIONS, compiled, run, snippets

FAST = "tmpl-inductor:fast_compile"


@pytest.fixture
def lightning_module():
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(8, 1)

        def training_step(self, batch, index):
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    return Module


@pytest.fixture
def loader():
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(8, 8)), 4)


@pytest.mark.filterwarnings("ignore")  # lightning's warnings about torch's pytrees and the number of data workers
def test_lightning_fits_a_compiled_module(lightning_module, loader):
    """Trainer calls the compiled module, and its checkpoint loads uncompiled."""
    names = run("lightning", module=lightning_module(), loader=loader, torch=torch)
    assert names["trainer"].global_step == 2
    assert compiled() == ["tmpl-inductor:auto"]
    names["trainer"].save_checkpoint("saved.ckpt")
    lightning_module.load_from_checkpoint("saved.ckpt")


@pytest.mark.filterwarnings("ignore")  # as above
def test_lightning_fits_under_ddp(lightning_module, loader):
    """lightning's ddp strategy, with one process, trains a compiled module."""
    import lightning

    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    trainer = lightning.Trainer(max_steps=2, accelerator="cpu", devices=1, strategy="ddp", **quiet)
    try:
        trainer.fit(torch.compile(lightning_module(), backend=FAST), loader)
        assert trainer.global_step == 2
        assert compiled() == [FAST]
    finally:
        torch.distributed.destroy_process_group()


def flux_inputs():
    hidden, encoder, pooled = torch.randn(1, 16, 4), torch.randn(1, 8, 32), torch.randn(1, 32)
    ids = {"img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(8, 3), "timestep": torch.tensor([1.0])}
    return {"hidden_states": hidden, "encoder_hidden_states": encoder, "pooled_projections": pooled, **ids}


def test_diffusers_compiles_repeated_blocks():
    """Blocks of one class are compiled once, and give eager's results."""
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(0)
    sizes = {"patch_size": 1, "in_channels": 4, "num_layers": 2, "num_single_layers": 2, "attention_head_dim": 16}
    more = {"num_attention_heads": 2, "joint_attention_dim": 32, "pooled_projection_dim": 32}
    transformer = FluxTransformer2DModel(**sizes, **more, axes_dims_rope=[4, 4, 8]).eval()
    inputs = flux_inputs()
    with torch.no_grad():
        expected = transformer(**inputs).sample
        names = run("diffusers", transformer=transformer, inputs=inputs)
    torch.testing.assert_close(names["sample"], expected, atol=1e-5, rtol=1e-4)
    assert set(compiled()) == {FAST}
    assert len(compiled()) <= 3  # of the four blocks, two are of each class


@pytest.fixture
def llama():
    """Return the config of torchtitan's smallest Llama, whose attention is FlexAttention."""
    from torchtitan.models.llama3 import llama3_configs

    return llama3_configs["debugmodel"](attn_backend="flex")


@pytest.fixture
def parallel_dims():
    from torchtitan.distributed.parallel_dims import ParallelDims

    return ParallelDims(**dict.fromkeys(("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "world_size"), 1))


def test_torchtitan_compiles_each_block(llama, parallel_dims):
    """`apply_compile` passes the name to each block, here feed-forward ones, since attention needs a GPU."""
    import torch._dynamo.config as dynamo

    model = nn.Module()
    model.layers = nn.ModuleDict({str(at): llama.layers[at].feed_forward.build() for at in range(2)})
    block = model.layers["0"]
    with torch.no_grad():
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.02)
    x = torch.randn(2, block.w1.in_features)
    expected = block(x)
    with dynamo.patch(capture_scalar_outputs=False, skip_fwd_side_effects_in_bwd_under_checkpoint=False):
        run("torchtitan", model=model, parallel_dims=parallel_dims)
        torch.testing.assert_close(block(x), expected, atol=1e-4, rtol=1e-3)
    assert compiled() == [FAST]


def test_torchtitan_refuses_other_backends_for_flex_attention(llama, parallel_dims):
    """The page quotes torchtitan's error for a model with FlexAttention."""
    with pytest.raises(ValueError, match="Model uses FlexAttention") as raised:
        run("torchtitan", model=llama.build(), parallel_dims=parallel_dims)
    found = str(raised.value).replace(repr(FAST), "...").split(";")[0]
    assert found in " ".join(SECTIONS["torchtitan"].split())


def test_torchtitan_way_round_sets_inductors_config():
    """Within the page's patch plain inductor uses the template's options; afterwards the config is as before."""
    from torch._inductor import config

    seen, before = [], config.max_autotune_gemm_backends
    watched = torch.compile(lambda x: x + 1, backend=lambda gm, _: seen.append(config.max_autotune_gemm_backends) or gm)
    run("torchtitan", 1, compiled=watched, x=torch.ones(2))
    assert (seen, config.max_autotune_gemm_backends) == (["ATEN"], before)


@pytest.fixture
def sentence_transformer():
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from transformers import BertConfig, BertModel, BertTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "sentence"]
    Path("vocab.txt").write_text("\n".join(words), encoding="utf-8")
    BertTokenizerFast("vocab.txt").save_pretrained("bert")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    BertModel(BertConfig(vocab_size=len(words), **sizes)).save_pretrained("bert")
    return SentenceTransformer(modules=[Transformer("bert"), Pooling(32)], device="cpu")


def test_sentence_transformers_encodes_compiled(sentence_transformer):
    """The first module is compiled, and `encode` gives eager's embeddings."""
    expected = torch.tensor(sentence_transformer.encode(["a sentence"]))
    names = run("sentence-transformers", model=sentence_transformer)
    torch.testing.assert_close(torch.tensor(names["embeddings"]), expected, atol=1e-5, rtol=1e-4)
    assert compiled() == [FAST]


def test_sentence_transformers_passes_by_a_compiled_inner_model(sentence_transformer):
    """Compiling the inner model compiles nothing, as the page warns."""
    sentence_transformer[0].model.compile(backend=FAST)
    sentence_transformer.encode(["a sentence"])
    assert compiled() == []


def test_timm_freezes():
    """A timm model is frozen, and gives eager's results."""
    images = torch.randn(1, 3, 32, 32)
    names = run("timm", images=images, torch=torch)
    with torch.no_grad():
        torch.testing.assert_close(names["logits"], names["model"](images), atol=1e-4, rtol=1e-3)
    assert compiled() == ["tmpl-inductor:freezing"]


def test_jupyter_runs_the_cell():
    """A notebook kernel runs the page's cell and shows the report; the next cell finds its template."""
    import nbformat
    from nbclient import NotebookClient

    again = 'print(torch.compile(lambda x: x * 2, backend="tmpl-inductor:mine")(torch.ones(2)))'
    cells = [nbformat.v4.new_code_cell(code) for code in (*snippets("Jupyter"), again)]
    done = NotebookClient(nbformat.v4.new_notebook(cells=cells), kernel_name="python3").execute()
    first, second = ("".join(each.get("text", "") for each in cell["outputs"]) for cell in done["cells"])
    assert first.startswith("1 graph, 0 breaks, 0 recompiles")
    assert "<lambda>: tmpl-inductor:mine" in first
    assert second == "tensor([2., 2.])\n"

"""`tuned_products`: which products max_autotune tunes."""

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import fresh_cache
from torch._inductor.virtualized import V

import backend_kwargs as bk
from backend_kwargs.backends.inductor.tuned_products import TunedProducts, with_tuned


@pytest.fixture
def own_cache(fresh_dynamo):
    """Give the test a cache of Inductor's of its own."""
    with fresh_cache():
        yield


class Looks(CustomGraphPass):
    """Keeps the class of the choices with which Inductor compiles a graph."""

    def __init__(self):
        self.seen = []

    def __call__(self, graph):
        self.seen.append(type(V.choices).__name__)

    def uuid(self):
        return "looks"


def compiled_with(names, looks, model, x):
    torch._dynamo.reset()
    counters.clear()
    options = {"post_grad_custom_post_pass": looks, "max_autotune_gemm": True, "tuned_products": names}
    fn = torch.compile(model, backend=bk.make_backend("tmpl-inductor", options=options))
    torch.testing.assert_close(fn(x), model(x))


@torch.no_grad()
def test_inductor_compiles_with_these_choices_and_keeps_its_own(own_cache):
    """Inductor asks our choices while it compiles; afterwards the thread has its own again."""
    model, x, looks = torch.nn.Linear(16, 32), torch.randn(8, 16), Looks()
    compiled_with(("8x32x16",), looks, model, x)
    assert looks.seen == ["TunedProducts"]
    assert type(V.choices).__name__ == "InductorChoices"
    compiled_with(None, looks, model, x)
    assert looks.seen == ["TunedProducts", "InductorChoices"]


@torch.no_grad()
def test_inductors_cache_tells_them_apart(own_cache):
    """Code for other tuned products is not taken from Inductor's cache; for the same ones, in any order, it is."""
    model, x, looks = torch.nn.Linear(16, 32), torch.randn(8, 16), Looks()
    with torch._functorch.config.patch(enable_autograd_cache=False):
        for names in (("8x32x16", "1x1x1"), ("1x1x1", "8x32x16"), ("8x32x16",), ()):
            compiled_with(names, looks, model, x)
    assert len(looks.seen) == 3


def test_training_compiles_its_backward_graph_with_them(own_cache):
    """The backward graph, which another thread compiles, is compiled with our choices too."""
    model, x, looks = torch.nn.Linear(16, 32), torch.randn(8, 16, requires_grad=True), Looks()
    torch._dynamo.reset()
    options = {"post_grad_custom_post_pass": looks, "max_autotune_gemm": True, "tuned_products": ("8x32x16",)}
    torch.compile(model, backend=bk.make_backend("tmpl-inductor", options=options))(x).sum().backward()
    assert looks.seen == ["TunedProducts", "TunedProducts"]


@pytest.mark.parametrize(
    ("sizes", "kept"),
    [
        pytest.param((8, 32, 16), 2, id="tuned"),
        pytest.param((8, 32, 17), 1, id="others"),
    ],
)
def test_other_products_have_the_librarys_kernel_alone(monkeypatch, sizes, kept):
    """Triton's templates are left out for products that are not named."""
    from torch._inductor.choices import InductorChoices
    from torch._inductor.kernel.mm import aten_mm, mm_template

    monkeypatch.setattr(InductorChoices, "get_template_configs", lambda self, inputs, templates, *_: templates)
    inputs = type("Inputs", (), {"mnk_hinted": lambda self: sizes})()
    choices = TunedProducts(["8x32x16"])
    assert choices.get_template_configs(inputs, [aten_mm, mm_template], "mm") == [aten_mm, mm_template][:kept]
    assert choices.get_template_configs(inputs, [mm_template], "mm") == [mm_template]  # the library is not asked for


@pytest.mark.parametrize(
    ("sizes", "found"), [pytest.param((50, 32, 16), True, id="tuned"), pytest.param((50, 32, 3), False, id="others")]
)
def test_other_convolutions_have_the_librarys_kernel_alone(monkeypatch, sizes, found):
    """Triton's configurations are left out for convolutions that are not named."""
    from torch._inductor.choices import InductorChoices

    monkeypatch.setattr(InductorChoices, "get_conv_configs", lambda self, device: lambda m, n, k, dtype_size: ["one"])
    configs = TunedProducts(["50x32x16"]).get_conv_configs("cuda")
    assert bool([*configs(*sizes, dtype_size=2)]) is found


def test_the_factory_pickles():
    """torch 2.11 pickles the option for its cache's key."""
    import pickle

    made = with_tuned({}, ("8x32x16", "1x1x1"))["inductor_choices_class"]
    assert pickle.loads(pickle.dumps(made)) == made
    assert made().uuid() == "backend_kwargs.tuned_products 1x1x1 8x32x16"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param(
            {"tuned_products": ("8x32",)},
            "Option 'tuned_products' must be tuple[str of the form 'MxNxK', ...] | None, got ('8x32',) (tuple).",
            id="two sizes",
        ),
        pytest.param(
            {"tuned_products": ("8x32x16",), "inductor_choices_class": int},
            "Options 'tuned_products' and 'inductor_choices_class' cannot be combined; leave one out.",
            id="other choices",
        ),
    ],
)
def test_what_is_wrong_raises_at_once(options, message):
    """Wrong names and other choices raise when the backend is made."""
    with pytest.raises(bk.BackendKwargsError) as error:
        bk.make_backend("tmpl-inductor", max_autotune_gemm=True, options=options)
    assert str(error.value) == message


def test_without_autotuning_it_has_no_effect():
    """`explain` says that the option needs max_autotune."""
    shown = bk.explain(bk.make_backend("tmpl-inductor", tuned_products=("8x32x16",)))
    assert "it is read only under max_autotune or max_autotune_gemm" in str(shown)

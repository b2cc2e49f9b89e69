"""Facts about AOTAutograd, the exporters, and process groups."""

import datetime as dt
from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch._functorch import config

from backend_kwargs.graphs.freezing import reattach_parameters
from backend_kwargs.torch_internals import distributed, functorch, onnx, pytree


def test_inputs_are_described(fresh_dynamo):
    """AOTAutograd says which inputs are parameters and buffers, and which outputs are written inputs."""
    found = []

    def compile_one(gm, example_inputs):
        found.append(Counter(type(node.meta["desc"]) for node in gm.graph.find_nodes(op="placeholder")))
        found.append(Counter(map(type, gm.graph.output_node().meta["desc"])))
        return gm.forward

    def backend(gm, inputs):
        attached, kept = reattach_parameters(gm, inputs)
        call = functorch.aot_autograd(fw_compiler=compile_one, inference_compiler=compile_one)
        run = call(attached, [inputs[at] for at in kept])
        return lambda *args: run(*(args[at] for at in kept))

    class Net(nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            self.count.add_(1)
            return super().forward(x)

    net = Net()
    with torch.no_grad():
        torch.compile(net, backend=backend)(torch.ones(2, 4))
    inputs, outputs = found
    assert (inputs[functorch.ParamAOTInput], outputs[functorch.InputMutationAOTOutput]) == (2, 1)


def test_aot_autograds_options_hold_in_their_context():
    """An option has its value from before afterwards."""
    before = config.force_non_lazy_backward_lowering
    with functorch.patched(force_non_lazy_backward_lowering=not before):
        assert config.force_non_lazy_backward_lowering is not before
    assert config.force_non_lazy_backward_lowering is before


@pytest.mark.parametrize(("shared", "count"), [pytest.param(True, 1, id="shared"), pytest.param(False, 2, id="plain")])
def test_options_can_be_left_out_of_keys(shared, count):
    """What AOTAutograd's cache hashes of the options has each, but for one that is shared."""
    name, saved = "force_non_lazy_backward_lowering", set()
    with functorch.shared_in_cache(name) if shared else nullcontext():
        for value in (False, True):
            with functorch.patched(**{name: value}):
                saved.add(config.save_config())
    assert len(saved) == count


def test_only_aot_compile_must_save():
    """The option that aot_compile() sets is off."""
    assert functorch.saves_strictly() is False


def test_structures_are_taken_apart_and_put_together():
    """Leaves come in order, keys of dictionaries as they were inserted."""
    tree = {"b": [1, (2,)], "a": 3}
    leaves, spec = pytree.tree_flatten(tree)
    assert (leaves, pytree.tree_unflatten(leaves, spec)) == ([1, 2, 3], tree)
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(tree)[0]]
    assert paths == ["['b'][0]", "['b'][1][0]", "['a']"]


def test_a_group_has_a_store_and_a_timeout(tmp_path):
    """The store is that of the group, and the timeout is the shortest."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=dt.timedelta(seconds=77))
    try:
        distributed.store().set("key", "value")
        assert (distributed.store().get("key"), distributed.shortest_timeout_s()) == (b"value", 77)
    finally:
        torch.distributed.destroy_process_group()


def test_the_exporter_says_what_it_translates():
    """It translates a product, and no operator that nobody gave it."""
    pytest.importorskip("onnxscript")
    registry = onnx.translated_operators()
    assert registry.is_registered(torch.ops.aten.mm.default)
    assert not registry.is_registered(torch.ops.aten._print.default)


@pytest.mark.parametrize("retain", [True, False])
def test_a_backward_pass_frees_what_was_saved(fresh_dynamo, retain):
    """A node of AOTAutograd's has what its forward pass saved, until a backward pass that does not retain it."""
    x = torch.ones(3, requires_grad=True)
    loss = torch.compile(lambda x: x.sin().sum(), backend="aot_eager")(x)
    assert functorch.keeps_saved(loss.grad_fn)
    loss.backward(retain_graph=retain)
    assert functorch.keeps_saved(loss.grad_fn) is retain

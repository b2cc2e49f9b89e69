"""Precisions in a race: they can win only within their bound, and the measured error is stored with the bound."""

import copy

import pytest
import torch
from torch import nn

import backend_kwargs as bk
from backend_kwargs.auto import budget, process_memory
from backend_kwargs.auto.decisions_toml import read_decisions, write_decisions
from backend_kwargs.auto.store import Catalogue
from backend_kwargs.errors import BackendKwargsWarning
from backend_kwargs.options.machine import installed_version
from backend_kwargs.options.templates import find_template
from tests.auto.graphs import change, rows_of

torchao = pytest.mark.skipif(installed_version("torchao") is None, reason="torchao is not installed")
slow_here = pytest.mark.filterwarnings("ignore:.*cannot act fully here")
pytestmark = slow_here
BF16 = {"precision": "bf16", "max_error": 0.01}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 32), nn.Sigmoid()).eval()


def rows(count: int = 8) -> torch.Tensor:
    return torch.randn(count, 64, generator=torch.Generator().manual_seed(1))


def error(result: torch.Tensor, model: nn.Module, x: torch.Tensor) -> float:
    with torch.no_grad():
        precise = copy.deepcopy(model).double()(x.double())
    return ((result.double() - precise).square().mean() / precise.square().mean()).sqrt().item()


@torch.no_grad()
def call(compiled, x: torch.Tensor) -> torch.Tensor:
    return compiled(x)


def test_without_consent_none_is_raced(auto, store):
    """No lower precision is raced unless the caller names it."""
    call(auto(net()), rows())
    assert set(rows_of(store)) == {"eager", "default"}


def test_the_winner_is_within_its_bound(auto, store, default_wins):
    """The winner's error is within the bound; store, report and table show both."""
    model, x = net(), rows()
    compiled = auto(model, **BF16)
    result = call(compiled, x)
    row = rows_of(store)["bf16"]
    assert row.won
    assert (row.options, row.max_error) == ({"precision": "bf16", "max_error": 0.01}, 0.01)
    assert row.error == pytest.approx(error(result, model, x), rel=0.1)
    (graph,) = bk.report(compiled).graphs
    assert (graph.precision.error, graph.precision.max_error) == (row.error, 0.01)
    assert f"error {row.error:.2g}  <- kept" in graph.race.table
    (decision,) = Catalogue(store).all()
    assert decision.facts.endswith(f", error {row.error:.2g} (max_error=0.01)")


def test_beyond_the_bound_it_never_wins(auto, store, default_wins, log):
    """A candidate beyond the bound is timed, shown with its error, and never chosen."""
    model, x = net(), rows()
    result = call(auto(model, precision="bf16", max_error=1e-6), x)
    assert error(result, model, x) < 1e-6
    row = rows_of(store)["bf16"]
    assert (row.status, row.won, row.max_error) == ("fail_accuracy", False, 1e-6)
    assert row.error > 1e-5
    assert row.seconds > 0
    assert (
        f"bf16                     fail_accuracy: output[0]: error {row.error:.2g}, above max_error=1e-06 (" in log.text
    )


def test_beyond_the_bound_it_takes_no_time_that_is_not_left(monkeypatch, auto, store):
    """Its time is only shown, so it is not measured where calls are too slow for what is left of the budget."""
    monkeypatch.setattr(budget, "LEAST_CALLS", 10**9)
    call(auto(net(), precision="bf16", max_error=1e-6), rows())
    row = rows_of(store)["bf16"]
    assert (row.status, row.seconds) == ("fail_accuracy", None)


@torchao
def test_several_are_raced(auto, store):
    """Each precision that the caller names is a separate candidate."""
    call(auto(net(), precision="bf16,int8-dynamic,int8-weight", max_error=0.05), rows())
    found = rows_of(store)
    assert {"bf16", "int8-dynamic", "int8-weight"} < set(found)
    assert all(found[name].error < 0.05 for name in ("bf16", "int8-dynamic", "int8-weight"))


def test_a_precision_joins_other_steps(auto, store, default_wins):
    """A precision is merged onto the options of the current best, and later steps onto its options."""
    call(auto(net(), ["no_size_asserts"], **BF16), rows())
    assert rows_of(store)["bf16"].options == {"size_asserts": False, "precision": "bf16", "max_error": 0.01}


def test_training(auto, store, default_wins):
    """In training a race checks outputs and gradients against the bound."""
    model = net().train()
    auto(model, precision="bf16", max_error=0.02)(rows()).sum().backward()
    assert rows_of(store)["bf16"].won
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}


@torchao
def test_int8_is_no_candidate_in_training(auto, store):
    """In training the row of a precision for inference says why it was not raced."""
    auto(net().train(), precision="int8-dynamic", max_error=0.05)(rows()).sum().backward()
    assert rows_of(store)["int8-dynamic"].reason == (
        "UnfitPrecisionError: Precision 'int8-dynamic' is refused: it is for inference: call the model under "
        "torch.no_grad()."
    )


def test_random_graphs_have_no_reference(auto, store):
    """If no error can be measured, the precision is skipped with the reason."""
    model = nn.Sequential(nn.Linear(64, 96), nn.Dropout(0.5)).train()
    auto(model, **BF16)(rows()).sum().backward()
    row = rows_of(store)["bf16"]
    assert (row.status, row.reason) == (
        "skipped",
        "its error cannot be measured in float64: it draws random numbers",
    )


def test_a_remembered_precision_is_measured_anew(auto, store, default_wins):
    """The error is measured again for another module with the same graph, which falls back if it exceeds the bound."""
    x = rows()
    call(auto(net(), **BF16), x)
    process_memory.forget_process()
    torch._dynamo.reset()
    worse = net()
    with torch.no_grad():
        worse[2].weight.copy_(worse[2].weight - worse[2].weight.mean(1, keepdim=True)).mul_(300)
    compiled = auto(worse, **BF16)
    with pytest.warns(BackendKwargsWarning) as warned:
        result = call(compiled, x)
    assert str(warned[-1].message).startswith("A graph is compiled without precision 'bf16': output[0]: error 0.")
    assert error(result, worse, x) < 1e-4
    assert len(Catalogue(store).all()) == 1


def test_bounds_are_questions_of_their_own(auto, store):
    """A decision with one bound is not used for another bound, nor without a precision."""
    for options in ({}, BF16, {**BF16, "max_error": 0.02}):
        torch._dynamo.reset()
        call(auto(net(), **options), rows())
    assert len({decision.key for decision in Catalogue(store).all()}) == 3


def test_a_store_cannot_lower_a_precision(auto, store):
    """A stored decision with a precision that the caller did not name is not used."""
    model, x = net(), rows()
    call(auto(model), x)
    change(store, winner="bf16", options=BF16)
    process_memory.forget_process()
    torch._dynamo.reset()
    assert error(call(auto(model), x), model, x) < 1e-6


def test_export(auto, store, tmp_path, default_wins):
    """A decision with a precision is exported as TOML, and as a template with its bound."""
    model, x = net(), rows()
    call(auto(model, **BF16), x)
    (decision,) = Catalogue(store).all()
    write_decisions([decision], tmp_path / "decisions.toml")
    (read,) = read_decisions(tmp_path / "decisions.toml", lambda name: find_template(name).options)
    assert (read.winner, read.options) == ("bf16", BF16)
    (template,) = bk.load_templates(tmp_path / "decisions.toml")
    assert bk.make_backend(f"tmpl-inductor:{template}").options["precision"] == ("bf16",)

"""One group: every peer checked on what is timed, timed beside the others, and told apart when it goes wrong."""

import pytest
import tiny_cases
import torch
from tiny_cases import DOUBLE, MUTATING, NOISY, SWEEP, TRAINED

from benchmarks.peers import Peer
from benchmarks.records import AGAIN
from benchmarks.worker import compile_peer


def test_cells_of_a_group(timed):
    """Peers that pass have as many samples as rounds, in one group with the baseline's controls; others have none."""
    cells = timed(DOUBLE, ("eager", "hand:*"))
    assert {peer: (cell.status, len(cell.wall_s)) for peer, cell in cells.items()} == {
        "eager": ("pass", 3),
        "hand:add": ("pass", 3),
        "hand:wrong": ("fail_accuracy", 0),
        AGAIN: ("pass", 3),
        "+5 %": ("pass", 3),
    }
    assert {cell.group_id for cell in cells.values()} == {"g"}
    assert cells["eager"].work == {"flops": 64, "bytes": 512, "unit": "fp32", "written": None}


def test_gradients_are_checked(timed):
    """A kernel whose gradients are wrong fails; the work is the first mode's alone."""
    cells = timed(DOUBLE, ("eager", "hand:*"), mode="fwd_bwd")
    assert cells["hand:add"].status == "pass"
    assert cells["hand:wrong"].status == "fail_accuracy"
    assert cells["eager"].work is None


def test_mutated_arguments_are_checked(timed):
    """A peer that gives the right result, but leaves its arguments as they were, is wrong."""
    cells = timed(MUTATING, ("eager", "hand:*"))
    assert cells["hand:same"].status == "pass"
    assert (cells["hand:forgets"].status, cells["hand:forgets"].reason.partition(":")[0]) == (
        "fail_accuracy",
        "arguments[0]",
    )


def test_eager_that_differs_from_itself_stops_the_case(timed):
    """Where eager cannot be relied on, nobody has a time."""
    cell = timed(NOISY)["eager"]
    assert (cell.status, cell.wall_s) == ("eager_two_runs_differ", [])


def test_sweep_is_one_dynamic_compile(timed):
    """Several lengths are one call, and one graph serves them."""
    cells = timed(SWEEP, ("eager",), extra=(Peer("aot", "control", "aot_eager"),))
    assert cells["aot"].status == "pass", cells["aot"].reason


def test_training_compares_parameters_after_a_step(timed):
    """An optimizer step of a compiled model ends where eager's ends."""
    cells = timed(TRAINED, ("eager",), extra=(Peer("aot", "control", "aot_eager"),))
    assert cells["aot"].status == "pass", cells["aot"].reason


def half_gradients(gm, example_inputs):
    return lambda *args: tuple(0.5 * leaf + 0.5 * leaf.detach() for leaf in gm(*args))


def test_training_notices_wrong_gradients(timed):
    """Right outputs with half of the gradient do not pass."""
    cells = timed(TRAINED, ("eager",), extra=(Peer("half", "control", half_gradients),))
    assert (cells["half"].status, cells["half"].reason.partition("[")[0]) == ("fail_accuracy", "gradients")


def breaks(x):
    y = x * 2
    torch._dynamo.graph_break()
    return y + 0


def recompiles(x):
    tiny_cases.turn = getattr(tiny_cases, "turn", "") + "."
    return x * 2 + 0 * len(tiny_cases.turn)


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        pytest.param(breaks, "RuntimeError: the graph broke: 2 graphs. ", id="break"),
        pytest.param(recompiles, "RuntimeError: compiled ", id="recompile"),
        pytest.param(torch._dynamo.disable(lambda x: x * 2), "RuntimeError: the graph broke", id="eager"),
    ],
)
def test_what_does_not_stay_one_graph_fails(timed, fn, reason):
    """A graph break, a recompile and a silent fall back to eager have no latency."""
    build = DOUBLE.build

    def planted(*args):
        problem = build(*args)
        return type(problem)(fn, problem.args)

    case = type(DOUBLE)("planted", "tiny", planted, dtype=torch.float32)
    cell = timed(case, ("eager",), extra=(Peer("compiled", "control", "eager"),))["compiled"]
    assert (cell.status, cell.wall_s) == ("fail_to_run", [])
    assert cell.reason.startswith(reason) or (fn is not breaks and fn is not recompiles), cell.reason


def test_nine_peers_each_compile(timed):
    """Beyond dynamo's limit of eight variants each peer still has a graph of its own."""
    extra = tuple(Peer(f"peer {at}", "control", "eager", options={}) for at in range(10))
    cells = timed(DOUBLE, ("eager",), extra=extra)
    assert {cells[peer.name].status for peer in extra} == {"pass"}


def test_what_cannot_be_had_says_why(timed):
    """A peer for another device is no failure."""
    cell = timed(DOUBLE, ("eager", "eager+graph"))["eager+graph"]
    assert (cell.status, cell.reason) == ("unavailable", "no peer of its own on cpu")


def test_compile_in_a_process_of_its_own(job):
    """A fresh compile tells cold seconds and memory; a warm one its seconds alone."""
    peer = Peer("aot", "control", "aot_eager")
    cold, warm = (compile_peer(lambda step: None, job(DOUBLE, extra=(peer,)), "aot", first) for first in (True, False))
    assert (cold.status, cold.compile.fresh, cold.compile.warm_s, warm.compile.cold_s) == ("pass", True, None, None)
    assert cold.compile.cold_s > 0
    assert warm.compile.warm_s > 0

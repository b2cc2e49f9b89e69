"""The ranks of a process group use one decision, and none waits for ever."""

import json
import math
from datetime import timedelta

import pytest
import torch

import backend_kwargs
from backend_kwargs.auto import decide, process_memory, ranks
from backend_kwargs.auto.settings import RaceSettings
from backend_kwargs.facts.decision import Decision, Unraced, as_json
from tests import forks
from tests.auto.graphs import backend_of, chain, logged


def test_collectives_are_not_raced(races, log, tmp_path):
    """A graph with collectives is not run by one rank alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'init'}", rank=0, world_size=1)
    try:
        x = torch.randn(8)
        compiled = torch.compile(
            lambda x: dist._functional_collectives.all_reduce(x * 2, "sum", "0") + 1, backend=backend_of()
        )
        assert torch.allclose(compiled(x), x * 2 + 1)
    finally:
        dist.destroy_process_group()
    assert logged(log) == "auto: default for a graph not raced: it communicates with other ranks (0.0 s)"


@pytest.fixture
def two_ranks():
    """Make this process rank 0 of two; the other does not exist."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@torch._dynamo.allow_in_graph
def opaque(x):
    return x * 2


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize("op", [torch.ops.backend_kwargs_tests.nap, opaque], ids=["operator", "function"])
def test_what_may_hide_a_collective_is_not_raced(races, log, op):
    """A user's operator is not raced on several ranks, since it may wait for the others."""
    x = torch.randn(8)
    assert torch.allclose(torch.compile(lambda x: op(x * 2) + 1, backend=backend_of())(x), op(x * 2) + 1)
    assert races.count == 0
    why = "it has an operator that is not torch's, which may communicate with other ranks"
    assert logged(log) == f"auto: default for a graph not raced: {why} (0.0 s)"


def test_a_users_operator_is_raced_where_there_is_one_rank(races):
    """With a single rank, a user's operator is raced."""
    torch.compile(lambda x: torch.ops.backend_kwargs_tests.nap(x * 2) + 1, backend=backend_of())(torch.randn(8))
    assert races.count == 1


@pytest.mark.parametrize("budget_s", [60.0, math.inf])
@pytest.mark.parametrize("known", [True, False], ids=["decided here", "unknown here"])
def test_the_word_of_another_rank_holds(auto, races, monkeypatch, log, known, budget_s):
    """The first rank to reach a graph decides, even if a later rank has a stored decision."""
    word, x = torch.distributed.HashStore(), torch.randn(8, 64)
    if known:
        auto(chain)(x)
        torch._dynamo.reset()
    key = key_of_next(monkeypatch, x)
    word.add(f"{ranks.PREFIX}/{key}/{budget_s:g}/owner", 1)
    word.set(
        f"{ranks.PREFIX}/{key}/{budget_s:g}/decision",
        as_json(Decision(key, "", "default", facts="first come")),
    )
    monkeypatch.setattr(ranks, "_process_group_store", lambda: word)
    auto(chain, budget_s=budget_s)(x)
    assert logged(log) == "auto: default for first come (0.0 s)"


def key_of_next(monkeypatch, x):
    """Return the key of the next decision for `chain`."""
    keys = []
    with monkeypatch.context() as patch:
        patch.setattr(decide, "agreed", lambda key, decide, default, *_: keys.append(key) or default("asked"))
        torch.compile(chain, backend=backend_of())(x)
    torch._dynamo.reset()
    return keys[0]


def test_a_rank_that_stays_silent_is_not_waited_for_without_end(auto, races, monkeypatch, log):
    """A rank that waits longer than budget and grace compiles default."""
    word, x = torch.distributed.HashStore(), torch.randn(8, 64)
    word.add(f"{ranks.PREFIX}/{key_of_next(monkeypatch, x)}/0.1/owner", 1)
    monkeypatch.setattr(ranks, "_process_group_store", lambda: word)
    monkeypatch.setattr(ranks, "GRACE_S", 0.1)
    auto(chain, budget_s=0.1)(x)
    assert logged(log).startswith("auto: default for a graph not raced: timed out waiting for the racing rank")
    assert races.count == 0


class Unblocked(torch.distributed.HashStore):
    """A store that must not wait: others' calls of it and a Ctrl-C would wait too."""

    def wait(self, *_):
        pytest.fail("a rank blocks its store")


def test_a_decision_that_comes_later_is_taken(monkeypatch):
    """A rank that waits finds the decision at its next look."""
    word = Unblocked()
    monkeypatch.setattr(ranks.time, "sleep", lambda _: word.set("key/decision", "[]"))
    assert ranks._came(word, "key", 50)


def test_a_winner_that_no_rank_can_be_told_of_is_taken_by_none(auto, races, monkeypatch, log):
    """If JSON cannot represent the winner's option, all ranks compile default without waiting."""
    word = torch.distributed.HashStore()
    monkeypatch.setattr(ranks, "_process_group_store", lambda: word)
    backend_kwargs.register_template("mine", {"post_grad_custom_post_pass": print})
    races.winner, races.options = "mine", {"post_grad_custom_post_pass": print}
    with pytest.warns(backend_kwargs.BackendKwargsWarning) as warned:
        auto(chain, ["mine"])(torch.randn(8, 64))
    assert "Object of type builtin_function_or_method is not JSON serializable" in str(warned[0].message)
    assert logged(log).startswith("auto: default for a graph not raced")
    (key,) = [each.key for each in process_memory.memory().decisions.values()]
    assert word.check([f"{ranks.PREFIX}/{key}/300/decision"])


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize(
    ("second", "decided"),
    [
        pytest.param({"budget_s": 30.0}, 1, id="the same"),
        pytest.param({"budget_s": 60.0}, 2, id="a larger budget"),
        pytest.param({"budget_s": 30.0, "race": "always"}, 2, id="always"),
    ],
)
def test_ranks_may_decide_anew(monkeypatch, second, decided):
    """With a larger budget, and each time under race="always", the first rank decides a key again."""
    word, count = torch.distributed.HashStore(), 0
    monkeypatch.setattr(ranks, "_process_group_store", lambda: word)

    def decide_again():
        nonlocal count
        count += 1
        return Decision("key", "", "eager", facts=f"race {count}")

    def ask(**options):
        return ranks.agreed("key", decide_again, lambda *_: Decision("key", "", "default"), RaceSettings(**options))

    first = {"budget_s": 30.0, "race": second.get("race", "missing")}
    assert ask(**first).facts == "race 1"
    assert ask(**second).facts == f"race {decided}"


def default(why, unraced):
    return Decision("key", "", "default", facts=why, unraced=unraced, made=1.0)


def test_the_first_decision_stored_holds(monkeypatch):
    """A rank that has decided after the others gave up takes default like them."""
    word = torch.distributed.HashStore()
    monkeypatch.setattr(ranks, "_process_group_store", lambda: word)
    monkeypatch.setattr(ranks, "longest_wait_s", lambda settings: 0.0)
    others = []

    def ask(decide):
        return ranks.agreed("key", decide, default, RaceSettings())

    def decide_late():
        others.append(ask(None))
        return Decision("key", "", "eager", facts="a race that took long")

    assert [ask(decide_late).facts, others[0].facts] == ["timed out waiting for the racing rank"] * 2


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_rank_that_raises_leaves_default_to_the_others(monkeypatch, error):
    """Where the deciding rank raises or is interrupted, the others compile default at once."""
    word = torch.distributed.HashStore()
    monkeypatch.setattr(ranks, "_process_group_store", lambda: word)

    def failing():
        raise error

    def ask():
        return ranks.agreed("key", failing, default, RaceSettings())

    with pytest.raises(error):
        ask()
    assert ask() == default("the racing rank failed or was interrupted", Unraced.LEFT)


@pytest.mark.parametrize(
    ("budget_s", "timeout_s", "longest_s"),
    [
        pytest.param(30.0, 1800, 180.0, id="race"),
        pytest.param(300.0, 600, 300.0, id="NCCL's timeout"),
        pytest.param(math.inf, 40, 20.0, id="endless race"),
    ],
)
def test_a_rank_waits_for_half_of_the_groups_timeout_at_most(tmp_path, budget_s, timeout_s, longest_s):
    """The wait ends early enough for the collectives of the process group."""
    import torch.distributed as dist

    file, timeout = f"file://{tmp_path / 'init'}", timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", init_method=file, rank=0, world_size=1, timeout=timeout)
    try:
        assert ranks.longest_wait_s(RaceSettings(budget_s=budget_s)) == longest_s
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("two_ranks")
def test_default_is_compiled_where_the_store_cannot_be_reached(auto, races, log):
    """A process group whose store answers nothing, as torch's fake one, does not make the compile fail."""
    compiled = auto(chain)
    compiled(torch.randn(8, 64))
    why = "the process group's store cannot be reached"
    assert logged(log) == f"auto: default for a graph not raced: {why} (0.0 s)"
    assert backend_kwargs.report(compiled).graphs[0].race.unraced is Unraced.ALONE


RANK = """
import json, os, sys
import torch, torch.distributed as dist
import backend_kwargs
from backend_kwargs.auto import steps, process_memory, race, ranks
rank, file = int(sys.argv[1]), sys.argv[2]
os.environ["BACKEND_KWARGS_STORE"] = f"{file}-{rank}"
dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
row = steps.RaceRow("eager", won=True)
race.race = lambda request, tick: race.RaceResult(row, (row,), f"race of {rank}", 0.0, False)
backend = backend_kwargs.make_backend("tmpl-inductor:auto", candidates=[], budget_s=20)
words = ranks._process_group_store()
def shared(x): return torch.relu(x * 2 + 1).sum(-1)
def own(x): return (x - rank).sin() if rank else x.cos().exp()
def decided(fn): # by this rank, in the order of the words that the other waits for
    torch.compile(fn, backend=backend)(torch.randn(8, 64))
    words.set(f"{fn.__name__} of {rank}", "done")
    return list(process_memory.memory().decisions.values())[-1].facts
def after(word): words.wait([word])
if rank == 0: # it comes first to the shared graph, and last to its own
    after("stored of 1")
    seen = [decided(shared)]
    after("own of 1")
    seen.append(decided(own))
else: # it has a stored decision for the shared graph, and asks for its own while the other has not begun
    ask, ranks._process_group_store = ranks._process_group_store, lambda: None
    decided(shared)
    ranks._process_group_store = ask
    torch._dynamo.reset()
    process_memory.forget_process()
    mine = decided(own)
    words.set("stored of 1", "done")
    after("shared of 0")
    seen = [decided(shared), mine]
print(json.dumps(seen))
dist.barrier()
"""


def test_ranks_take_one_decision(tmp_path):
    """Two ranks agree on a graph that both compile, even if one has its own decision, and neither waits otherwise."""
    ranks = [forks.Fork("-c", RANK, rank, tmp_path / "init") for rank in range(2)]
    seen = [json.loads(rank.completed().stdout) for rank in ranks]
    assert seen == [["race of 0", "race of 0"], ["race of 0", "race of 1"]]


FOUR = """
import json, os, signal, sys
import torch, torch.distributed as dist
import backend_kwargs
from backend_kwargs.auto import decide, steps, process_memory, race, ranks
case, rank, file = sys.argv[1], int(sys.argv[2]), sys.argv[3]
os.environ["BACKEND_KWARGS_STORE"] = f"{file}-{rank}"
dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=4)
ranks.longest_wait_s = lambda settings: 5.0 if case == "killed" else 600.0
words, row = ranks._process_group_store(), steps.RaceRow("eager", won=True)
def raced(request, tick):
    if case == "killed":
        words.set("racing", "yes")
        os.kill(os.getpid(), signal.SIGKILL)
    return race.RaceResult(row, (row,), f"race of {rank}", 0.0, False)
race.race = raced
def decided(**options):
    torch._dynamo.reset()
    backend = backend_kwargs.make_backend("tmpl-inductor:auto", candidates=[], budget_s=100, **options)
    def chain(x): return torch.relu(x * 2 + 1).sum(-1)
    torch.compile(chain, backend=backend)(torch.randn(8, 64))
    return list(process_memory.memory().decisions.values())[-1:]
if case == "never" and rank in (1, 2): # each has stored another decision
    ask, ranks._process_group_store = ranks._process_group_store, lambda: None
    decided()
    ranks._process_group_store = ask
    process_memory.forget_process()
if case == "never":
    words.set(f"stored of {rank}", "yes")
    words.wait([f"stored of {each}" for each in range(4)])
    if rank != 2: words.wait(["rank 2 was first"])
if case == "killed" and rank: words.wait(["racing"])
told = []
tell, decide.tell = decide.tell, lambda decision, before: told.append(decision) or tell(decision, before)
decided(race="never" if case == "never" else "missing")
if case == "never" and rank == 2: words.set("rank 2 was first", "yes")
print(json.dumps([told[-1].winner, told[-1].facts]))
os._exit(0) if case == "killed" and not sys.stdout.flush() else dist.barrier()
"""


@pytest.mark.parametrize(
    ("case", "answer"),
    [
        pytest.param("never", ["eager", "race of 2"], id="race='never'"),
        pytest.param("killed", ["default", "timed out waiting for the racing rank"], id="killed"),
    ],
)
def test_four_ranks_take_one_decision(tmp_path, case, answer):
    """Four ranks use one answer: where races are off and stores differ, and where the racing rank is killed."""
    ranks = [forks.Fork("-c", FOUR, case, rank, tmp_path / "init") for rank in range(4)]
    ended = [rank.completed() for rank in ranks]
    assert [json.loads(each.stdout) for each in ended if each.stdout] == [answer] * (3 if case == "killed" else 4)

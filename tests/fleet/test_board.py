"""What a shared store knows of units: what makes one done, what is kept of it, and how claims are held and given up."""

import logging
import threading
from types import SimpleNamespace

import pytest

from backend_kwargs import files
from backend_kwargs.auto.store import name_of as decision_name
from backend_kwargs.auto.verdicts import KIND as VERDICT
from backend_kwargs.auto.verdicts import Verdict
from backend_kwargs.facts.decision import Decision
from backend_kwargs.fleet import board as module
from backend_kwargs.fleet.board import Result, Unit, UnitClaims, UnitDocument, name_of
from backend_kwargs.fleet.racing import documents_of
from backend_kwargs.interval import Interval
from backend_kwargs.stores.documents import Document, encoded, heading
from backend_kwargs.stores.folder import Folder
from tests.fleet.stores import Claimed, Documents, written

HERE = {"torch": "2.13"}
UNIT, OTHER = Unit("m.py:build", "cpu"), Unit("m.py:build", "cpu", {"batch": 8})
DECISIONS = [Decision(digits * 32, digits * 8, "default", machine={"device": "cpu AVX2"}) for digits in ("ab", "cd")]


@pytest.fixture
def waits(monkeypatch):
    """The seconds for which a board waits, which do not pass."""
    waited = []
    monkeypatch.setattr(files.time, "sleep", waited.append)
    return waited


@pytest.fixture
def key(tmp_path):
    """Return the path of a private key."""
    ed25519 = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ed25519")
    from cryptography.hazmat.primitives import serialization as form

    made, path = ed25519.Ed25519PrivateKey.generate(), tmp_path / "key.pem"
    path.write_bytes(made.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption()))
    path.chmod(0o600)
    return str(path)


def ended(store, unit=UNIT, **fields):
    """Put what came of a unit into a store."""
    store.put(name_of(unit), written(UnitDocument(unit=unit, **{"releases": HERE} | fields)))


def states(store, unit=UNIT):
    """Return whether a unit is done for who looks at all, and for who wants to take it."""
    board = UnitClaims(store, HERE)
    taken = board.take(unit)
    board.release(unit)
    return name_of(unit) in board.done(board.known()), taken


# ---- what is done


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_a_unit_is_done_with_all_of_its_decisions(kept):
    """One of two that is gone makes it run again."""
    store = Claimed()
    assert UnitClaims(store, HERE).record(UNIT, Result(releases=HERE, documents=documents_of(DECISIONS))) == ""
    for each in DECISIONS[kept:]:
        store.forget(decision_name(each))
    assert states(store) == ((True, "ended") if kept == 2 else (False, "ours"))


@pytest.mark.parametrize("name", ["../../etc/passwd", "units/x", "", "/", "decisions/../x", f"decisions/{'a' * 300}"])
def test_hostile_names_of_decisions_in_a_folder(name, tmp_path):
    """What no document can be named is looked for nowhere, and its unit is not done."""
    store = Folder(tmp_path)
    ended(store, decisions=(name,))
    assert states(store) == (False, "ours")


def test_what_is_no_unit_is_not_known():
    """Documents that others put among the units are passed over."""
    store = Documents()
    ended(store)
    store.put("units/x.json", b"{")
    assert [*UnitClaims(store, HERE).known()] == [name_of(UNIT)]


# ---- claims


@pytest.mark.parametrize(
    ("failed", "failed_too", "state"),
    [
        pytest.param("", True, "ended", id="done"),
        pytest.param("no weights", False, "ended", id="failed, which is left"),
        pytest.param("no weights", True, "ours", id="failed, which is tried again"),
    ],
)
@pytest.mark.parametrize("late", [False, True], ids=["before", "between the look and the claim"])
def test_a_unit_that_ended(failed, failed_too, state, late):
    """It is not claimed, unless it failed and is to be tried again."""
    store = Claimed()
    claim = store.claim

    def claimed(*args):
        if late:
            ended(store, failed=failed)
        return claim(*args)

    store.claim = claimed
    if not late:
        ended(store, failed=failed)
    board = UnitClaims(store, HERE)
    assert board.take(UNIT, failed_too=failed_too) == state
    assert len(board.held) == len(store.leases.keys() & store.documents.keys()) == (state == "ours")


def test_sizes_of_a_model_are_claimed_apart():
    """Another process may run one while this one runs the other."""
    store = Claimed()
    first, second = UnitClaims(store, HERE), UnitClaims(store, HERE)
    assert [first.take(UNIT), second.take(UNIT), second.take(OTHER)] == ["ours", "elsewhere", "ours"]


def test_a_store_without_claims_gives_all():
    """Then each process runs what is not done, and nothing is renewed or released."""
    store = Documents()
    board = UnitClaims(store, HERE)
    with board.renewing():
        assert [board.take(UNIT), UnitClaims(store, HERE).take(UNIT)] == ["ours", "ours"]
        board.renew()
        board.release(UNIT)
        assert board.take(UNIT) == "ours"
    assert store.documents == {}


def test_only_claims_of_ones_own_are_released():
    """Releasing a unit that this process does not run asks nothing of the store."""
    store = Claimed()
    first, second = UnitClaims(store, HERE), UnitClaims(store, HERE)
    assert first.take(UNIT) == "ours"
    store.renew = store.forget = lambda *_: pytest.fail("asked")
    second.release(UNIT)


def test_what_is_released_is_not_renewed():
    """A unit that this process has given up is another's, though the store did not answer then."""
    store = Claimed()
    board, renew = UnitClaims(store, HERE), store.renew
    board.take(UNIT)
    store.away = ConnectionError("refused")
    board.release(UNIT)
    store.away, renewed = None, []
    store.renew = lambda name, *rest: renewed.append(name) or renew(name, *rest)
    board.renew()
    assert (renewed, board.held) == ([], {})


def test_a_lease_that_another_process_took(caplog):
    """It is named once, and no longer this process's to renew."""
    store = Claimed()
    board = UnitClaims(store, HERE)
    board.take(UNIT)
    (claim,) = store.documents
    store.documents[claim] = b"another's"
    for _ in range(2):
        board.renew()
    assert caplog.messages == [f"Another process took {claim}, whose lease had ended; it is raced twice."]
    assert store.documents[claim] == b"another's"


def test_leases_are_renewed_while_a_unit_runs(monkeypatch, caplog):
    """Thrice in each lease, for as long as the first, also after an error of the store; at exit all are released."""
    waited, enough = [], threading.Event()

    class Beats(threading.Event):
        def wait(self, timeout=None):
            waited.append(timeout)
            return super().wait(0.001)

    monkeypatch.setattr(
        module, "threading", SimpleNamespace(Event=Beats, Thread=threading.Thread, RLock=threading.RLock)
    )
    store, leases = Claimed(), []
    board, renew = UnitClaims(store, HERE, words=lambda error: "an error"), store.renew

    def counted(name, token, lease_s):
        leases.append(lease_s)
        if len(leases) == 1:
            raise ConnectionError("postgresql://me:password@db")
        if len(leases) > 4:
            enough.set()
        return renew(name, token, lease_s)

    store.renew = counted
    with caplog.at_level(logging.WARNING), board.renewing():
        board.take(UNIT)
        board.take(OTHER)
        assert enough.wait(60.0)
    assert ({*waited}, {*leases}) == ({20.0}, {60.0})
    assert (store.documents, board.held) == ({}, {})
    assert "an error" in caplog.text
    assert "password" not in caplog.text


@pytest.mark.parametrize("release", ["one", "at exit"])
def test_a_store_that_is_away_at_the_end(release, caplog):
    """It is no error of the run: leases end by themselves, and the password is not logged."""
    store = Claimed()
    board = UnitClaims(store, HERE, words=lambda error: "it is away")
    with board.renewing():
        board.take(UNIT)
        store.away = ConnectionError("postgresql://me:password@db")
        if release == "one":
            board.release(UNIT)
    assert board.held == {}
    assert "it is away" in caplog.text
    assert "password" not in caplog.text


# ---- what is kept


def test_what_is_kept_of_a_unit(key):
    """Its decisions and verdicts, then its document, signed by its key; these have its label and generation."""
    store = Claimed()
    unit = Unit("m", "cpu", options={"store": {"signing_key": key, "label": "team", "min_generation": 3}})
    board = UnitClaims(store, HERE)
    board.take(unit)
    place, verdict = "verdicts/cpu/ab.cd.json", Verdict(2.0, 1.0, Interval(2.0, 1.9, 2.1), confirmed=True)
    names, of_places = [*documents_of(DECISIONS), place], encoded(VERDICT, Document(place, verdict))
    documents = documents_of(DECISIONS) | {place: of_places}
    assert board.record(unit, Result(releases=HERE, documents=documents)) == ""
    assert [*store.documents] == [*names, name_of(unit)]
    assert all(heading(each).is_signed for each in store.documents.values())
    assert [(heading(store.get(name)).label, heading(store.get(name)).generation) for name in names] == [
        ("team", 3)
    ] * 3
    assert states(store, unit) == (True, "ended")


def test_a_decision_that_is_newer_stays_so():
    """`min_generation` makes none older than what the store has."""
    store = Documents()
    for least in (5, 0):
        unit = Unit("m", "cpu", options={"store": {"min_generation": least}})
        assert UnitClaims(store, HERE).record(unit, Result(releases=HERE, documents=documents_of(DECISIONS[:1]))) == ""
    assert heading(store.get(decision_name(DECISIONS[0]))).generation == 6


@pytest.mark.parametrize(
    ("failures", "waited"),
    [(0, []), (2, [0.5, 1.0]), (6, [0.5, 1.0, 2.0, 4.0, 8.0])],
    ids=["at once", "later", "never"],
)
def test_a_store_that_does_not_take_a_result_is_asked_again(failures, waited, waits):
    """Six times in fifteen seconds; then the unit fails, with the store's error in words that hide its password."""
    store, tries = Claimed(), []
    board, put = UnitClaims(store, HERE, words=lambda error: f"{type(error).__name__}: ***"), store.put
    board.take(UNIT)

    def refused(name, content):
        tries.append(name)
        if len(tries) <= failures:
            raise ConnectionError("postgresql://me:password@db")
        put(name, content)

    store.put = refused
    why = board.record(UNIT, Result(releases=HERE))
    never = failures == 6
    assert why == ("the store memory did not take what came of it: ConnectionError: ***" if never else "")
    assert waits == waited
    assert (board.held == {}) is not never

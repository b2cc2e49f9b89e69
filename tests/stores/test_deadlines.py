"""A store that is away, slow, full or of another process: what waits for it, how long, and what is left behind."""

import os
import socket
import sys
import threading
import time
from contextlib import suppress

import pytest

from backend_kwargs.stores import Store, layered
from backend_kwargs.stores.folder import Folder
from backend_kwargs.stores.layered import AwayError, Reached

SHORT = Store(connect_s=0.2, lookup_s=0.1)
LONG = Store(connect_s=60.0, lookup_s=60.0)
FOLDER = "decisions/cpu/"
START = "ab" * 8
NAME = f"{FOLDER}{START}cd.json"


class Held:
    """Documents in memory, each call of which waits until it may go on; counts its listings and closings."""

    label = "held"

    def __init__(self):
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.documents, self.listings, self.closed = {}, 0, 0

    def get(self, name):
        self.may_go_on.wait()
        return self.documents.get(name)

    def put(self, name, document):
        self.may_go_on.wait()
        self.documents[name] = document

    def list(self, prefix):
        self.listings += 1
        self.may_go_on.wait()
        yield from [(name, each) for name, each in self.documents.items() if name.startswith(prefix)]

    def forget(self, name):
        self.documents.pop(name, None)

    def close(self):
        self.closed += 1


def done(reached, job, limits):
    """Return what a job gives for a store, as callers ask and wait for it."""
    return reached.answer(reached.ask(job), reached.longest_s(limits), time.monotonic())


@pytest.fixture
def held():
    store = Held()
    store.documents[NAME] = b"1"
    yield store
    store.may_go_on.set()


@pytest.fixture
def reached(held):
    return Reached(lambda: held, "held", "held")


def threads():
    """Return how many threads of stores there are."""
    return sum(thread.name == "backend_kwargs.stores" for thread in threading.enumerate())


def ended():
    """Return whether they are over, soon."""
    for _ in range(200):
        if not threads():
            return True
        time.sleep(0.05)
    return False


@pytest.fixture(autouse=True)
def _alone():
    assert ended()


def test_a_folder_is_listed_once(reached, held):
    """What lies below a prefix is fetched by one listing; all other questions are answered from memory."""
    reached.begin(FOLDER, len(START))
    assert reached.group(FOLDER, START, LONG) == {NAME: b"1"}
    assert reached.group(FOLDER, "cd" * 8, LONG) == {}
    assert held.listings == 1


def test_what_was_put_is_found(reached, held):
    """What this process puts is known without another listing."""
    reached.group(FOLDER, START, LONG)
    other = f"{FOLDER}{START}ef.json"
    done(reached, lambda store: store.put(other, b"2"), LONG)
    reached.note(FOLDER, START, other, b"2")
    assert reached.group(FOLDER, START, LONG) == {NAME: b"1", other: b"2"}
    assert held.listings == 1


def test_who_does_not_answer_is_not_waited_for(reached, held):
    """Each wait is shorter than the one before, is counted, and ends in one message."""
    held.may_go_on.clear()
    messages = []
    for _ in range(3):
        with pytest.raises(AwayError) as e:
            reached.group(FOLDER, START, SHORT)
        messages.append(str(e.value))
    assert messages == [f"it did not answer within {seconds} s" for seconds in ("0.2", "0.1", "0.05")]
    assert reached.time_outs == 3


def test_no_number_of_graphs_is_too_many(held, reached):
    """After many waits in a row each is still as short, and long enough for one who answers again."""
    held.may_go_on.clear()
    reached._state.in_row = 5000
    with pytest.raises(AwayError) as e:
        reached.group(FOLDER, START, Store(connect_s=60.0, lookup_s=0.1))
    assert str(e.value) == "it did not answer within 0.005 s"


def test_the_longest_wait(reached):
    """A number of seconds that no clock has is as long as can be."""
    assert reached.group(FOLDER, START, Store(connect_s=1e300, lookup_s=1e300)) == {NAME: b"1"}


def test_a_process_without_more_threads(reached, monkeypatch):
    """A store is away where no thread can be begun, and is used as soon as one can."""

    def full(_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", full)
        for ask in (lambda: reached.group(FOLDER, START, LONG), lambda: done(reached, lambda store: 1, LONG)):
            with pytest.raises(AwayError) as e:
                ask()
            assert str(e.value) == "RuntimeError: can't start new thread"
    assert reached.group(FOLDER, START, LONG) == {NAME: b"1"}


def test_who_answers_late_is_used_then(reached, held):
    """The listing goes on: a later question finds it, and waits as long as at first again."""
    held.may_go_on.clear()
    with pytest.raises(AwayError):
        reached.group(FOLDER, START, SHORT)
    held.may_go_on.set()
    assert reached.group(FOLDER, START, LONG) == {NAME: b"1"}
    assert held.listings == 1


def test_who_comes_back_is_used(held, reached):
    """After an error the next question tries again."""
    broken, held.list = held.list, None
    with pytest.raises(AwayError, match="TypeError"):
        reached.group(FOLDER, START, LONG)
    held.list = broken
    assert reached.group(FOLDER, START, LONG) == {NAME: b"1"}


def test_who_never_answers_leaves_few_threads(held, reached, monkeypatch):
    """Another thread is begun in place of one that waits, at most three times."""
    monkeypatch.setattr(layered, "AGAIN_S", 0.0)
    held.may_go_on.clear()
    for _ in range(10):
        with pytest.raises(AwayError):
            reached.group(FOLDER, START, Store(connect_s=0.01, lookup_s=0.01))
    assert threads() == layered.MOST_STUCK + 1
    held.may_go_on.set()
    assert ended()


def test_a_socket_that_accepts_and_never_answers(reached, held):
    """A client without a time-out of its own waits in its thread alone."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        asking = Reached(lambda: held, "mute", "mute")
        with pytest.raises(AwayError, match=r"^it did not answer within 0\.2 s$"):
            done(asking, lambda store: client.recv(1), SHORT)


def test_the_connection_is_closed_after_the_burst(reached, held):
    """It stays open for some calls in a row; then it is closed, and its thread is over."""
    for _ in range(3):
        done(reached, lambda store: store.get(NAME), LONG)
    assert held.closed == 0
    assert ended()
    assert held.closed == 1


def test_a_users_own_store_is_not_closed(held):
    """Its connections are the user's."""
    given = Reached(lambda: held, "held", "held", is_given=True)
    done(given, lambda store: store.get(NAME), LONG)
    assert ended()
    assert held.closed == 0


def test_an_error_names_no_password():
    """The error of a client library is worded by who knows the password."""

    def fails():
        raise RuntimeError("connection to postgresql://me:secret@host failed")

    def words(error):
        return str(error).replace("secret", "***")

    with pytest.raises(AwayError) as e:
        Reached(fails, "label", "identity", words=words).group(FOLDER, START, LONG)
    assert str(e.value) == "connection to postgresql://me:***@host failed"
    assert e.value.__cause__ is None
    assert e.value.__suppress_context__


def test_too_much_is_not_kept(reached, held, monkeypatch):
    """Of a store with more than is kept in memory, each question lists what it asks for."""
    monkeypatch.setattr(layered, "LARGEST", 1)
    held.documents[f"{FOLDER}{'cd' * 16}.json"] = b"2"
    for _ in range(2):
        assert reached.group(FOLDER, START, LONG) == {NAME: b"1"}
    assert held.listings == 3


class Failing(Held):
    """A store that fails after all documents."""

    def list(self, prefix):
        yield from super().list(prefix)
        raise OSError("no answer")


@pytest.mark.parametrize(("store", "largest"), [(Held, 3), (Failing, 1 << 20)], ids=["too much", "an error"])
def test_a_listing_that_is_not_used_keeps_nothing(store, largest, monkeypatch):
    """Neither its result nor its error refers to the documents."""
    monkeypatch.setattr(layered, "LARGEST", largest)
    store = store()
    store.documents = {f"{FOLDER}{at:032}.json": bytes([at] * 2) for at in range(3)}
    kept = [sys.getrefcount(each) for each in store.documents.values()]
    reached = Reached(lambda: store, "store", "store", is_given=True)
    with suppress(AwayError):
        reached.group(FOLDER, "0" * len(START), LONG)
    assert ended()
    assert [sys.getrefcount(each) for each in store.documents.values()] == kept


class Large(Held):
    """Documents of which a listing of the folder goes on, while what is asked for is soon there."""

    def list(self, prefix):
        self.listings += 1
        yield from [(name, each) for name, each in self.documents.items() if name.startswith(prefix)]
        if prefix == FOLDER:
            self.may_go_on.wait()


@pytest.fixture
def large():
    store = Large()
    store.documents[NAME] = b"1"
    store.may_go_on.clear()
    yield store
    store.may_go_on.set()


PATIENT = Store(connect_s=2.0, lookup_s=30.0)  # for what is listed alone, also on a busy machine


def test_a_listing_that_goes_on(large):
    """It is waited for once; what is asked for is listed alone, and found. It serves when it is there."""
    reached = Reached(lambda: large, "large", "large")
    for _ in range(3):
        assert reached.group(FOLDER, START, PATIENT) == {NAME: b"1"}
    assert (large.listings, reached.time_outs) == (4, 1)
    large.may_go_on.set()
    assert reached.group(FOLDER, START, LONG) == {NAME: b"1"}


def test_a_listing_that_stops(large, monkeypatch):
    """Where it has found nothing more for long, another one is begun, as where it has found nothing at all."""
    monkeypatch.setattr(layered, "AGAIN_S", 0.0)
    reached = Reached(lambda: large, "large", "large")
    for _ in range(2):
        assert reached.group(FOLDER, START, PATIENT) == {NAME: b"1"}
    assert reached.time_outs == 2


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_child_of_a_fork_opens_its_own(held):
    """A child neither uses nor closes the connection of its parent, also while that is in use."""
    opened = []

    def open_():
        opened.append(os.getpid())
        return held

    reached = Reached(open_, "held", "held")
    reached.group(FOLDER, START, LONG)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            found = reached.group(FOLDER, START, LONG)
            ok = found == {NAME: b"1"} and opened[-1] == os.getpid() and held.closed == 0
            os.write(writing, b"1" if ok else b"0")
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reading, 1) == b"1"
    os.close(reading)
    os.close(writing)


def test_a_folder_needs_no_lasting_thread(tmp_path):
    """It has no connection, so that its thread is over as soon as it has answered."""
    reached = Reached(lambda: Folder(tmp_path), "folder", "folder", is_local=True)
    assert reached.group(FOLDER, START, LONG) == {}
    assert ended()


def test_four_threads_ask_at_once(reached, held):
    """They share one listing and one thread."""
    found = []
    asking = [threading.Thread(target=lambda: found.append(reached.group(FOLDER, START, LONG))) for _ in range(4)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    assert found == [{NAME: b"1"}] * 4

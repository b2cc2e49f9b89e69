"""Several stores as one: which document wins, where it is copied to, and what is written."""

import os
import threading
import time
import warnings
from dataclasses import replace

import pytest

from backend_kwargs.errors import BackendKwargsWarning, warn_once
from backend_kwargs.stores import Store
from backend_kwargs.stores.documents import Document, Kind, RefusedError, decoded, encoded, heading
from backend_kwargs.stores.folder import Folder
from backend_kwargs.stores.layered import Layered, Reached, put, reached, synced

KIND = Kind("unit", dict)
FOLDER, START = "units/", "a"
NAME = "units/a.json"


@pytest.fixture(autouse=True)
def _warned_anew():
    warn_once.cache_clear()


@pytest.fixture
def keys():
    ed25519 = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ed25519")
    return [ed25519.Ed25519PrivateKey.generate() for _ in range(2)]


@pytest.fixture
def near(tmp_path):
    (tmp_path / "near").mkdir()
    return Folder(tmp_path / "near")


@pytest.fixture
def far(tmp_path):
    (tmp_path / "far").mkdir(mode=0o777)
    (tmp_path / "far").chmod(0o777)
    return Folder(tmp_path / "far")


def layered(*stores, **trust):
    """Return stores as one, as a process that has just begun sees them."""
    return layers(*(reached(each.label) for each in stores), **trust)


def layers(*reached, kind=KIND, lookup_s=60.0, **trust):
    """Return stores as one, of which the same is said."""
    return Layered(kind, dict.fromkeys(reached, Store(connect_s=60.0, lookup_s=lookup_s, **trust)))


def test_what_stays_on_its_machine_is_in_folders_alone(near, far):
    """It is written to no other store, copied to none when it is read, and not synced."""
    kind = replace(KIND, stays=lambda body: body["stays"])
    store = layers(reached(far), reached(near.label), kind=kind)
    store.put(FOLDER, (START, Document(NAME, {"stays": True})))
    assert found(store) == {NAME: {"stays": True}}
    assert (body_in(far), body_in(near)) == (None, {"stays": True})
    copied = synced(kind, near.list(FOLDER), far, FOLDER, dry_run=False)
    assert [*copied] == [(NAME, "refused: it is provisional, and stays on its machine")]
    store.put(FOLDER, (START, Document(NAME, {"stays": False})))
    assert (body_in(far), body_in(near)) == ({"stays": False}, {"stays": False})


def test_what_another_release_wrote_is_synced(far):
    """A newer schema as it is, and a tombstone of one that is no longer read: its document is gone there too."""
    now = replace(KIND, schema=2, oldest=2)
    for kind, body in ((replace(KIND, schema=3), {"of": "later"}), (KIND, None)):
        content = encoded(kind, Document(NAME, body))
        assert [*synced(now, [(NAME, content)], far, FOLDER, dry_run=False)] == [(NAME, "new")]
        assert far.get(NAME) == content
        far.forget(NAME)
    refused = "refused: an earlier release of backend-kwargs wrote it (schema 1)"
    earlier = encoded(KIND, Document(NAME, {"of": "earlier"}))
    assert [*synced(now, [(NAME, earlier)], far, FOLDER, dry_run=False)] == [(NAME, refused)]


def keep(store, body, generation, key=None):
    store.put(NAME, encoded(KIND, Document(NAME, body, generation, 1.0), key))


def body_in(store):
    """Return what a store has, as soon as what was begun is done."""
    for _ in range(100):
        if not any(thread.name == "backend_kwargs.stores" for thread in threading.enumerate()):
            break
        time.sleep(0.05)
    return body_in_folder(store)


def body_in_folder(store):
    content = store.get(NAME)
    return None if content is None else decoded(KIND, NAME, content).body


def found(store):
    return {name: document.body for name, document in store.newest(store.looked_up(FOLDER, START)).items()}


@pytest.mark.parametrize(
    ("there", "then"),
    [
        pytest.param((None, 1), ("far", "far"), id="only further on"),
        pytest.param((1, None), ("near", None), id="only near"),
        pytest.param((1, 2), ("far", "far"), id="newer further on"),
        pytest.param((2, 1), ("near", "far"), id="newer near"),
    ],
)
def test_the_newest_is_used_and_copied_to_those_before(near, far, there, then):
    """A copy is checked against the shared document once a process; what is written further on is not changed."""
    for store, generation, name in zip((near, far), there, ("near", "far"), strict=True):
        if generation:
            keep(store, {"of": name}, generation)
    assert found(layered(near, far)) == {NAME: {"of": then[0]}}
    expected = [None if name is None else {"of": name} for name in then]
    assert [body_in(near), body_in(far)] == expected


def test_a_copy_is_made_once(far):
    """However many look-ups there are, also into a store that takes none."""

    class Full:
        label, tries = "full", 0

        def get(self, name):
            Full.tries += 1
            raise OSError("disk full")

        def list(self, prefix):
            return iter(())

    keep(far, {"of": "far"}, 1)
    store = layers(reached(Full()), reached(far.label))
    assert [found(store) for _ in range(20)] == [{NAME: {"of": "far"}}] * 20
    body_in(far)
    assert Full.tries == 1


def test_what_was_forgotten_stays_so(near, far):
    """A tombstone further on hides an older copy, and replaces it."""
    keep(near, {"of": "near"}, 1)
    put(KIND, far, Document(NAME, None, 2))
    assert found(layered(near, far)) == {NAME: None}
    assert body_in(near) is None


def test_a_decision_goes_to_all(near, far):
    """What is put is newer than what any store has under the name."""
    keep(far, {"of": "far"}, 7)
    layered(near, far).put(FOLDER, (START, Document(NAME, {"of": "now"})))
    assert [body_in(near), body_in(far)] == [{"of": "now"}] * 2
    # The same in each, so that a tombstone in one of them, or what another process makes of it, is newer everywhere.
    assert [decoded(KIND, NAME, store.get(NAME)).generation for store in (near, far)] == [8, 8]


def test_what_a_newer_release_wrote_is_not_replaced(near, far):
    """An older release leaves it, with a warning, and writes where there is none; it may be forgotten."""
    newer = encoded(Kind("unit", dict, schema=2), Document(NAME, {"of": "newer"}, 5, 1.0))
    near.put(NAME, newer)
    with pytest.warns(BackendKwargsWarning) as caught:
        layered(near, far).put(FOLDER, (START, Document(NAME, {"of": "now"})))
    why = "a newer release of backend-kwargs wrote it (schema 2); update this one"
    assert [str(each.message) for each in caught] == [
        f"Store '{near.label}' cannot be written: {why}. It is left out, and tried again for later graphs."
    ]
    assert (near.get(NAME), body_in(far)) == (newer, {"of": "now"})
    put(KIND, near, Document(NAME, None))
    assert body_in(near) is None


def test_one_that_cannot_be_written_hinders_no_other(near, tmp_path):
    """Its error is one warning, and the others are written."""
    (tmp_path / "file").touch()
    broken = Folder(tmp_path / "file" / "store")
    with pytest.warns(BackendKwargsWarning) as caught:
        layered(broken, near).put(FOLDER, (START, Document(NAME, {"of": "now"})))
    why = f"NotADirectoryError: [Errno 20] Not a directory: '{broken.path}'"
    assert [str(each.message) for each in caught] == [
        f"Store '{broken.label}' cannot be written: {why}. It is left out, and tried again for later graphs."
    ]
    assert body_in(near) == {"of": "now"}


def test_one_that_cannot_be_read_hinders_no_other(near, far, monkeypatch):
    """Its error is one warning; what the others have is used."""
    keep(far, {"of": "far"}, 1)
    (near.path / "units").symlink_to("units")
    with pytest.warns(
        BackendKwargsWarning, match="cannot be read: OSError: .* Too many levels of symbolic links"
    ) as caught:
        assert found(layered(near, far)) == {NAME: {"of": "far"}}
    assert len(caught) == 1


def test_files_are_looked_at_in_a_thread(near, far, keys, monkeypatch):
    """On a disk that hangs, so does each look at a file: none is the caller's."""
    near.path.chmod(0o700)
    keep(near, {"of": "near"}, 1)
    keep(far, {"of": "far"}, 1, keys[0])
    looked, stat = [], os.stat

    def watched(path, *args, **kwargs):
        if str(path).startswith((near.label, far.label)):
            looked.append(threading.current_thread().name)
        return stat(path, *args, **kwargs)

    monkeypatch.setattr(os, "stat", watched)
    store = layered(near, far, trusted_keys=(keys[0].public_key(),), signing_key=keys[0])
    found(store)
    store.put(FOLDER, (START, Document(NAME, {"of": "now"})))
    monkeypatch.undo()
    assert set(looked) == {"backend_kwargs.stores"}


MUTE = 12  # stores, each of which would take a deadline of its own


@pytest.fixture
def mute():
    """Yield stores that never answer, which all wait until the test is over."""
    over = threading.Event()

    class Mute:
        label = "mute"

        def get(self, name):
            over.wait()

        def list(self, prefix):
            over.wait()
            return iter(())

    yield [reached(Mute()) for _ in range(MUTE)]
    over.set()


@pytest.mark.filterwarnings("ignore:Store 'mute' cannot be")
@pytest.mark.parametrize("trusts", [False, True], ids=["anyone", "who signs"])
def test_stores_that_do_not_answer_take_one_deadline_together(near, mute, keys, trusts, monkeypatch):
    """Neither looking up nor writing waits for each; who answers is read and written."""
    here, waits = reached(near.label), []

    def left_s(longest_s, began):  # over as soon as the folder has answered, whose thread then ends
        waits.append((began, longest_s <= 60.0))
        while here._state.threads[-1].running is not None:
            time.sleep(0.001)
        return 0.0

    monkeypatch.setattr("backend_kwargs.stores.layered._left_s", left_s)
    near.path.chmod(0o700)
    keep(near, {"of": "near"}, 1)
    now = Document(NAME, {"of": "now"})
    for do in (found, lambda store: store.put(FOLDER, (START, replace(now, name="units/ab.json")), (START, now))):
        for each in mute:
            each._state.in_row = 0
        trust = {"trusted_keys": (keys[0].public_key(),), "signing_key": keys[0]} if trusts else {}
        store = layers(*mute, here, **trust)
        waits.clear()
        assert do(store) in (None, {NAME: {"of": "near"}})
        assert len(waits) > MUTE
        assert {*waits} == {(waits[0][0], True)}
    assert body_in_folder(near) == {"of": "now"}


def test_a_store_that_connects_slowly_is_written(near, far, monkeypatch):
    """One that has not said in the first half of the time what it has may take the rest, on the same connection."""
    connected, opened = threading.Event(), []

    def connect():
        opened.append(near)
        connected.wait()
        return near

    def left_s(longest_s, began):
        if longest_s < 60.0:  # the first half
            return 0.0
        connected.set()
        return longest_s

    monkeypatch.setattr("backend_kwargs.stores.layered._left_s", left_s)
    slow = layers(Reached(connect, "slow", "slow"), reached(far.label), lookup_s=1.0)
    slow.put(FOLDER, (START, Document(NAME, {"of": "now"})))
    assert [body_in(near), body_in(far)] == [{"of": "now"}] * 2
    assert len(opened) == 1


def test_what_was_put_is_found(near):
    """A process that has listed a store knows what it has put there since."""
    store = layered(near)
    assert found(store) == {}
    store.put(FOLDER, (START, Document(NAME, {"of": "now"})))
    near.forget(NAME)  # so that it is not read again
    assert found(store) == {NAME: {"of": "now"}}


def test_which_stores_are_folders(tmp_path):
    """A connection to any other is closed when it is no longer used."""
    given = (str(tmp_path), "redis://db.example/0", None, Folder(tmp_path))
    assert [reached(each).is_local for each in given] == [True, False, True, False]


# ---- who may be trusted


def test_only_what_was_signed_is_used_of_a_store_that_others_write(near, far, keys):
    """Without a valid signature it is as if it were not there, with one warning."""
    keep(far, {"of": "far"}, 1, keys[1])
    trusted = [keys[0].public_key()]
    with pytest.warns(BackendKwargsWarning) as caught:
        assert found(layered(near, far, trusted_keys=tuple(trusted))) == {}
    message = f"{NAME} in store '{far.label}' is not used: it is signed by none of the trusted keys."
    assert [str(each.message) for each in caught] == [message]
    keep(far, {"of": "far"}, 1, keys[0])
    assert found(layered(near, far, trusted_keys=tuple(trusted))) == {NAME: {"of": "far"}}
    body_in(near)
    assert decoded(KIND, NAME, near.get(NAME), trusted).body == {"of": "far"}


def test_the_users_own_folder_needs_no_signature(near, keys):
    """A folder that only its user can write has what its user wrote."""
    keep(near, {"of": "near"}, 1)
    near.path.chmod(0o700)
    trusted = (keys[0].public_key(),)
    assert found(layered(near, trusted_keys=trusted)) == {NAME: {"of": "near"}}
    near.path.chmod(0o770)
    with pytest.warns(BackendKwargsWarning, match="it is not signed"):
        assert found(layered(near, trusted_keys=trusted)) == {}


class OfNobodyKnows(Folder):
    """A folder on a disk that lists its files, and fails to say whose they are, or does not answer until `ends`."""

    def __init__(self, path, ends):
        super().__init__(path)
        self.ends = ends

    @property
    def is_own(self):
        self.ends.wait(600.0)
        raise OSError("Stale file handle")


@pytest.mark.parametrize(("hangs", "waits"), [(False, 60.0), (True, 0.5)], ids=["it fails", "it hangs"])
def test_where_it_is_not_known_who_writes_signatures_are_needed(near, keys, hangs, waits):
    """A store that does not say in time whether it is the user's own is as one that others write."""
    near.path.chmod(0o700)
    keep(near, {"of": "anybody"}, 1)
    ends = threading.Event()
    if not hangs:
        ends.set()
    here = Reached(lambda: OfNobodyKnows(near.path, ends), near.label, near.label, is_local=True)
    store = Layered(KIND, {here: Store(trusted_keys=[keys[0].public_key()], connect_s=waits, lookup_s=waits)})
    try:
        with pytest.warns(BackendKwargsWarning):
            assert (found(store), store.put(FOLDER, (START, Document(NAME, {"of": "now"})))) == ({}, None)
    finally:
        ends.set()
    assert body_in(near) == {"of": "anybody"}


def test_what_is_not_asked_for_is_not_looked_at(far, keys):
    """Documents of other names may be broken or unsigned: nobody is warned of them."""
    keep(far, {"of": "far"}, 1)
    store = layered(far, trusted_keys=(keys[0].public_key(),))
    assert store.newest(store.looked_up(FOLDER, START), lambda name: name != NAME) == {}


class Meanwhile:
    """A store that lists nothing, and has something by the time that a copy is made."""

    label = "meanwhile"

    def __init__(self, content):
        self.content, self.puts = content, []

    def get(self, name):
        return self.content

    def list(self, prefix):
        return iter(())

    def put(self, name, content):
        self.puts.append(content)


@pytest.mark.parametrize(
    ("generation", "copied"),
    [pytest.param(1, True, id="older"), pytest.param(2, False, id="newer"), pytest.param(None, True, id="broken")],
)
def test_a_copy_replaces_nothing_that_is_newer(far, generation, copied):
    """What another process has put since the look-up stays, unless it is older, or no document."""
    written = b"mine" if generation is None else encoded(KIND, Document(NAME, {"of": "other"}, generation, 1.0))
    keep(far, {"of": "far"}, 2 if generation == 1 else 1)
    between = Meanwhile(written)
    assert found(layers(reached(between), reached(far.label))) == {NAME: {"of": "far"}}
    content = far.get(NAME)
    body_in(far)
    assert between.puts == ([content] if copied else [])


def test_what_a_users_store_returns(near):
    """What is no document is as if it were not there: the other stores are written."""
    odd = Meanwhile(3)
    with pytest.warns(BackendKwargsWarning, match="^Store 'meanwhile' cannot be written: "):
        layers(reached(odd), reached(near.label)).put(FOLDER, (START, Document(NAME, {"of": "now"})))
    assert (body_in(near), odd.puts) == ({"of": "now"}, [])


def test_what_is_not_signed_is_not_copied(near, far, keys):
    """What is used only because its user alone can write it stays there."""
    keep(near, {"of": "near"}, 1)
    near.path.chmod(0o700)
    assert found(layered(far, near, trusted_keys=(keys[0].public_key(),))) == {NAME: {"of": "near"}}
    assert body_in(far) is None
    assert found(layered(far, near)) == {NAME: {"of": "near"}}
    assert body_in(far) == {"of": "near"}


def test_who_cannot_sign_replaces_nothing(far, keys):
    """A process that trusts keys and has none writes only where it needs none."""
    keep(far, {"of": "far"}, 1, keys[0])
    trusted = (keys[0].public_key(),)
    layered(far, trusted_keys=trusted).put(FOLDER, (START, Document(NAME, {"of": "now"})))
    assert body_in(far) == {"of": "far"}
    layered(far, trusted_keys=trusted, signing_key=keys[0]).put(FOLDER, (START, Document(NAME, {"of": "now"})))
    assert body_in(far) == {"of": "now"}
    assert found(layered(far, trusted_keys=trusted)) == {NAME: {"of": "now"}}


def test_who_cannot_sign_writes_ones_own_folder(near, keys):
    """It needs no signature there."""
    near.path.chmod(0o700)
    layered(near, trusted_keys=(keys[0].public_key(),)).put(FOLDER, (START, Document(NAME, {"of": "now"})))
    assert body_in(near) == {"of": "now"}


def test_what_cannot_be_written_is_not_asked(near, far, keys):
    """What others keep where this process writes nothing makes its own document no newer, and is not missed."""
    keep(far, {"of": "anybody"}, 1000)
    near.path.chmod(0o700)
    away = Reached(lambda: 1 / 0, "away", "away")
    stores = layers(reached(near.label), reached(far.label), away, trusted_keys=(keys[0].public_key(),))
    stores.put(FOLDER, (START, Document(NAME, {"of": "now"})))
    assert body_in(near) == {"of": "now"}
    assert heading(near.get(NAME)).generation == 1


def test_another_thread_asks_while_one_is_replaced(near):
    """The thread that was left has ended: another is there as soon as it is gone."""
    store, new_thread = reached(near.label), Reached._new_thread
    store._state.threads[-1].left = True
    seen = []
    store._new_thread = lambda: seen.append(len(store._state.threads)) or new_thread(store)
    assert store.ask(lambda store: "answer").result() == "answer"
    assert (seen, len(store._state.threads)) == ([1], 1)


def test_what_is_signed_is_not_replaced_by_what_is_not(near, far, keys):
    """Those who check signatures would lose it: nothing is put, copied or synced there but in the user's own folder."""
    keep(far, {"of": "far"}, 1, keys[0])
    keep(near, {"of": "near"}, 2)
    with pytest.warns(BackendKwargsWarning) as caught:
        layered(far).put(FOLDER, (START, Document(NAME, {"of": "now"})))
    (message,) = [str(each.message) for each in caught]
    assert message == (
        f"Store '{far.label}' cannot be written: {NAME} is signed there, so its place is for signed ones: give a "
        "signing key. It is left out, and tried again for later graphs."
    )
    with pytest.raises(RefusedError):
        put(KIND, far, Document(NAME, None))
    assert found(layered(far, near)) == {NAME: {"of": "near"}}
    assert body_in(far) == {"of": "far"}
    (done,) = synced(KIND, near.list(FOLDER), far, FOLDER, dry_run=False)
    assert done == (NAME, "refused: it is not signed, and what it would replace is")
    assert body_in(far) == {"of": "far"}
    far.path.chmod(0o700)
    put(KIND, far, Document(NAME, {"of": "now"}))
    assert body_in(far) == {"of": "now"}


def test_a_key_that_cannot_be_read(near, far, keys, tmp_path):
    """Nothing that others can write is used, with one warning; what the user wrote is."""
    keep(far, {"of": "far"}, 2, keys[0])
    keep(near, {"of": "near"}, 1)
    near.path.chmod(0o700)
    gone = tmp_path / "gone.pem"
    store = layered(near, far, trusted_keys=(keys[0].public_key(), str(gone)))
    with pytest.warns(BackendKwargsWarning) as caught:
        assert [found(store), found(store)] == [{NAME: {"of": "near"}}] * 2
    why = f"Cannot read a public key from '{gone}': FileNotFoundError: [Errno 2] No such file or directory: '{gone}'"
    assert [str(each.message) for each in caught] == [
        f"Store '{far.label}' cannot be trusted: {why}. It is left out, and tried again for later graphs."
    ]


def test_each_store_has_trust_of_its_own(near, far, keys):
    """One may be used unsigned beside one that may not; what no key of a store signed is never copied there."""
    near.path.chmod(0o700)
    keep(far, {"of": "far"}, 1)
    trusted = {"trusted_keys": [keys[0].public_key()], "connect_s": 60.0, "lookup_s": 60.0}
    assert found(Layered(KIND, {reached(near.label): Store(**trusted), reached(far.label): Store()})) == {
        NAME: {"of": "far"}
    }
    assert body_in(near) is None
    turned = Layered(KIND, {reached(near.label): Store(), reached(far.label): Store(**trusted)})
    with pytest.warns(BackendKwargsWarning, match="it is not signed"):
        assert found(turned) == {}


def test_what_is_put_has_the_label_and_the_signature_of_each_store(near, far, keys):
    """Its generation is the same in all, and as new as each asks for."""
    said = {near: Store(label="mine"), far: Store(label="team", signing_key=keys[0], min_generation=3)}
    Layered(KIND, {reached(each.label): store for each, store in said.items()}).put(
        FOLDER, (START, Document(NAME, {"of": "now"}))
    )
    for each, label, signed in ((near, "mine", False), (far, "team", True)):
        body_in(each)
        document = heading(each.get(NAME))
        assert (document.label, document.generation, document.is_signed) == (label, 3, signed)


def test_a_replayed_document_is_not_used(far, near):
    """`min_generation` refuses what is older, with a warning."""
    keep(far, {"of": "far"}, 2)
    assert found(layered(far, min_generation=2)) == {NAME: {"of": "far"}}
    with pytest.warns(BackendKwargsWarning, match="its generation 2 is before min_generation=3"):
        assert found(layered(far, min_generation=3)) == {}


# ---- copies of whole stores


def test_sync_copies_what_is_newer(near, far):
    """What is older or the same stays; a dry run only says so."""
    keep(near, {"of": "near"}, 2)
    assert [*synced(KIND, near.list(""), far, "", dry_run=True)] == [(NAME, "new")]
    assert body_in(far) is None
    assert [*synced(KIND, near.list(""), far, "", dry_run=False)] == [(NAME, "new")]
    assert far.get(NAME) == near.get(NAME)
    assert [*synced(KIND, near.list(""), far, "", dry_run=False)] == [(NAME, "same")]
    keep(far, {"of": "far"}, 1)
    assert [*synced(KIND, near.list(""), far, "", dry_run=False)] == [(NAME, "newer")]
    assert [*synced(KIND, far.list(""), near, "", dry_run=False)] == [(NAME, "same")]
    keep(far, {"of": "far"}, 1)
    assert [*synced(KIND, far.list(""), near, "", dry_run=False)] == [(NAME, "older")]


def test_sync_replaces_what_no_release_wrote(near, far):
    """A file that was cut short is no document, and is replaced."""
    keep(near, {"of": "near"}, 2)
    far.put(NAME, near.get(NAME)[:-9])
    assert [*synced(KIND, near.list(""), far, "", dry_run=False)] == [(NAME, "new")]
    assert far.get(NAME) == near.get(NAME)


def test_stores_as_one_are_called_by_their_names(near, far):
    """In reports; where a user has turned stores off, there is none."""
    assert layered(near, far).label == f"store {near.label!r}, store {far.label!r}"
    assert layered().label == "no store"


def test_sync_into_a_file_that_cannot_be_read(near, far):
    """What cannot be read is compared as it was listed, and writing says why it fails."""
    keep(near, {"of": "near"}, 2)
    far.get = lambda name: 1 / 0
    assert [*synced(KIND, near.list(""), far, "", dry_run=False)] == [(NAME, "new")]
    del far.get
    assert body_in(far) == {"of": "near"}


def test_sync_replaces_what_is_signed_in_ones_own_folder(near, far, keys):
    """Nobody checks signatures there."""
    keep(near, {"of": "near"}, 2)
    keep(far, {"of": "far"}, 1, keys[0])
    far.path.chmod(0o700)
    assert [*synced(KIND, near.list(""), far, "", dry_run=False)] == [(NAME, "newer")]


def test_sync_replaces_nothing_that_was_written_meanwhile(near, far):
    """What another process writes after the listing, a tombstone too, is compared again."""
    keep(near, {"of": "near"}, 2)

    def listed():
        for name, content in near.list(""):
            put(KIND, far, Document(NAME, None, 5))
            yield name, content

    assert [*synced(KIND, listed(), far, "", dry_run=False)] == [(NAME, "older")]
    assert body_in(far) is None


def test_sync_copies_nothing_under_another_name(near, far):
    """A document that lies under a name of another, or is none, is refused."""
    near.put("units/b.json", encoded(KIND, Document(NAME, {})))
    near.put("units/c.json", b"mine")
    done = dict(synced(KIND, near.list(""), far, "", dry_run=False))
    assert done["units/b.json"] == f"refused: it is '{NAME}'"
    assert done["units/c.json"].startswith("refused: it is not a document: DecodeError")
    assert [*far.list("")] == []


def test_many_look_ups_warn_once(far):
    """A store that is away is named once, however many graphs there are, and whatever was asked of it."""
    away = Folder(far.path / "loop")
    away.path.symlink_to("loop")
    store = layered(away)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(5):
            assert found(store) == {}
            store.put(FOLDER, (START, Document(NAME, {"of": "now"})))
    assert len(caught) == 1

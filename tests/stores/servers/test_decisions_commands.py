"""`backend-kwargs decisions` on a folder, PostgreSQL and Redis, as a user types it."""

from dataclasses import replace

import pytest
from typer.testing import CliRunner

from backend_kwargs.auto.store import Catalogue, name_of
from backend_kwargs.cli import app
from backend_kwargs.errors import BackendKwargsError
from backend_kwargs.facts.decision import DEFAULT, Decision, RaceRow
from backend_kwargs.fleet import board
from backend_kwargs.fleet.board import Result, Unit, document_of
from backend_kwargs.stores import Store
from backend_kwargs.stores.opening import opened
from tests.fleet.stores import store_file, written

ROWS = (RaceRow("default", seconds=1e-4, won=True), RaceRow("eager", seconds=2e-4))
MADE = Decision("ab" * 32, "ab" * 8, DEFAULT, {}, ROWS, {"device": "cpu AVX2", "threads": 4}, "3 ops", 2.5, made=1e9)
FIRST, SECOND, THIRD = (replace(MADE, key=digits * 32, graph=digits * 8) for digits in ("ab", "cd", "ef"))
EVERYWHERE = pytest.mark.parametrize("kind", ["folder", "postgres", "redis"])


@pytest.fixture
def shared(url, monkeypatch):
    """Return the name of a store that others can write."""
    monkeypatch.setenv("SHARED", url)
    return "env:SHARED"


@pytest.fixture
def own(tmp_path):
    """Return a folder that nobody else can write."""
    folder = tmp_path / "own"
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture
def keys(tmp_path):
    """Return two keys: each one's private key, and the file of its public one."""
    ed25519 = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ed25519")
    from cryptography.hazmat.primitives import serialization

    made = []
    for at in range(2):
        key, file = ed25519.Ed25519PrivateKey.generate(), tmp_path / f"public-{at}.pem"
        form = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        file.write_bytes(key.public_key().public_bytes(*form))
        made.append((key, str(file)))
    return made


def run(*arguments):
    """Return what a command prints, line by line; raise its error."""
    ran = CliRunner().invoke(app, ["decisions", *map(str, arguments)], catch_exceptions=False)
    return ran.output.splitlines()


@EVERYWHERE
def test_sync_with_a_key_copies_only_what_it_signed(shared, own, keys, tmp_path):
    """What is refused is counted, with the reason; what is copied keeps its signature."""
    (key, public), (other, _) = keys
    for decision, signed_by in ((FIRST, key), (SECOND, other), (THIRD, None)):
        Catalogue(Store(shared, signing_key=signed_by)).add(decision)
    expected = [
        f"1 refused: it is signed by none of the trusted keys: {name_of(SECOND)}",
        f"1 refused: it is not signed: {name_of(THIRD)}",
    ]
    team = store_file(tmp_path / "team.toml", shared, trusted_keys=[public])
    dry = run("sync", team, own, "--dry-run")
    assert dry == [
        f"new: {name_of(FIRST)}",
        *expected,
        f"1 would be copied to '{own}'; 0 the same, 0 older than there.",
    ]
    assert run("sync", team, own) == [
        *expected,
        f"1 copied to '{own}'; 0 the same, 0 older than there.",
    ]
    with opened(shared).doing("read") as store:
        there = dict(store.list(""))
    assert dict(opened(str(own)).store.list("")) == {name_of(FIRST): there[name_of(FIRST)]}


@EVERYWHERE
def test_sync_without_a_key_says_what_it_means(shared, own):
    """An own folder is trusted, whatever it was copied from."""
    Catalogue(shared).add(FIRST)
    label = opened(shared).store.label
    warning = (
        f"Nobody's signature was checked: what others wrote to {label!r} is trusted in your own folder; with "
        "trusted_keys in a FILE.toml that names the store, only what one of these signed is copied."
    )
    assert run("sync", shared, own) == [f"1 copied to '{own}'; 0 the same, 0 older than there.", warning]
    assert run("sync", own, shared) == [f"0 copied to {label!r}; 1 the same, 0 older than there."]


def test_sync_copies_what_a_plan_has_tuned(tmp_path, own):
    """There a plan skips what is done, and an audit knows the models."""
    unit = Unit("models.py:build", device="cpu")
    content = written(document_of(unit, Result(seconds=1.0, documents={name_of(FIRST): ""})))
    opened(str(tmp_path / "tuned")).store.put(board.name_of(unit), content)
    Catalogue(str(tmp_path / "tuned")).add(FIRST)
    done = run("sync", tmp_path / "tuned", own)
    assert done[0] == f"2 copied to '{own}'; 0 the same, 0 older than there."
    assert opened(str(own)).store.get(board.name_of(unit)) == content


def test_sync_from_nothing_says_so(own, tmp_path):
    """An empty folder is not one where all is the same."""
    (tmp_path / "empty").mkdir()
    assert run("sync", tmp_path / "empty", own) == [f"No decisions in '{tmp_path / 'empty'}'."]


@pytest.mark.parametrize("url", ["postgresql://127.0.0.1:1/none", "redis://127.0.0.1:1/0", "loop"])
@pytest.mark.parametrize("what", ["read", "write"])
def test_an_error_names_the_store_that_failed(url, what, own, tmp_path, monkeypatch):
    """It is the one that cannot be read, or the one that cannot be written."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    Catalogue(own).add(FIRST)
    with pytest.raises(BackendKwargsError) as caught:
        run("sync", *((url, own) if what == "read" else (own, url)))
    begins = f"Cannot {what} store 'loop': " if url == "loop" else f"Store {url!r} failed: "
    assert str(caught.value).startswith(begins)


@EVERYWHERE
def test_export_with_a_key_writes_only_what_it_signed(shared, keys, tmp_path):
    """A file has no signatures, so they are checked when it is written."""
    (key, public), _ = keys
    Catalogue(Store(shared, signing_key=key)).add(FIRST)
    Catalogue(shared).add(SECOND)
    team = store_file(tmp_path / "team.toml", shared, trusted_keys=[public])
    with pytest.warns(match=f"{name_of(SECOND)}: it is not signed"):
        ran = run("export", tmp_path / "d.toml", "--store", team)
    assert ran == [f"1 written to {tmp_path / 'd.toml'}, 1 as templates: auto-abababababab."]


@EVERYWHERE
def test_decisions_of_several_machines_are_told_apart(shared, tmp_path):
    """A list names the machine, `show` the others that decided the same, and an export says what it leaves out."""
    other = replace(FIRST, winner="eager", machine={**FIRST.machine, "threads": 8}, made=FIRST.made - 1)
    Catalogue(shared).add(FIRST, other)
    listed = "\n".join(run("list", "--store", shared))
    assert "cpu-avx2, 4 threads" in listed
    assert "cpu-avx2, 8 threads" in listed
    shown = run("show", FIRST.key, "--store", shared)
    assert shown[-1] == "also decided on another machine: eager; threads 8 (above 4)"
    assert run("export", tmp_path / "d.toml", "--store", shared) == [
        f"1 written to {tmp_path / 'd.toml'}, 1 as templates: auto-abababababab.",
        "1 of other machines left out: of each key a file has the latest; sync copies all.",
    ]


@EVERYWHERE
def test_a_key_that_cannot_be_read_copies_nothing(shared, own, tmp_path):
    """The error comes before anything is copied."""
    Catalogue(shared).add(FIRST)
    with pytest.raises(BackendKwargsError) as caught:
        run("sync", store_file(tmp_path / "team.toml", shared, trusted_keys=["none.pem"]), own)
    assert str(caught.value).startswith(f"Cannot read a public key from '{tmp_path / 'none.pem'}': ")
    assert [*opened(str(own)).store.list("")] == []

"""What `explain` says of the decisions in a store, without a graph."""

from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

import backend_kwargs
from backend_kwargs.auto.machine import machine
from backend_kwargs.auto.store import Catalogue
from backend_kwargs.cli import app
from backend_kwargs.stores import Store
from tests.auto.graphs import MADE

HERE = machine(("cpu",))
DEVICE, THREADS = HERE["device"], HERE["threads"]


def decided(key="ab", model="Encoder", **differs):
    return replace(MADE, key=key * 32, machine=HERE | differs, model=model)


def notes(*given, **options):
    store = [each if isinstance(each, Store) else str(each) for each in given]
    return [*backend_kwargs.explain("tmpl-inductor:auto", store=store, **options).notes]


@pytest.fixture
def kept(tmp_path):
    """Return a folder with decisions of this machine and of two that differ in what is near."""
    Catalogue(tmp_path / "kept").add(
        decided(),
        decided("cd", "Decoder", driver="535.1"),
        decided("ef", threads=THREADS + 1),
        decided("01", "Decoder", threads=THREADS + 1, driver="535.1"),
        decided("23", "", torch="2.1.0"),
    )
    return tmp_path / "kept"


ONE = "1 decision of a machine like this one, used as decided."
EXACT = "2 decisions of a machine like this one, used as decided."


@pytest.mark.parametrize(
    ("options", "use"),
    [
        pytest.param({}, "raced again, with these winners first; match='device' uses them", id="exact"),
        pytest.param({"match": "device"}, "used once the numbers are found right here", id="device"),
        pytest.param({"race": "never"}, "not used; match='device' uses them", id="never"),
    ],
)
def test_what_differs_is_named_with_what_follows(kept, options, use):
    """Decisions of machines like this one come first; of others, what makes them near is named."""
    assert notes(kept, **options) == [
        f"Store '{kept}', {DEVICE}: {line}"
        for line in (
            EXACT,
            f"2 decisions near: threads {THREADS + 1} (here {THREADS}); {use}.",
            f"1 decision near: torch '2.1.0' (here {HERE['torch']!r}); {use}.",
        )
    ]


def test_what_is_raced_anyway(kept):
    """Under race="always" nothing is used as it was decided; what won elsewhere comes first."""
    again = "raced again, with these winners first"
    assert [line.partition(": ")[2] for line in notes(kept, race="always")] == [
        EXACT.replace("used as decided", "raced again"),
        f"2 decisions near: threads {THREADS + 1} (here {THREADS}); {again}.",
        f"1 decision near: torch '2.1.0' (here {HERE['torch']!r}); {again}.",
    ]


def lines(tmp_path, *decisions):
    Catalogue(tmp_path / "many").add(*decisions)
    return [line.partition(": ")[2] for line in notes(tmp_path / "many")]


def test_what_this_machine_decided_comes_first(tmp_path):
    """Of other machines those with the most decisions do, and further ways to differ are counted."""
    others = [decided(f"{at}{at}", threads=THREADS + at // 2 + 1) for at in range(3, 10)]
    found = lines(tmp_path, *others, decided("ab"))
    assert [line.partition(" ")[0] for line in found] == ["1", "2", "2", "2", "1"]
    assert found[0].endswith(" of a machine like this one, used as decided.")
    more = [decided(f"{at}a", threads=THREADS + 20 + at) for at in range(3)]
    found = lines(tmp_path, *more)
    assert (len(found), found[-1]) == (7, "2 decisions near in other ways.")


def test_what_is_too_old_is_counted(kept):
    """A replayed generation is not used, and said."""
    refused = "5 documents not used: its generation 1 is before min_generation=2."
    assert notes(Store(kept, min_generation=2)) == [f"Store '{kept}', {DEVICE}: {refused}"]


def test_nothing_is_written(kept, tmp_path):
    """Stores are only read: what is found further on is not copied to those before."""
    (tmp_path / "first").mkdir()
    before = sorted(tmp_path.rglob("*"))
    found = notes(tmp_path / "first", kept)
    assert found[0] == f"Store '{tmp_path / 'first'}' has no decision for {_devices()}."
    assert len(found) == 4
    assert sorted(tmp_path.rglob("*")) == before


def test_a_store_that_is_away_is_one_line(kept, tmp_path):
    """The others are still read."""
    (tmp_path / "loop").symlink_to("loop")
    found = notes(tmp_path / "loop", kept)
    assert found[0].startswith(f"Cannot read store '{tmp_path / 'loop'}': ")
    assert len(found) == 4


def test_what_no_key_signed_is_counted(kept):
    """Where keys are trusted, what others could have written is not used."""
    ed25519 = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ed25519")
    kept.chmod(0o755)
    key = ed25519.Ed25519PrivateKey.generate()
    Catalogue(Store(kept, signing_key=key)).add(decided("45"))
    assert notes(Store(kept, trusted_keys=[key.public_key()])) == [
        f"Store '{kept}', {DEVICE}: {line}" for line in (ONE, "5 documents not used: it is not signed.")
    ]
    kept.chmod(0o700)  # then only its user has written there
    assert not any("not signed" in line for line in notes(Store(kept, trusted_keys=[key.public_key()])))


def test_the_command_line_says_it(kept):
    """`backend-kwargs explain` prints what `explain` returns."""
    ran = CliRunner().invoke(
        app, ["explain", "tmpl-inductor:auto", "--option", f"store={kept}"], catch_exceptions=False
    )
    assert ran.output.splitlines()[-3:] == notes(kept)


def test_the_default_store_is_mentioned_only_if_it_has_decisions(monkeypatch, tmp_path):
    """Who names no store need not know that it is empty."""
    monkeypatch.setenv("BACKEND_KWARGS_STORE", str(tmp_path / "own"))
    assert backend_kwargs.explain("tmpl-inductor:auto").notes == ()
    Catalogue().add(decided())
    assert backend_kwargs.explain("tmpl-inductor:auto").notes == (f"Store '{tmp_path / 'own'}', {DEVICE}: {ONE}",)


def _devices():
    gpu = [machine(("cuda",))["device"]] if torch.cuda.is_available() else []
    return " or ".join([*gpu, DEVICE])

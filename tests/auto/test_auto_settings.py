"""Options of `auto` are checked when they are set."""

import json
import math

import pytest

from backend_kwargs import BackendKwargsError, make_backend
from backend_kwargs.auto.settings import OPTIONS, RaceSettings


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param(
            {"budget_s": -1}, "Option 'budget_s' must be float of at least 0, got -1 (int).", id="negative budget"
        ),
        pytest.param(
            {"budget_s": math.nan}, "Option 'budget_s' must be float of at least 0, got nan (float).", id="no number"
        ),
        pytest.param(
            {"process_budget_s": -0.5},
            "Option 'process_budget_s' must be float of at least 0, got -0.5 (float).",
            id="negative budget of the process",
        ),
        pytest.param(
            {"store_connect_s": math.inf},
            "Option 'store_connect_s' must be float of at least 0, but finite, got inf (float).",
            id="endless wait",
        ),
        pytest.param(
            {"store_lookup_s": math.nan},
            "Option 'store_lookup_s' must be float of at least 0, but finite, got nan (float).",
            id="no wait",
        ),
        pytest.param({"most_races": -3}, "Option 'most_races' must be int of at least 1, got -3 (int).", id="negative"),
        pytest.param({"most_races": 0}, "Option 'most_races' must be int of at least 1, got 0 (int).", id="no race"),
        pytest.param(
            {"tolerance": 0}, "Option 'tolerance' must be float above 0 | None, got 0 (int).", id="no tolerance"
        ),
        pytest.param(
            {"candidates": ["auto"]},
            "Candidate 'auto' enables `auto`; races cannot be nested; leave it out.",
            id="race in a race",
        ),
        pytest.param(
            {"signing_key": 3},
            "Option 'signing_key' must be an Ed25519 private key, or the path of its PEM file, got 3 (int).",
            id="no private key",
        ),
        pytest.param(
            {"trusted_keys": ["a.pem", b""]},
            "Each of 'trusted_keys' must be an Ed25519 public key, or the path of its PEM file, got b'' (bytes).",
            id="no public key",
        ),
        pytest.param(
            {"effort": "ful"}, "Option 'effort' must be 'quick' | 'full', got 'ful' (str).", id="another effort"
        ),
    ],
)
def test_refused(options, message):
    """An invalid value raises at once, with the expected and the given value."""
    with pytest.raises(BackendKwargsError) as raised:
        make_backend("tmpl-inductor:auto", options)
    assert str(raised.value) == message


INSTEAD = (
    "the first call races, which adds seconds; to add none, race ahead by `backend-kwargs tune` and serve with "
    "race='never'."
)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"race": "background"}, f"race='background' was removed: {INSTEAD}", id="value"),
        pytest.param({"background_share": 0.05}, f"Option 'background_share' was removed: {INSTEAD}", id="name"),
        pytest.param({"background-share": "1"}, f"Option 'background_share' was removed: {INSTEAD}", id="dash"),
        pytest.param(
            {"share_race": None},
            "Option 'share_race' was removed: the first rank to reach a graph races it, and the others wait.",
            id="first round",
        ),
        pytest.param(
            {"tuned_products": ("1x1x1",)},
            "Option 'tuned_products' was removed: max_autotune_gemm=True tunes all products.",
            id="products",
        ),
    ],
)
def test_removed(options, message):
    """What an earlier release took raises at once, and says what serves instead."""
    with pytest.raises(BackendKwargsError) as raised:
        make_backend("tmpl-inductor:auto", options)
    assert str(raised.value) == message


@pytest.mark.parametrize(
    ("options", "otherwise"),
    [
        pytest.param({"trusted_keys": ["KEY"]}, "no decision of a store that others can write is used", id="trusted"),
        pytest.param({"signing_key": "KEY"}, "no decision that is made here is stored", id="signing"),
    ],
)
def test_a_key_that_cannot_be_read(tmp_path, options, otherwise):
    """It is told before a compile, which goes on without it, and is an error under `strict`."""
    pytest.importorskip("cryptography")
    path = str(tmp_path / "a.pem")
    options = json.loads(json.dumps(options).replace("KEY", path))
    told = []
    make_backend("tmpl-inductor:auto", options).verify(told.append)
    (name,) = options
    which = "public" if name == "trusted_keys" else "private"
    why = (
        f"Option {name!r} cannot {{}} here: Cannot read a {which} key from {path!r}: FileNotFoundError: [Errno 2] No "
        f"such file or directory: {path!r}; {{}}."
    )
    assert [str(each) for each in told] == [why.format("act fully", otherwise)]
    with pytest.raises(BackendKwargsError) as raised:
        make_backend("tmpl-inductor:auto", options, strict=True)
    assert str(raised.value) == why.format("work", "name a file that can be read")


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"budget_s": 0.0}, id="no race of a graph"),
        pytest.param({"budget_s": math.inf}, id="no end"),
        pytest.param({"process_budget_s": 0.0}, id="no race"),
        pytest.param({"most_races": 1, "tolerance": 1e-6}, id="the least"),
    ],
)
def test_taken(options):
    """A value at a limit is accepted and reaches the race."""
    given = RaceSettings.of(make_backend("tmpl-inductor:auto", options).options)
    assert {name: getattr(given, name) for name in options} == options


def test_settings_are_the_options():
    """A race without options has each option's default."""
    assert {name: getattr(RaceSettings(), name) for name in OPTIONS} == {n: o.default for n, o in OPTIONS.items()}

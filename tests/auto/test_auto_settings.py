"""Options of `auto` are checked when they are set."""

import math

import pytest

from backend_kwargs import BackendKwargsError, make_backend
from backend_kwargs.auto.settings import OF_STORE
from backend_kwargs.stores import Store

INSTEAD = (
    "the first call races, which adds seconds; to add none, race ahead by `backend-kwargs tune` and serve with "
    "race='never'."
)


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
            {"effort": "ful"}, "Option 'effort' must be 'quick' | 'full', got 'ful' (str).", id="another effort"
        ),
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
        *(
            pytest.param(
                {old: 1},
                f"Option {old!r} was removed: write store=bk.Store(url, {new}=...), "
                f"in a file store = {{ {new} = ... }}.",
                id=old,
            )
            for old, new in OF_STORE.items()
        ),
    ],
)
def test_refused(options, message):
    """An invalid value raises at once; so does what an earlier release took, and says what serves instead."""
    with pytest.raises(BackendKwargsError) as raised:
        make_backend("tmpl-inductor:auto", options)
    assert str(raised.value) == message


@pytest.mark.parametrize("name", ["trusted_keys", "signing_key"])
def test_a_key_that_is_not_there(tmp_path, name):
    """A missing key is an error at once; a backend is still made with a file that is not a key."""
    path = tmp_path / "a.pem"
    store = Store(tmp_path, **{name: [path] if name == "trusted_keys" else path})
    with pytest.raises(BackendKwargsError, match=f"^There is no key '{path}', which option 'store' names.$"):
        make_backend("tmpl-inductor:auto", store=["other", store])
    path.write_text("no key")
    assert len(make_backend("tmpl-inductor:auto", store=["other", store]).options["store"]) == 2


def test_candidates_may_be_a_tuple():
    """As `rewrites` takes either; both are the same backend."""
    given, same = (make_backend("tmpl-inductor:auto", candidates=make(["default"])) for make in (tuple, list))
    assert given == same

"""Two hundred processes use each store at once."""

import json
import os
import subprocess
import sys

import pytest

from tests.stores.servers.test_contract import THAT_CLAIM, store  # noqa: F401 - a fixture

PROCESSES = 200


@pytest.mark.parametrize(
    ("kind", "writes", "spread_s"),
    [
        pytest.param("folder", 3, 1, id="folder"),
        pytest.param("postgres", 3, 1, id="postgres"),
        pytest.param("pgbouncer", 3, 1, id="pgbouncer"),
        pytest.param("redis", 3, 1, id="redis"),
        # Its client takes each process 60 ms of a core for the first call; the driver sends a request for each call.
        pytest.param("s3", 1, 10, id="s3"),
    ],
)
def test_no_acknowledged_write_is_lost(kind, writes, spread_s, store, url):  # noqa: F811 - a fixture
    """What a process was told is written is there; a look-up may fail, and is counted; one process claims.

    The servers have fewer places for clients than there are processes, which try again until there is one.
    """
    ran = subprocess.run(
        [sys.executable, "-m", "tests.stores.servers.crowd", *map(str, (PROCESSES, writes, spread_s))],
        check=False,
        env={**os.environ, "STORE": url},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.stderr == ""
    done = json.loads(ran.stdout)
    acknowledged = done.pop("acknowledged")
    sys.stdout.write(f"{kind}: {len(acknowledged)} of {PROCESSES * (writes + 1)} writes acknowledged, {done}\n")
    assert done["ended"] == PROCESSES
    there = {name: document.decode() for name, document in store.list("crowd/")}
    own = {name: document for name, document in acknowledged if name != "crowd/all.json"}
    assert {name: there.get(name) for name in own} == own
    assert ["crowd/all.json", there["crowd/all.json"]] in acknowledged
    assert len(acknowledged) > PROCESSES
    assert done["claimed"] == (kind in THAT_CLAIM)

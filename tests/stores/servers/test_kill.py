"""`kill -9` of a server, again and again, while processes write: BACKEND_KWARGS_KILLS=200 for the long run."""

import os
import subprocess
import sys
import time

import pytest

from backend_kwargs.stores.opening import place_in_variable

KILLS = int(os.environ.get("BACKEND_KWARGS_KILLS", "10"))
WRITERS = 3


@pytest.mark.parametrize("kind", ["postgres", "pgbouncer", "redis"])
def test_no_acknowledged_write_is_lost(kind, url, request, monkeypatch, tmp_path):
    """What a process was told is written is there after its server was killed and started again."""
    server = request.getfixturevalue("redis_server" if kind == "redis" else "postgres")
    monkeypatch.setenv("STORE", url)
    files = [tmp_path / str(number) for number in range(WRITERS)]
    writers = []
    for file in files:
        command = [sys.executable, "-m", "tests.stores.servers.writers", file.name]
        with file.open("w") as out:
            writers.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out))
    try:
        for _ in range(KILLS):
            _wait_for_more(files)
            server.kill()
            server.start()
        _wait_for_more(files)
    finally:
        for writer in writers:
            writer.stdin.close()
        ended = [writer.wait(120) for writer in writers]
    assert ended == [0] * WRITERS
    store = place_in_variable("STORE").open()
    there = {name: int(document) for name, document in store.list("killed/")}
    store.close()
    acknowledged = {}
    for file in files:
        acknowledged |= {name: int(count) for name, count in map(str.split, file.read_text().splitlines())}
    # A write that was not acknowledged may have been done.
    assert [name for name, count in acknowledged.items() if there.get(name, 0) < count] == []
    sys.stdout.write(f"{kind}: {len(acknowledged)} documents acknowledged, {KILLS} kills\n")


def _wait_for_more(files):
    """Wait until each process has written something more."""
    sizes = [file.stat().st_size for file in files]
    while any(file.stat().st_size <= size for file, size in zip(files, sizes, strict=True)):
        time.sleep(0.02)

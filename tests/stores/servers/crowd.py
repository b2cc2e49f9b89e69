"""Processes that use the store in STORE at once, each a fork of this one: python -m ... PROCESSES WRITES SPREAD_S.

Prints one JSON object: what was acknowledged, and how often a write or a look-up failed.
"""

# ruff: noqa: BLE001, T201 - any failure is counted; a command prints

import importlib
import json
import os
import random
import sys
import time

from backend_kwargs.stores import Claims, Documents
from backend_kwargs.stores.opening import place_in_variable


def work(store: Documents, number: int, writes: int, spread_s: float) -> dict:
    """Write documents of its own and one that all write, look them up, and claim what all claim."""
    time.sleep(random.uniform(0, spread_s))
    done = {"acknowledged": {}, "failed": 0, "missed": 0, "claimed": 0, "errors": []}
    names = [f"crowd/{number:03}/{write}.json" for write in range(writes)] + ["crowd/all.json"]
    for name in names:
        document = f"{number} {name}"
        try:
            store.put(name, document.encode())
        except Exception as error:
            done["failed"] += 1
            done["errors"].append(str(error)[:150])
        else:
            done["acknowledged"][name] = document
    for name in names:
        try:
            done["missed"] += store.get(name) is None
        except Exception:
            done["missed"] += 1
    if isinstance(store, Claims):
        done["claimed"] = int(store.claim("crowd/claimed.json", str(number).encode(), 300))
    done["errors"] = done["errors"][:1]
    return done


def patient_store() -> Documents:
    """Return the store, whose calls may take a minute each: two cores are few for so many processes."""
    place = place_in_variable("STORE")
    return importlib.import_module(place.driver.module).open(place.text, 60.0) if place.driver else place.open()


def read_descriptions() -> None:
    """Read botocore's descriptions of services here, not in each process, where that takes 0.1 s of a core."""
    import fsspec

    files, _ = fsspec.url_to_fs(os.environ["STORE"])
    files.connect()
    fsspec.config.conf["s3"] = {"session": files.session}


def main(processes: int, writes: int, spread_s: float) -> None:
    """Fork the processes, and print what they did."""
    if os.environ["STORE"].startswith("s3:"):
        read_descriptions()
    store = patient_store()
    store.get("crowd/none.json")  # so that a connection is open when they are forked
    reading, writing = os.pipe()
    began = time.monotonic()
    for number in range(processes):
        if not os.fork():
            line = json.dumps(work(store, number, writes, spread_s)) + "\n"
            os.write(writing, line.encode())  # whole: it is shorter than PIPE_BUF
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as lines:
        each = [json.loads(line) for line in lines]
    total = {key: sum(done[key] for done in each) for key in ("failed", "missed", "claimed")}
    total["ended"] = len(each)
    total["seconds"] = round(time.monotonic() - began, 1)
    total["acknowledged"] = [pair for done in each for pair in done["acknowledged"].items()]
    total["errors"] = sorted({error for done in each for error in done["errors"]})
    print(json.dumps(total))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))

"""A process that writes to the store in STORE until its input ends, and prints a line for each acknowledged write.

python -m tests.stores.servers.writers NUMBER
"""

# ruff: noqa: BLE001, T201 - a write that fails is tried again; a command prints

import sys
import threading
import time

from backend_kwargs.stores.opening import place_in_variable


def main(number: str) -> None:
    """Write a new document, and replace an old one, in turn."""
    ends = threading.Thread(target=sys.stdin.read)
    ends.start()
    store = place_in_variable("STORE").open()
    count = 0
    while ends.is_alive():
        count += 1
        for name in (f"killed/{number}/{count:06}", f"killed/{number}/last"):
            try:
                store.put(name, str(count).encode())
            except Exception:
                time.sleep(0.02)
            else:
                print(name, count, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])

"""A Ray cluster on this machine: a head without CPUs, and workers of one CPU each, killed by their process groups."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack, contextmanager
from pathlib import Path

HOST = "127.0.0.2"  # Ray replaces 127.0.0.1 by the address of the network card
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # of jobs
STORE_BYTES = 80_000_000


def free_port():
    with socket.socket() as sock:
        sock.bind((HOST, 0))
        return sock.getsockname()[1]


class Cluster:
    """Its address, that of its dashboard, and the processes of its workers, which a test may kill."""

    def __init__(self, stack, folder):
        self.stack, self.folder = stack, folder
        self.address, self.dashboard = f"{HOST}:{free_port()}", f"http://127.0.0.1:{free_port()}"
        head = [
            "--head",
            "--num-cpus=0",
            "--num-gpus=0",
            "--dashboard-host=127.0.0.1",
            f"--ray-client-server-port={free_port()}",
        ]
        ports = [f"--port={self.address.partition(':')[2]}", f"--dashboard-port={self.dashboard.rpartition(':')[2]}"]
        # The path of a socket in it has at most 107 characters, which pytest's folders would exceed.
        session = self.stack.enter_context(
            tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True)
        )
        self.start(*head, *ports, f"--temp-dir={session}")
        wait_for(self.alive, 1)

    def start(self, *arguments):
        """Start a node, and wait until the cluster has it."""
        with (self.folder / f"node{len(list(self.folder.glob('*.log')))}.log").open("wb") as log:
            node = subprocess.Popen(
                [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", f"--node-ip-address={HOST}",
                 f"--object-store-memory={STORE_BYTES}", "--disable-usage-stats", *arguments],
                stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                env=os.environ | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0", "PATH": PATH},
            )  # fmt: skip
        self.stack.callback(end, node)
        return node

    def add_worker(self, cpus=1):
        """Add a node with CPUs, and return its process."""
        before = self.alive()
        node = self.start(f"--address={self.address}", f"--num-cpus={cpus}", "--num-gpus=0")
        wait_for(self.alive, before + 1)
        return node

    def alive(self):
        """Return how many nodes the dashboard knows to be alive."""
        try:
            with urllib.request.urlopen(f"{self.dashboard}/api/v0/nodes", timeout=10) as answer:
                nodes = json.load(answer)["data"]["result"]["result"]
        except OSError:
            return 0
        return sum(node["state"] == "ALIVE" for node in nodes)


def wait_for(value, wanted, limit_s=600.0):
    """Wait until `value()` is `wanted`."""
    until = time.monotonic() + limit_s
    while (got := value()) != wanted:
        assert time.monotonic() < until, f"waited for {wanted}, got {got}"
        time.sleep(0.5)


def end(node, *signals):
    """End a node with all of its processes."""
    for number in signals or (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(node.pid, number)
            node.wait(10)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


@contextmanager
def cluster(folder: Path, workers: int):
    """Give a cluster of so many workers."""
    with ExitStack() as stack:
        started = Cluster(stack, folder)
        for _ in range(workers):  # two that start at once take the same ports
            started.add_worker()
        yield started

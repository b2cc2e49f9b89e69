"""`pytest -p tests.gpu.one_each -n N`: each worker sees one GPU of the host, in turn."""

import os
from pathlib import Path

count = len([*Path("/dev").glob("nvidia[0-9]*")])
if count and (worker := os.environ.get("PYTEST_XDIST_WORKER")):
    os.environ["CUDA_VISIBLE_DEVICES"] = str(int(worker.removeprefix("gw")) % count)

"""What the server that forks the suite's processes has imported where they run real models: what they are made of."""

import contextlib

import benchmarks.execution.preload  # noqa: F401

for package in ("transformers.modeling_utils", "timm"):
    with contextlib.suppress(Exception):  # a case that needs it tells why it is not there
        __import__(package)

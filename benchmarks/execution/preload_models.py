"""Imports of the server that forks the suite's processes for real models: also the libraries of these models."""

import contextlib

import benchmarks.execution.preload  # noqa: F401

for package in ("transformers.modeling_utils", "timm"):
    with contextlib.suppress(Exception):  # a case that needs it reports why it is missing
        __import__(package)

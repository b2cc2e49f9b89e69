"""One worker for all tests of a module, with an empty cache for each test."""

import pytest
import torch
from torch._inductor.utils import fresh_cache

from backend_kwargs.auto.workers.pool import Workers


@pytest.fixture(scope="module")
def workers():
    pool = Workers(1, nice=0)
    pool.start()
    yield pool
    pool.stop()


@pytest.fixture(autouse=True)
def cache():
    with fresh_cache():
        yield
    torch._dynamo.reset()

"""Fixtures for the tests of the suite."""

import pytest

from benchmarks.execution.worker import Job, time_group


@pytest.fixture(autouse=True)
def _settings_put_back():
    import torch._dynamo.config

    folder, grad = torch._dynamo.config.debug_dir_root, torch.is_grad_enabled()
    yield
    torch._dynamo.config.debug_dir_root = folder
    torch.set_grad_enabled(grad)


@pytest.fixture
def job(tmp_path):
    """Return a function that makes the job of a case on the CPU, with three rounds."""

    def make(case, globs=("eager",), mode=None, **given):
        cache = tmp_path / "cache" / "group"
        named = {"group_id": "g", "rounds": 3, "device": "cpu", "scale": "smoke", **given}
        return Job(case=case, mode=mode or case.modes[0], dtype=case.dtype, cache=cache, globs=globs, **named)

    return make


@pytest.fixture
def timed(job):
    """Return a function that times a case in this process and returns its cells by peer."""

    def run(*args, **given):
        return {cell.peer: cell for cell in time_group(lambda step: None, job(*args, **given))}

    return run

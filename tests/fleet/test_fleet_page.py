"""docs/fleet.md from nothing: PostgreSQL, three models on two Ray workers, and a process that races nothing."""

import importlib.util
import os
import re

import pytest

from tests import forks
from tests.docs_tables import ROOT
from tests.stores.servers import Postgres

PAGE = (ROOT / "docs" / "fleet.md").read_text(encoding="utf-8")
RACES = """
from backend_kwargs.auto.process_memory import memory
raced = sum(bool(each.rows) for each in memory().decisions.values())
print(f"{len(memory().race_seconds)} races, {raced} decisions of races")
"""


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
def test_from_nothing(tmp_path, ray_cluster):
    """The page's command tunes on two workers, and its script serves with the winners from an empty cache."""
    for name, text in re.findall(r"^```(?:py|toml)\n# (\S+)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE):
        (tmp_path / name).write_text(text, encoding="utf-8")
    server = Postgres()
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"TUNED": server.url(), "PYTHONPATH": paths}
    (command,) = re.findall(r"^backend-kwargs (tune-plan .*--on ray:auto.*)$", PAGE, re.MULTILINE)
    try:
        ray = environment | {"RAY_ADDRESS": ray_cluster.address}
        tuned = forks.run("-m", "backend_kwargs", *command.split(), cwd=tmp_path, env=ray)
        assert tuned.returncode == 0, tuned.stdout + tuned.stderr
        assert "devices covered: 1 of 1 (cpu of cpu)" in tuned.stdout
        empty = environment | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "empty"), "HOME": str(tmp_path)}
        served = forks.run("-c", f"exec(open('serve.py').read())\n{RACES}", cwd=tmp_path, env=empty)
        assert served.returncode == 0, served.stdout + served.stderr
        *lines, races = served.stdout.splitlines()
        assert [line.split(" runs with ")[0] for line in lines] == ["classifier", "convolutions", "attention"]
        assert races == "0 races, 3 decisions of races"
    finally:
        server.close()

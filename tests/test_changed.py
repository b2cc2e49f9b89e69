"""Which tests `make quick` runs."""

import pytest

from tests.changed import ALWAYS, covering


@pytest.mark.parametrize(
    ("files", "tests"),
    [
        pytest.param([], [], id="nothing"),
        pytest.param(["backend_kwargs/auto/race.py"], ["tests/auto"], id="a module in a folder"),
        pytest.param(
            ["backend_kwargs/backends/tvm/lowering/graph.py"], ["tests/backends/tvm"], id="a folder in a folder"
        ),
        pytest.param(["backend_kwargs/rewrites/kernels/decode.py"], ["tests/rewrites"], id="a folder without tests"),
        pytest.param(
            ["backend_kwargs/backends/partitioned.py", "backend_kwargs/backends/tvm/build.py"],
            ["tests/backends"],
            id="a folder and one in it",
        ),
        pytest.param(["backend_kwargs/regions.py"], ["tests/test_regions.py"], id="a module at the top"),
        pytest.param(["tests/auto/test_auto_race.py"], ["tests/auto/test_auto_race.py"], id="a test"),
        pytest.param(["tests/auto/test_no_longer.py"], [], id="a test that is gone"),
        pytest.param(["tests/auto/graphs.py"], ["tests/auto"], id="a helper of tests"),
        pytest.param(["benchmarks/__main__.py"], ["tests/benchmarks"], id="the suite"),
        pytest.param(["docs/tvm.md"], ["tests/test_docs.py"], id="a page"),
        pytest.param(["LICENSE"], [], id="what has no tests"),
    ],
)
def test_tests_of_changed_files(files, tests):
    assert covering(files) == sorted([*tests, ALWAYS])

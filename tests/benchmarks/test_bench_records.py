"""Result files: cells are read back as written, broken lines are skipped, and the HUD's records."""

import json
from dataclasses import replace

import pytest

from backend_kwargs.errors import BackendKwargsError
from benchmarks.execution import records
from benchmarks.execution.records import Cell, Compile
from tests.full_disk import full_disk

ENVIRONMENT = {"record": "environment", "version": records.VERSION, "torch": "2.13.0", "device": "cpu", "cpu": "a CPU"}
PASSED = Cell(
    case="softmax",
    case_version=2,
    mode="fwd",
    dtype="bfloat16",
    peer="default",
    kind="mode",
    numerics="bf16",
    group_id="g",
    status="pass",
    wall_s=[1e-5, 2e-5],
    device_s=[5e-6, 6e-6],
    compile=Compile(cold_s=3.0, warm_s=0.5, peak_bytes=64, kernels=1, fresh=True),
    work={"flops": 1.0, "bytes": 2.0, "unit": "bf16", "written": None},
)
FAILED = replace(PASSED, peer="tmpl-inductor:tma", status="unavailable", reason="no GPU", wall_s=[], device_s=[])


@pytest.fixture
def file(tmp_path):
    """Return a file with one group."""
    path = tmp_path / "r.jsonl"
    group = records.group_line("key", ["g"])
    records.append(path, [ENVIRONMENT, records.line_of(PASSED), records.line_of(FAILED), group])
    return path


def test_cells_come_back(file):
    """A file is read back with every sample."""
    results = records.read(file)
    assert results.cells == [PASSED, FAILED]
    assert results.groups == {"key"}
    assert results.environments[0]["torch"] == "2.13.0"


def test_older_files_are_read(tmp_path):
    """A cell from before repeats and decisions were recorded has unknown ones."""
    line = records.line_of(replace(PASSED, repeats={"wall": 9}, exposed=True, decided={"winner": "default"}))
    for name in ("repeats", "exposed", "decided"):
        del line[name]
    records.append(tmp_path / "r.jsonl", [ENVIRONMENT, line, records.group_line("key", ["g"])])
    assert records.read(tmp_path / "r.jsonl").cells == [PASSED]


def test_wall_times_of_older_files_are_of_dropped_results(tmp_path):
    """Older wall times are read as those of dropped results, with none of a loop that keeps results."""
    line = records.line_of(replace(PASSED, repeats={"wall": 9, "events": 1}))
    del line["dropped_s"]
    records.append(tmp_path / "r.jsonl", [ENVIRONMENT, line, records.group_line("key", ["g"])])
    expected = {"wall_s": [], "dropped_s": PASSED.wall_s, "repeats": {"dropped": 9, "events": 1}}
    assert records.read(tmp_path / "r.jsonl").cells == [replace(PASSED, **expected)]


@pytest.mark.parametrize(
    ("compiled", "expected", "shared"),
    [
        pytest.param(Compile(), False, True, id="older, without seconds"),
        pytest.param(Compile(cold_s=3.0), False, False, id="older, with seconds"),
        pytest.param(Compile(), True, False, id="told"),
    ],
)
def test_older_groups_of_one_cache_are_known(tmp_path, compiled, expected, shared):
    """In older files, a compile without a time shows that its group shared a cache."""
    lines = [records.line_of(each) for each in (replace(PASSED, compile=compiled), replace(PASSED, kind="eager"))]
    lines = [line if expected else {name: line[name] for name in line if name != "one_cache"} for line in lines]
    records.append(tmp_path / "r.jsonl", [ENVIRONMENT, *lines, records.group_line("key", ["g"])])
    assert {cell.one_cache for cell in records.read(tmp_path / "r.jsonl").cells} == {shared}


@pytest.mark.parametrize("keep", [10, 200], ids=["a word", "most of it"])
def test_broken_last_line_is_left_out(file, keep):
    """A line cut short by a kill is skipped, without the lines before and after it."""
    with file.open("a") as out:
        out.write(json.dumps(records.line_of(replace(PASSED, group_id="h")))[:keep])
    assert records.read(file).cells == [PASSED, FAILED]
    records.append(file, [records.line_of(replace(PASSED, group_id="i")), records.group_line("next", ["i"])])
    assert [cell.group_id for cell in records.read(file).cells] == ["g", "g", "i"]


def test_unfinished_group_is_left_out(file):
    """Cells without the line that ends their group are skipped."""
    records.append(file, [records.line_of(replace(PASSED, group_id="h"))])
    assert {cell.group_id for cell in records.read(file).cells} == {"g"}


def test_a_compile_beside_others_is_no_cold_one(tmp_path):
    """The HUD's cold compile time uses only compiles in separate processes."""
    beside = replace(PASSED, compile=Compile(cold_s=3.0))
    records.append(tmp_path / "r.jsonl", [ENVIRONMENT, records.line_of(beside), records.group_line("key", ["g"])])
    hud = records.to_hud(records.read(tmp_path / "r.jsonl"))
    assert {record["metric"]["name"] for record in hud} == {"pass", "wall_time(s)", "device_time(s)"}


def test_shards_are_read_together(file, tmp_path):
    """The files of several shards are read as one set of results."""
    other = tmp_path / "s.jsonl"
    records.append(other, [ENVIRONMENT, records.line_of(replace(PASSED, group_id="h")), records.group_line("k", ["h"])])
    results = records.read(file, other)
    assert (len(results.cells), len(results.environments)) == (3, 2)


def test_other_version_is_refused(tmp_path):
    """Files of another version are refused."""
    records.append(tmp_path / "r.jsonl", [ENVIRONMENT | {"version": 0}])
    with pytest.raises(BackendKwargsError) as error:
        records.read(tmp_path / "r.jsonl")
    assert str(error.value) == "Results must be of version 1, got 0: run them again."


def test_hud_records(file):
    """Each metric of a cell is one record in the HUD's format; a cell that did not pass has only its status."""
    hud = records.to_hud(records.read(file))
    assert all(record.keys() == {"benchmark", "model", "metric", "runners", "dependencies"} for record in hud)
    named = {(r["model"]["backend"], r["metric"]["name"]): r["metric"]["benchmark_values"] for r in hud}
    assert named == {
        ("default", "pass"): [1.0],
        ("default", "wall_time(s)"): [1e-5, 2e-5],
        ("default", "device_time(s)"): [5e-6, 6e-6],
        ("default", "compile_time_cold(s)"): [3.0],
        ("default", "compile_time_warm(s)"): [0.5],
        ("default", "peak_memory(bytes)"): [64],
        ("default", "kernels"): [1],
        ("tmpl-inductor:tma", "pass"): [0.0],
    }
    first = hud[0]
    assert first["benchmark"]["name"] == "backend_kwargs"
    assert (first["benchmark"]["mode"], first["benchmark"]["dtype"]) == ("inference", "bfloat16")
    assert (first["model"]["name"], first["dependencies"]["torch"]) == ("softmax", {"version": "2.13.0"})
    json.dumps(hud)


def test_records_on_a_full_disk_leave_the_file_as_it_was(tmp_path):
    """Records that do not fit are an error in one line, and none of them is in the file."""
    path = tmp_path / "r.jsonl"
    records.append(path, [ENVIRONMENT])
    before = path.read_bytes()
    with full_disk(), pytest.raises(BackendKwargsError) as raised:
        records.append(path, [records.line_of(PASSED)] * 5)
    assert str(raised.value) == f"Cannot write {str(path)!r}: File too large; make room, and continue with --resume."
    assert path.read_bytes() == before

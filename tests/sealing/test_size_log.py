"""A log of sizes: what it proposes to declare, what each bucket costs, and logs that are none."""

import json
from collections import Counter
from itertools import combinations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from backend_kwargs.errors import BackendKwargsError
from backend_kwargs.sealing.size_log import pasted, propose, read_log
from tests import forks

BRACED = '{{"batch": 4, "sequence": 133}}'
ONE_LINE = f"Line 1 of the log must be sizes such as {BRACED}, got "


def written(tmp_path, *lines):
    file = tmp_path / "sizes.jsonl"
    file.write_text("\n".join(lines), encoding="utf-8")
    return file


def test_few_sizes_get_code_of_their_own(tmp_path):
    """Nothing is padded where there are few sizes; "calls" counts a line several times."""
    file = written(tmp_path, '{"batch": 1}', "", '{"batch": 4, "calls": 9}')
    (proposal,) = propose(read_log(file))
    assert (proposal.exact, proposal.added, proposal.calls) == (True, 0.0, 10)
    assert [(each.size, each.calls) for each in proposal.buckets] == [(1, 1), (4, 9)]
    assert pasted([proposal]) == "sizes={'batch': [1, 4]}"


@example({3: 10, 4: 1, 7: 20, 9: 2, 15: 5, 16: 1})
@given(st.dictionaries(st.integers(1, 20), st.integers(1, 4), min_size=4, max_size=8))
def test_buckets_pad_least(counts):
    """The chosen buckets are those with the least padding of all, as a search through all of them finds."""
    sizes = sorted(counts)
    (proposal,) = propose({"n": Counter(counts)}, most=3)

    def padded(ends):
        return sum(count * min(end for end in ends if end >= size) for size, count in counts.items())

    best = min(padded([*ends, sizes[-1]]) for ends in combinations(sizes[:-1], 2))
    assert padded([each.size for each in proposal.buckets]) == best
    assert proposal.added == pytest.approx(best / sum(size * count for size, count in counts.items()) - 1)


@pytest.mark.parametrize(
    ("lines", "seen"),
    [
        pytest.param(['{"n": 0}'], {"n": {0: 1}}, id="nothing"),
        pytest.param(['{"n": 1, "calls": 0}', '{"n": 2}'], {"n": {1: 0, 2: 1}}, id="no calls"),
        pytest.param([' {"n":1} ', '\t{"n": 1}'], {"n": {1: 2}}, id="blanks"),
        pytest.param(['{"n": 1, "m": 2}', '{"m": 2, "n": 1}'], {"n": {1: 2}, "m": {2: 2}}, id="another order"),
        pytest.param(['{"n": 1, "n": 2}'], {"n": {2: 1}}, id="a name twice"),
    ],
)
def test_lines_that_are_sizes(tmp_path, lines, seen):
    """Blanks and the order of names mean nothing; a size of 0 is one."""
    assert read_log(written(tmp_path, *lines)) == seen


@pytest.mark.parametrize(("most", "exact"), [(2, False), (3, True), (4, True)], ids=["fewer", "as many", "more"])
def test_how_many_sizes_are_few(most, exact):
    """As many sizes as may have code of their own do."""
    (proposal,) = propose({"n": Counter({1: 1, 2: 1, 3: 1})}, most=most)
    assert proposal.exact is exact


def test_many_sizes_are_quick():
    """Thousands of sizes give as many buckets as were asked for, the largest among them."""
    (proposal,) = propose({"n": Counter(range(1, 5000))}, most=8)
    assert (len(proposal.buckets), proposal.buckets[-1].size, proposal.calls) == (8, 4999, 4999)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        pytest.param(
            [], 'The log {!r} has no calls: write a line such as {{"batch": 4, "sequence": 133}} for each.', id="empty"
        ),
        pytest.param(
            ['{"n": 1}', '{"n": "x"}'],
            'Line 2 of the log must be sizes such as {{"batch": 4, "sequence": 133}}, got \'{{"n": "x"}}\'.',
            id="no size",
        ),
        pytest.param(['{"n": -1}'], ONE_LINE + "'{{\"n\": -1}}'.", id="below zero"),
        pytest.param(['{"n": true}'], ONE_LINE + "'{{\"n\": true}}'.", id="a truth value"),
        pytest.param(['{"n": 1.0}'], ONE_LINE + "'{{\"n\": 1.0}}'.", id="a fraction"),
        pytest.param(["{}"], ONE_LINE + "'{{}}'.", id="no names"),
        pytest.param(["[1]"], ONE_LINE + "'[1]'.", id="a list"),
        pytest.param(
            ['{"N": 1}', '{"n": 1}'], "Line 2 of the log must have the sizes of N, got '{{\"n\": 1}}'.", id="case"
        ),
        pytest.param(
            [" ", '{"n": 1, "m": 2}', "", '{"n": 1}'],
            "Line 4 of the log must have the sizes of m, n, got '{{\"n\": 1}}'.",
            id="fewer names, after blank lines",
        ),
        pytest.param(
            ["[" * 99999],
            'Line 1 of the log must be sizes such as {{"batch": 4, "sequence": 133}}, got \'' + "[" * 76 + "....",
            id="nested",
        ),
        pytest.param(
            ['{"n": 1}', '{"m": 1}'],
            "Line 2 of the log must have the sizes of n, got '{{\"m\": 1}}'.",
            id="other names",
        ),
    ],
)
def test_logs_that_are_none(tmp_path, lines, message):
    """The line is named, with what it should be."""
    file = written(tmp_path, *lines)
    with pytest.raises(BackendKwargsError) as wrong:
        read_log(file)
    assert str(wrong.value) == message.format(str(file))


def test_no_file(tmp_path):
    """A file that is missing is named."""
    with pytest.raises(BackendKwargsError) as wrong:
        read_log(tmp_path / "none")
    assert str(wrong.value) == f"Cannot read the log {str(tmp_path / 'none')!r}: No such file or directory."


def test_the_command(tmp_path):
    """`backend-kwargs seal --from-log` prints a table of buckets and the line to paste, and the same as JSON."""
    file = written(tmp_path, *(json.dumps({"batch": 1 + at % 2, "sequence": 3 + at}) for at in range(40)))
    ran = forks.run("-m", "backend_kwargs", "seal", "--from-log", file, "--most", "2")
    assert ran.returncode == 0, ran.stderr
    last = ran.stdout.splitlines()[-1]
    assert last == (
        "bk.seal(compiled, example_inputs, dims=..., sizes={'batch': [1, 2]}, buckets={'sequence': [22, 42]})"
    )
    told = json.loads(forks.run("-m", "backend_kwargs", "seal", "--from-log", file, "--most", "2", "--json").stdout)
    assert told["line"] == last
    assert [bucket["size"] for bucket in told["proposals"][1]["buckets"]] == [22, 42]

"""Template files that cannot be read: errors of one line."""

import pytest

from backend_kwargs import BackendKwargsError, load_templates


def refusal(path):
    with pytest.raises(BackendKwargsError) as e:
        load_templates(path)
    return str(e.value)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        pytest.param(None, "A templates file must be a str or a Path, got None (NoneType).", id="none"),
        pytest.param(3, "A templates file must be a str or a Path, got 3 (int).", id="int"),
        pytest.param(b"t.toml", "A templates file must be a str or a Path, got b't.toml' (bytes).", id="bytes"),
        pytest.param("\0", "Cannot read templates from '\\x00': ValueError: embedded null byte.", id="null-byte"),
    ],
)
def test_no_path(path, message):
    """A value that is not a path raises, like any wrong value."""
    assert refusal(path) == message


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        pytest.param(b"x = ", "TOMLDecodeError: Invalid value (at end of document)", id="no-toml"),
        pytest.param(
            b"[%s]\n" % (b"a" * 300) * 2, f"TOMLDecodeError: Cannot declare ('{'a' * 180}...", id="cut-to-one-line"
        ),
        pytest.param(
            b"\xff",
            "UnicodeDecodeError: 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte",
            id="no-utf-8",
        ),
        pytest.param(b"x = " + b"[" * 20_000, "RecursionError: maximum recursion depth exceeded", id="nested"),
    ],
)
def test_no_toml(tmp_path, content, reason):
    """A file that is not TOML raises the parser's reason, in one short line."""
    path = tmp_path / "t.toml"
    path.write_bytes(content)
    assert refusal(path) == f"Cannot read templates from {str(path)!r}: {reason}."

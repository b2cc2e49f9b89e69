"""Files and texts of any content: one line says what is wrong, at once, and nothing is left behind."""

import contextlib
import json
import os
import time
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backend_kwargs import BackendKwargsError, CompileConfig, load_templates, make_backend
from backend_kwargs.auto.decisions_toml import read_decisions
from backend_kwargs.backend import Backend
from backend_kwargs.bundles.disk.contents import why_not_samples
from backend_kwargs.bundles.running import Built
from backend_kwargs.cli.console import print_table, say
from backend_kwargs.files import read_toml
from backend_kwargs.options.option import convert, split_candidates
from backend_kwargs.options.templates import find_template
from backend_kwargs.registry import list_templates
from tests import forks
from tests.faults.attempts import TIMES

AT_ONCE_S = 30.0  # a thousand times what each takes, on a busy machine
KEY = "ab" * 32
READERS = {
    "templates": load_templates,
    "decisions": lambda path: read_decisions(path, lambda name: find_template(name).options),
    "a compile config": CompileConfig.from_json,
}


def refusal(read, *given):
    """Return the error of a reader, which must be one line and come at once."""
    began = time.perf_counter()
    with pytest.raises(BackendKwargsError) as raised:
        read(*given)
    assert time.perf_counter() - began < AT_ONCE_S
    assert str(raised.value).isprintable()
    return str(raised.value)


@contextlib.contextmanager
def one_line_at_most():
    """Let nothing pass but our error, in one line."""
    try:
        yield
    except BackendKwargsError as error:
        if not str(error).isprintable():
            raise AssertionError(ascii(str(error))) from error


# ---- files that are none

KINDS = {
    "pipe": os.mkfifo,
    "folder": os.mkdir,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "loop": lambda path: path.symlink_to(path),
    "large": lambda path: path.touch() or os.truncate(path, 100 << 20),
}
WHY = {
    "pipe": "OSError: it is not a regular file",
    "folder": "OSError: it is not a regular file",
    "device": "OSError: it is not a regular file",
    "large": "OSError: it is longer than 8388608 bytes",
}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", READERS)
def test_a_file_that_is_none(what, kind, tmp_path, monkeypatch):
    """A pipe does not hang, a device is not read, and a large file is not parsed."""
    monkeypatch.chdir(tmp_path)
    KINDS[kind](path := Path("t"))
    message = refusal(READERS[what], path)
    assert message.startswith(f"Cannot read {what} from 't': {WHY.get(kind, 'OSError: [Errno ')}")


# ---- contents

DEEP = ".".join("a" * 1000)
TOML = {
    "dotted key": f"{DEEP} = 1",
    "dotted table": f"[{DEEP}]",
    "quoted keys": ".".join(['"a"'] * 1000) + " = 1",
    "spaced key": " . ".join("a" * 1000) + " = 1",
    "quoted keys with spaces": ".".join(['"a b"'] * 60_000) + " = 1",
    "literal keys": ".".join(["'$'"] * 60_000) + " = 1",
    "keys with escapes": ".".join(['"\\"#"'] * 60_000) + " = 1",
    "empty keys": " . ".join(['""'] * 60_000) + " = 1",
    "quoted table": "[" + ".".join(['"$"'] * 60_000) + "]",
    "quoted keys in an inline table": "x = {y = 'b', " + ".".join(['"="'] * 60_000) + " = 1}",
    "quoted keys after a comment": "# it's \"\n" + ".".join(['"$"'] * 60_000) + " = 1",
    "quoted keys after lines of text": 'x = """\n"a\\""""""\n' + ".".join(['"$"'] * 60_000) + " = 1",
    "text without an end": '"""' + '\\"""' * 500_000,
    "nested lists": f"x = {'[' * 1000}{']' * 1000}",
    "nested tables": f"x = {'{a=' * 1000}1{'}' * 1000}",
    "many digits": f"x = {'1' * 5000}",
    "many hexadecimal digits": f"x = 0x{'1' * 5000}",
    "twice the same key": "x = 1\nx = 2",
    "byte-order mark": "\ufeffx = 1",
    "control character": "x = '\x1b[2J'",
    "no text": b"\xff\xfe",
    "nothing": "",
}


@pytest.mark.parametrize("content", TOML.values(), ids=TOML)
@pytest.mark.parametrize("what", ["templates", "decisions"])
def test_toml_of_any_content(what, content, tmp_path):
    """What is no TOML, too deep, or too long is refused before our own code looks at it."""
    path = tmp_path / "t.toml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    message = refusal(READERS[what], path)
    assert message.startswith((f"Cannot read {what} from {str(path)!r}: ", f"{str(path)!r} has no [{what}."))


DOTS = ".".join("a" * 1000)
VALUES = {
    "text": f"x = '{DOTS}'",
    "lines of text": f'x = """\n"a\\"""{DOTS}"""""',
    "literal lines": f"x = '''\n'{DOTS}'''",
    "comment": f"x = '{DOTS}' # {DOTS}",
}


@pytest.mark.parametrize("content", VALUES.values(), ids=VALUES)
def test_dots_in_a_value_are_no_deep_key(content, tmp_path):
    (tmp_path / "t.toml").write_text(content)
    assert DOTS in read_toml(tmp_path / "t.toml", "a test")["x"]


TABLES = {
    "templates are a list": ("templates = [1]", "PATH has no [templates.NAME] table."),
    "templates are a number": ("templates = 1", "PATH has no [templates.NAME] table."),
    "a tool is a list": ("[tool]\nbackend_kwargs = [1]", "PATH has no [templates.NAME] table."),
    "a template is a list": ("[templates]\na = [1]", "[templates.a] must be a table, got [1] (list)."),
    "options are a list": (
        "[templates.a]\noptions = [1]",
        "'options' in [templates.a] must be dict, got [1] (list).",
    ),
    "a base is a number": ("[templates.a]\nbase = 1", "'base' in [templates.a] must be str, got 1 (int)."),
    "a name is none": (
        '[templates."a\\u001b"]\noptions = {max_autotune = true}',
        "A template's name must be letters, digits and '_', '-', '.', a letter first, got 'a\\x1b' (str).",
    ),
    "threads": (
        "[templates.a.options]\ncompile_threads = 100000",
        "Inductor option 'compile_threads' must be int of 1 to 1024 | None, got 100000 (int).",
    ),
    "a date": (
        "[templates.a.options]\nmax_autotune = 1979-05-27",
        "Inductor option 'max_autotune' must be bool, got datetime.date(1979, 5, 27) (date).",
    ),
    "a table": (
        "[templates.a.options.max_autotune]\nx = 1",
        "Inductor option 'max_autotune' must be bool, got {'x': 1} (dict).",
    ),
    "an unknown option in tables": (
        "[templates.a.options.a.b.c]\nd = 1",
        "Unknown Inductor option 'a.b.c.d'. Search them with: backend-kwargs explain inductor PATTERN",
    ),
}


@pytest.mark.parametrize(("content", "message"), TABLES.values(), ids=TABLES)
def test_templates_of_wrong_types(content, message, tmp_path):
    """Each wrong type is named, and no template of the file is registered."""
    path, before = tmp_path / "t.toml", list_templates()
    path.write_text(f"{content}\n", encoding="utf-8")
    assert refusal(load_templates, path) == message.replace("PATH", repr(str(path)))
    assert list_templates() == before


texts = st.text(max_size=9) | st.sampled_from(["\x1b[2J", "\ud800", "\u202e", "a" * 300, "max_autotune", "freezing"])
values = st.recursive(
    st.booleans() | st.integers() | st.floats() | texts | st.dates(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
keys = st.sampled_from(["base", "summary", "options", "winner", "fixed", "machine", "seconds", "made"]) | texts
tables = st.dictionaries(texts | st.just(KEY), st.dictionaries(keys, values, max_size=4) | values, max_size=3)


def written(value):
    """Return a value as TOML, in one line."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{written(str(name))} = {written(each)}' for name, each in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(written, value))}]"
    if isinstance(value, str):
        return json.dumps(value)
    return str(value).lower()


@settings(max_examples=60 * TIMES, deadline=None, suppress_health_check=list(HealthCheck))
@given(found=tables)
def test_any_toml_is_read_or_an_error(found, tmp_path):
    """A file of any tables is templates, decisions, or our error in one line."""
    path = tmp_path / "t.toml"
    for what in ("templates", "decisions"):
        path.write_text(f"{what} = {written(found)}\n", encoding="utf-8")
        with one_line_at_most():
            READERS[what](path)


@settings(max_examples=60 * TIMES, deadline=None, suppress_health_check=list(HealthCheck))
@given(found=st.dictionaries(st.sampled_from(["backend", "options", "mode", "kind", "version"]) | texts, values))
def test_any_compile_config_is_read_or_an_error(found):
    """A mapping of any values is a config, or our error in one line."""
    with one_line_at_most():
        CompileConfig.from_dict(found)


# ---- texts


def nested(levels):
    value = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize("levels", [100, 900, 100_000])
def test_deep_values(levels, monkeypatch):
    """A config, an environment variable or an option with many levels is refused by its depth."""
    deep = "it is nested more than 32 levels deep."
    assert refusal(Backend.from_config, {"options": nested(levels)}) == f"A config must be plain data: {deep}"
    assert refusal(CompileConfig.from_dict, {"mode": nested(levels)}) == f"A compile config must be plain data: {deep}"
    text = "[" * levels + "]" * levels
    plain = make_backend("tmpl-inductor")
    refusal(plain.bind, "command line", {"disabled_passes": text, "cpp.threads": text}, convert)
    monkeypatch.setenv("BACKEND_KWARGS_OPTIONS", f'{{"disabled_passes": {text}}}')
    assert refusal(make_backend, "tmpl-inductor").startswith("The environment variable BACKEND_KWARGS_OPTIONS must be ")


def test_lists_that_contain_each_other():
    """Thirty lists, each with the last one twice, are a billion values."""
    value = []
    for _ in range(30):
        value = [value, value]
    message = refusal(Backend.from_config, {"cpp.threads": value})
    assert message == "A config must be plain data: it has more than 131072 values."


LONG = {
    "spaces before a bracket": "a" + " " * 20_000 + "]",
    "spaces in a bracket": "a[" + " " * 20_000,
    "brackets": "[" * 20_000,
    "pairs of brackets": "a[" + "[]" * 20_000,
    "templates": "tmpl-inductor:" + "+".join(["aten"] * 20_000),
    "pluses": "tmpl-inductor:" + "+" * 20_000,
    "a name": "a" * 2_000_000,
    "a template": "tmpl-inductor:" + "a" * 2_000_000,
    "colons": ":" * 100_000,
    "dots": "a" + ".a" * 50_000 + ":f",
}


@pytest.mark.parametrize("text", LONG.values(), ids=LONG)
def test_long_specs(text):
    """A spec, a list of candidates or a template's name of any length is refused at once."""
    refusal(make_backend, text)
    refusal(Backend.from_config, {"template": text})
    with contextlib.suppress(BackendKwargsError):
        split_candidates(text)


# ---- samples of a bundle

HUGE = [[1 << 36], [1], "torch.float32", "cpu", "torch.strided"]  # 275 GB
SAMPLES = {
    "a dtype of quantized tensors": ([[[4, 8], [8, 1], "torch.quint8", "cpu", "torch.strided"]], "NotImplementedError"),
    "tensors of much memory": ([HUGE] * 100, "tensors of 27488 GB are more than this machine's memory"),
    "many tensors": ([HUGE] * 10_001, "they have more than 10000 arguments"),
}


@pytest.mark.parametrize(("tensors", "why"), [*SAMPLES.values(), ([], "")], ids=[*SAMPLES, "none"])
def test_samples_that_cannot_be_made(tensors, why):
    """They are refused when they are read, not when the module is deployed."""
    samples = [{"tuple": [{"tuple": [{"tensor": each} for each in tensors]}, {"dict": {}}]}]
    built = Built(CompileConfig(backend="eager"), torch.nn.Linear(8, 8), torch.device("cpu"), samples, ())
    found = why_not_samples(built)
    assert found.startswith(why)
    assert bool(found) is bool(why)


# ---- the command line


def test_many_lines_are_printed_at_once(capsys):
    """A manifest of a few megabytes may have as many notes."""
    began = time.perf_counter()
    say(*["\x1b[2J"] * 100_000)
    print_table(("a", "b"), [(1, 2)] * 2000)
    assert time.perf_counter() - began < AT_ONCE_S
    assert capsys.readouterr().out.count("\\x1b[2J\n") == 100_000


def test_the_command_line_says_it_in_one_line(tmp_path):
    """Commands that read a file refuse it with exit code 2, and leave nothing behind."""
    (tmp_path / "t.toml").write_text(TOML["dotted key"], encoding="utf-8")
    os.mkfifo(tmp_path / "pipe")
    before = sorted(each.name for each in tmp_path.iterdir())
    for arguments in (
        ["decisions", "import", "t.toml", "--store", "s"],
        ["decisions", "import", "pipe", "--store", "s"],
        ["compare", "--from", "pipe", "-o", "out.html"],
        ["explain", "tmpl-inductor", "--option", f"cpp.threads={'[' * 500}{']' * 500}"],
    ):
        ran = forks.run("-m", "backend_kwargs", *arguments, cwd=tmp_path)
        assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (2, "", 1), ran.stderr
        assert ran.stderr.startswith("error: ")
    assert sorted(each.name for each in tmp_path.iterdir()) == before

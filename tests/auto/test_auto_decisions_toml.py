"""Decisions as TOML, and the command that lists, shows, exports, imports and deletes them."""

import json
import math
from dataclasses import replace

import pytest

import backend_kwargs
from backend_kwargs.auto.decisions_toml import read_decisions, template_name, write_decisions
from backend_kwargs.auto.store import Catalogue
from backend_kwargs.errors import BackendKwargsError, BackendKwargsWarning, warn_once
from backend_kwargs.facts.decision import plain
from backend_kwargs.options.templates import find_template
from tests import forks
from tests.auto.graphs import KEY, MADE, spoil


def options_of(name):
    return find_template(name).options


def test_export_is_read_back(store, tmp_path):
    """A decision written to TOML comes back without the race's table."""
    write_decisions([MADE], tmp_path / "d.toml")
    assert read_decisions(tmp_path / "d.toml", options_of) == [replace(MADE, rows=())]


def test_export_keeps_any_text(tmp_path):
    """Characters beyond 16 bits, quotes and control characters survive TOML."""
    odd = replace(MADE, rows=(), facts='\U0001f600 "ä" \x7f\n')
    write_decisions([odd], tmp_path / "d.toml")
    assert read_decisions(tmp_path / "d.toml", options_of) == [odd]


LEFT_OUT = f"Decision {'cd' * 10} is left out, it cannot be written as TOML: "


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        pytest.param({"options": {"x": [[1]]}}, f"{LEFT_OUT}option 'x' is [[1]].", id="a nested list"),
        pytest.param({"options": {"x": {"a": 1}}}, f"{LEFT_OUT}option 'x' is {{'a': 1}}.", id="a mapping"),
        pytest.param({"options": {"a": 1, "x": None}}, f"{LEFT_OUT}option 'x' is None.", id="nothing"),
        pytest.param({"options": {"x": math.nan}}, f"{LEFT_OUT}TOMLDecodeError: Invalid value", id="no number"),
        pytest.param({"fixed": {"x": [math.inf]}}, f"{LEFT_OUT}TOMLDecodeError: ", id="a number without end"),
        pytest.param({"facts": "\ud800"}, f"{LEFT_OUT}UnicodeEncodeError: ", id="half of a character"),
        pytest.param(
            {"key": "zz\n"},
            r"Decision zz\n is left out, it cannot be written as TOML: its key has not 64 hexadecimal digits.",
            id="another key",
        ),
    ],
)
def test_export_leaves_out_what_has_no_form(tmp_path, changed, message):
    """A warning names the decision and why; the others are written, and read back."""
    warn_once.cache_clear()
    hostile = replace(MADE, **{"key": "cd" * 32, **changed})
    with pytest.warns(BackendKwargsWarning) as warned:
        assert write_decisions([hostile, MADE], tmp_path / "d.toml") == [MADE]
    assert [str(each.message)[: len(message)] for each in warned if "leaves out" not in str(each.message)] == [message]
    assert read_decisions(tmp_path / "d.toml", options_of) == [replace(MADE, rows=())]


def test_an_export_is_a_template(store, tmp_path):
    """`load_templates` makes the winner of an exported decision a template."""
    write_decisions([MADE], tmp_path / "d.toml")
    assert backend_kwargs.load_templates(tmp_path / "d.toml") == [template_name(MADE)]
    assert backend_kwargs.make_backend(f"tmpl-inductor:{template_name(MADE)}").options == {"triton.cudagraphs": True}


def test_an_exported_template_holds_the_users_options(tmp_path):
    """An exported template contains the winner's options and, with higher precedence, the user's."""
    fixed = {"epilogue_fusion": True, "triton.cudagraphs": False}
    made = replace(MADE, key="cd" * 32, rows=(), fixed=fixed)
    write_decisions([made], tmp_path / "d.toml")
    backend_kwargs.load_templates(tmp_path / "d.toml")
    assert backend_kwargs.make_backend(f"tmpl-inductor:{template_name(made)}").options == fixed
    assert read_decisions(tmp_path / "d.toml", options_of) == [made]


def test_an_exported_template_says_what_it_leaves_out(tmp_path):
    """A function among the user's options does not prevent an export; a warning names the option."""
    made = replace(MADE, fixed=plain({"cpp.threads": 1, "post_grad_custom_post_pass": print}))
    with pytest.warns(BackendKwargsWarning) as warned:
        write_decisions([made], tmp_path / "d.toml")
    (read,) = read_decisions(tmp_path / "d.toml", options_of)
    wanted = (
        f"Template {template_name(MADE)!r} leaves out 'post_grad_custom_post_pass', which cannot be written as TOML."
    )
    assert str(warned[0].message) == wanted
    assert read.fixed == {"cpp.threads": 1}


def test_reads_an_older_export(tmp_path):
    """A file from before the user's options were exported has none."""
    write_decisions([MADE], tmp_path / "d.toml")
    text = (tmp_path / "d.toml").read_text()
    (tmp_path / "d.toml").write_text(text.replace(f'["decisions"."{KEY}"."fixed"]', ""))
    assert read_decisions(tmp_path / "d.toml", options_of) == [replace(MADE, rows=())]


def test_import_refuses_what_no_candidate_sets(tmp_path):
    """An import refuses options that no candidate sets, since an option may name a program to run."""
    write_decisions([replace(MADE, options={"cpp.cxx": "/tmp/evil"})], tmp_path / "d.toml")
    with pytest.raises(BackendKwargsError) as error:
        read_decisions(tmp_path / "d.toml", options_of)
    wanted = f"[decisions.{KEY}] sets {{'cpp.cxx': '/tmp/evil'}}, which candidate 'cudagraphs' does not set."
    assert str(error.value) == wanted


def test_import_says_that_a_template_is_unknown(tmp_path):
    """An import names the template that is unknown here, such as one that another process registered."""
    write_decisions([replace(MADE, winner="mine")], tmp_path / "d.toml")
    with pytest.raises(BackendKwargsError) as error:
        read_decisions(tmp_path / "d.toml", options_of)
    assert str(error.value) == (
        f"[decisions.{KEY}] is for candidate 'mine'. Unknown template 'mine'. `backend-kwargs list` shows all. "
        "An installed package can provide it, by the entry-point group 'backend_kwargs.templates'."
    )


@pytest.mark.parametrize("number", ["nan", "inf", "1" + "0" * 400])
def test_import_refuses_what_is_no_number(tmp_path, number):
    """An import refuses numbers that SQLite cannot store."""
    write_decisions([MADE], tmp_path / "d.toml")
    text = (tmp_path / "d.toml").read_text().replace('"seconds" = 2.5', f'"seconds" = {number}')
    (tmp_path / "d.toml").write_text(text)
    with pytest.raises(
        BackendKwargsError, match=r"is not a decision: (Expected `float`|Number out of range).* - at `\$\.seconds`\.$"
    ):
        read_decisions(tmp_path / "d.toml", options_of)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("", "has no [decisions.KEY] table.", id="empty"),
        pytest.param(
            "schema = 2\n[decisions.k]", "[decisions.'k'] is not a decision: a key has 64 hexadecimal digits.", id="key"
        ),
        pytest.param(
            f"schema = 2\n[decisions.{KEY}]\ngraph = 1",
            f"[decisions.{KEY}] is not a decision: Expected `str`, got `int` - at `$.graph`.",
            id="types",
        ),
        pytest.param(
            f"schema = 2\n[decisions]\n{KEY} = 1",
            f"[decisions.{KEY}] is not a decision: 'int' object is not iterable.",
            id="no table",
        ),
        pytest.param("[decisions", "Cannot read decisions from ", id="syntax"),
        pytest.param("x = " + "[" * 20_000, "RecursionError: maximum recursion depth exceeded", id="nested"),
    ],
)
def test_import_says_what_is_wrong(tmp_path, text, message):
    """A file without decisions is refused in one line."""
    (tmp_path / "d.toml").write_text(text)
    with pytest.raises(BackendKwargsError) as error:
        read_decisions(tmp_path / "d.toml", options_of)
    assert message in str(error.value)


def run(*arguments):
    done = forks.run("-m", "backend_kwargs", "decisions", *arguments)
    return done.stdout + done.stderr


def test_command_line(store, tmp_path):
    """Decisions are listed, shown, exported, deleted and imported again."""
    store.mkdir()
    assert run("list") == f"No decisions in {str(store)!r}.\n"
    Catalogue(store).add(MADE)
    assert json.loads(run("list", "--json"))[0]["winner"] == "cudagraphs"
    assert run("show", "abab").startswith("auto: cudagraphs for 3 ops (2.5 s)\n")
    assert (
        run("export", tmp_path / "d.toml") == f"1 written to {tmp_path / 'd.toml'}, 1 as templates: auto-{KEY[:12]}.\n"
    )
    assert run("forget") == "error: Name the decisions to forget, or give --all.\n"
    assert run("forget", "") == "error: A key to forget is empty; give --all to forget every decision.\n"
    assert run("forget", "abab") == "1 forgotten.\n"
    assert run("show", "abab") == "error: No decision's key begins with 'abab'; `decisions list` shows all.\n"
    assert run("import", tmp_path / "d.toml") == f"1 added to {str(store)!r}.\n"
    assert Catalogue(store).all() == [replace(MADE, rows=())]


def test_command_line_exports_eager_as_no_template(store, tmp_path):
    """If eager won, the export contains no template."""
    Catalogue(store).add(replace(MADE, winner="eager", options={}))
    kept = "none as a template (1 chose eager or another compiler, which has no template)"
    message = f"1 written to {tmp_path / 'd.toml'}, {kept}.\n"
    assert run("export", tmp_path / "d.toml") == message


def test_command_line_forgets_what_cannot_be_read(store):
    """A broken row is deleted by its key, or with all others."""
    Catalogue(store).add(MADE, replace(MADE, key="cd" * 32), replace(MADE, key="ef" * 32))
    spoil(store, "cd" * 32)
    assert run("forget", "cdcd") == "1 forgotten.\n"
    spoil(store, KEY)
    assert run("forget", "--all") == "2 forgotten.\n"


def test_command_line_imports_what_joined_templates_won(store, tmp_path):
    """A winner that combines several templates is imported."""
    joined = replace(MADE, winner="aten+freezing", options={"freezing": True}, rows=())
    write_decisions([joined], tmp_path / "d.toml")
    assert run("import", tmp_path / "d.toml") == f"1 added to {str(store)!r}.\n"
    assert Catalogue(store).all() == [joined]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        pytest.param(
            {"winner": "tmpl-tvm", "compiler": "tmpl-tvm", "options": {"target": "llvm"}},
            "sets {'target': 'llvm'} by 'tmpl-tvm', which candidate 'tmpl-tvm' does not set.",
            id="a compiler's option",
        ),
        pytest.param(
            {"winner": "tmpl-tvm", "options": {"target": "llvm"}},
            "sets {'target': 'llvm'}, which candidate 'tmpl-tvm' does not set.",
            id="a compiler's name alone",
        ),
        pytest.param(
            {"winner": "mine", "compiler": "tmpl-tvm", "options": {}},
            "sets {} by 'tmpl-tvm', which candidate 'mine' does not set.",
            id="a compiler under another name",
        ),
        pytest.param(
            {"winner": "packed", "options": {"rewrites": ["packed", "x"]}},
            "sets {'rewrites': ['packed', 'x']}, which candidate 'packed' does not set.",
            id="a rewrite",
        ),
        pytest.param(
            {"winner": "max_autotune", "options": {"max_autotune_gemm": True, "tuned_products": ["1x1x1"]}},
            "sets {'max_autotune_gemm': True, 'tuned_products': ['1x1x1']}, which candidate 'max_autotune' does not "
            "set.",
            id="an option that was removed",
        ),
        pytest.param(
            {"winner": "bf16", "options": {"precision": "int8"}},
            "sets {'precision': 'int8'}, which candidate 'bf16' does not set.",
            id="a precision",
        ),
        pytest.param(
            {"winner": "freezing", "options": {"x": 1}},
            "sets {'x': 1}, which candidate 'freezing' does not set.",
            id="a template",
        ),
    ],
)
def test_import_says_what_no_candidate_sets(tmp_path, changed, message):
    """The error names the options, the compiler if there is one, and the candidate."""
    write_decisions([replace(MADE, **changed)], tmp_path / "d.toml")
    with pytest.raises(BackendKwargsError) as error:
        read_decisions(tmp_path / "d.toml", options_of)
    assert str(error.value) == f"[decisions.{KEY}] {message}"


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"winner": "bf16", "options": {"precision": "bf16", "max_error": 0.25}}, id="precision"),
        pytest.param({"winner": "packed", "options": {"rewrites": ["packed"]}}, id="rewrite"),
        pytest.param({"winner": "freezing", "options": {"freezing": True}}, id="template"),
        pytest.param({"winner": "default", "options": {}}, id="default"),
        pytest.param({"cut_s": 3.5, "seconds": 1.5, "machine": {"gpu": "H100", "driver": None}}, id="figures"),
    ],
)
def test_every_kind_of_winner_is_read_back(tmp_path, changed):
    """A decision is imported where its candidate sets these options; what is unknown of a machine is left out."""
    made = replace(MADE, rows=(), **changed)
    write_decisions([made], tmp_path / "d.toml")
    machine = {name: value for name, value in made.machine.items() if value is not None}
    assert read_decisions(tmp_path / "d.toml", options_of) == [replace(made, machine=machine)]


def test_the_whole_file(tmp_path):
    """Each winner is a template with the user's options over its own; eager and other compilers are none."""
    made = replace(MADE, cut_s=0.0, made=1e9)
    eager = replace(made, key="cd" * 32, winner="eager", options={}, machine={}, fixed={"a": [1, 2.5, True, "b"]})
    other = replace(made, key="ef" * 32, winner="tmpl-tvm", compiler="tmpl-tvm", options={}, machine={})
    write_decisions([replace(made, fixed={"x": 1}), eager, other], tmp_path / "d.toml")
    plain = '"facts" = "3 ops"\n"seconds" = 2.5\n"cut_s" = 0.0\n"made" = 1000000000.0\n'
    plain += '"inputs" = []\n"model" = ""\n"budget_s" = 0.0\n'
    assert (tmp_path / "d.toml").read_text() == (
        "# Decisions of tmpl-inductor:auto. `backend-kwargs decisions import` adds them to a store;\n"
        "# `load_templates` reads each winner as a template.\n"
        "schema = 2\n"
        f'\n["templates"."auto-{KEY[:12]}"]\n"summary" = "cudagraphs for 3 ops"\n'
        f'\n["templates"."auto-{KEY[:12]}"."options"]\n"triton.cudagraphs" = true\n"x" = 1\n'
        f'\n["decisions"."{KEY}"]\n"graph" = "graph"\n"winner" = "cudagraphs"\n"compiler" = ""\n{plain}'
        f'\n["decisions"."{KEY}"."options"]\n"triton.cudagraphs" = true\n'
        f'\n["decisions"."{KEY}"."fixed"]\n"x" = 1\n'
        f'\n["decisions"."{KEY}"."machine"]\n"gpu" = "H200"\n'
        f'\n["decisions"."{"cd" * 32}"]\n"graph" = "graph"\n"winner" = "eager"\n"compiler" = ""\n{plain}'
        f'\n["decisions"."{"cd" * 32}"."options"]\n'
        f'\n["decisions"."{"cd" * 32}"."fixed"]\n"a" = [1, 2.5, true, "b"]\n'
        f'\n["decisions"."{"cd" * 32}"."machine"]\n'
        f'\n["decisions"."{"ef" * 32}"]\n"graph" = "graph"\n"winner" = "tmpl-tvm"\n"compiler" = "tmpl-tvm"\n{plain}'
        f'\n["decisions"."{"ef" * 32}"."options"]\n'
        f'\n["decisions"."{"ef" * 32}"."fixed"]\n'
        f'\n["decisions"."{"ef" * 32}"."machine"]\n'
    )


NOT_ONE = "is a file, and decisions are kept in a folder: name one"


@pytest.mark.parametrize(
    "command", [("list",), ("list", "--json"), ("show", "ab"), ("export", "d.toml"), ("forget", "ab")]
)
@pytest.mark.parametrize("name", ["store", "store.sqlite"])
def test_command_line_fails_on_what_is_no_store(name, command, tmp_path):
    """A file is an error of one line, not an empty list."""
    store = tmp_path / name
    store.write_text("mine" * 100)
    done = forks.run("-m", "backend_kwargs", "decisions", *command, "--store", store)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: Store {str(store)!r} {NOT_ONE}")
    assert done.stderr.count("\n") == 1


def test_command_line_lists_what_is_left_of_a_damaged_store(store):
    """The decisions that can still be read are listed, with a warning."""
    Catalogue(store).add(*(replace(MADE, key=f"{at:064}") for at in range(4)))
    spoil(store, f"{2:064}")
    done = forks.run("-m", "backend_kwargs", "decisions", "list", "--json")
    assert done.returncode == 0
    assert len(json.loads(done.stdout)) == 3
    assert "its decision is not valid: ValidationError: Expected `float`, got `str` - at `$.seconds`" in done.stderr

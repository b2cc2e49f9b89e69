"""Templates: built-in, registered, from plug-ins, from TOML."""

import pytest

import backend_kwargs as bk
from backend_kwargs.options.machine import REQUIREMENTS
from backend_kwargs.options.templates import (
    BUILT_IN,
    ENTRY_POINT_GROUP,
    Template,
    derive,
    find_template,
    is_published,
    template_names,
)

PLUG_IN = """
from backend_kwargs.options.templates import Template
WHOLE = Template("of a plug-in", {"max_autotune": True}, needs=("gpu",))
OPTIONS = {"max-autotune": True}
NUMBER = 3
WRONG = {"max_autotune": 3}
"""


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_speaks(name):
    """Each built-in template has a summary, known requirements, and a documented fallback if it has any."""
    template = BUILT_IN[name]
    assert template.summary
    assert set(template.needs) <= set(REQUIREMENTS)
    assert bool(template.needs) == bool(template.otherwise)


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_options_exist(name):
    """Each option of a built-in template exists in this torch, with a value of its type."""
    assert dict(bk.make_backend(f"tmpl-inductor:{name}").options).items() >= BUILT_IN[name].options.items()


@pytest.mark.parametrize("name", [name for name in BUILT_IN if name != "default"])
def test_built_in_changes_something(name):
    """Every template except `default` differs from plain Inductor."""
    backend = bk.make_backend(f"tmpl-inductor:{name}")
    changed = {k for k, v in backend.options.items() if backend.option(k).default != v}
    assert changed


def test_built_in_differ():
    """No two templates set the same options."""
    all_options = [dict(template.options) for template in BUILT_IN.values()]
    assert all(options not in all_options[:i] for i, options in enumerate(all_options))


def test_where_known_needs_no_option_of_another_torch():
    """An option under `where_known` is omitted if this torch lacks it."""
    from backend_kwargs.options import templates

    templates._registered["x"] = Template("", {"freezing": True}, where_known={"no_such": 1, "max_autotune": True})
    assert dict(bk.make_backend("tmpl-inductor:x").options) == {"freezing": True, "max_autotune": True}


def test_derive():
    """A derived template merges its options onto its bases' in order, and joins their costs and requirements."""
    found = derive("max_autotune+cudagraphs", {"triton.cudagraphs": False}, "mine")
    first, second = BUILT_IN["max_autotune"], BUILT_IN["cudagraphs"]
    assert dict(found.options) == {**first.options, "triton.cudagraphs": False}
    assert (found.summary, found.needs) == ("mine", ("gpu", "triton", "large_gpu"))
    assert (found.costs, found.otherwise) == (
        f"{first.costs}; {second.costs}",
        f"{first.otherwise}; {second.otherwise}",
    )


@pytest.mark.parametrize(
    ("base", "summary"),
    [
        pytest.param("aten", "aten, with options of its own", id="base"),
        pytest.param(None, "options of its own", id="no"),
    ],
)
def test_derive_says_what_it_is(base, summary):
    """A derived template without a summary names its bases."""
    assert derive(base, {}).summary == summary


def test_derived_options_are_read_only_copies():
    """Changing the dict from which a template was made does not change the template."""
    mine = {"rocm.arch": ["a"]}
    found = derive(None, mine)
    mine["rocm.arch"].append("b")
    assert dict(found.options) == {"rocm.arch": ["a"]}
    with pytest.raises(TypeError):
        found.options["rocm.arch"] = []


def test_derived_keeps_what_only_some_torch_knows():
    """A derived template also has its base's options under `where_known`."""
    assert derive("eager_numerics", {}).where_known == BUILT_IN["eager_numerics"].where_known


def test_registered_template_is_found_listed_and_published():
    """A registered template is listed with the built-in ones, and dynamo knows it."""
    assert not is_published("serve")
    bk.register_template("serve", {"max-autotune": True}, summary="mine")
    assert (find_template("serve").summary, dict(find_template("serve").options)) == ("mine", {"max_autotune": True})
    assert template_names()[len(BUILT_IN)] == "serve"
    assert is_published("serve")


@pytest.mark.parametrize(
    ("name", "next_step"),
    [
        pytest.param("freezin", "Did you mean 'freezing'?", id="near"),
        pytest.param("qqq", "`backend-kwargs list` shows all.", id="none near"),
    ],
)
def test_unknown_template(name, next_step):
    """The error for a wrong name has the nearest one, or the next step where none is near."""
    with pytest.raises(bk.BackendKwargsError) as e:
        find_template(name)
    assert str(e.value) == f"Unknown template {name!r}. {next_step}"


# --- plug-ins -------------------------------------------------------------------------------------------------------


@pytest.fixture
def plug_in(install):
    install(
        "plug_in",
        PLUG_IN,
        ENTRY_POINT_GROUP,
        whole="WHOLE",
        options="OPTIONS",
        number="NUMBER",
        wrong="WRONG",
        lost="LOST",
    )


@pytest.mark.parametrize(
    ("name", "summary"),
    [
        pytest.param("whole", "of a plug-in", id="template"),
        pytest.param("options", "from plug_in:OPTIONS", id="mapping"),
    ],
)
@pytest.mark.usefixtures("plug_in")
def test_plug_in(name, summary):
    """An installed package provides a Template or a mapping of options, which works like a built-in one."""
    assert name in bk.list_templates()
    assert bk.get_template(name).summary == summary
    assert dict(bk.make_backend(f"tmpl-inductor:{name}").options) == {"max_autotune": True}


def test_plug_in_is_loaded_only_when_named(install):
    """Listing loads no plug-in, and a broken one does not affect the others."""
    install("broken", "raise ImportError('no luck')", ENTRY_POINT_GROUP, unlucky="X")
    assert "unlucky" in bk.list_templates()
    assert bk.make_backend("tmpl-inductor:aten+freezing").spec == "tmpl-inductor:aten+freezing"


def test_broken_plug_in_is_named(install):
    """The error for a plug-in that fails to load has its reason."""
    install("broken", "raise ImportError('no luck')", ENTRY_POINT_GROUP, unlucky="X")
    with pytest.raises(bk.BackendKwargsError) as e:
        bk.make_backend("tmpl-inductor:unlucky")
    assert str(e.value) == "Template 'unlucky' of 'broken:X' does not load: ImportError: no luck."


@pytest.mark.parametrize(
    ("name", "message"),
    [
        pytest.param(
            "number", "Entry point 'plug_in:NUMBER' must be a Template or a mapping of options, got 3 (int).", id="type"
        ),
        pytest.param("wrong", "Inductor option 'max_autotune' must be bool, got 3 (int).", id="option"),
        pytest.param(
            "lost",
            "Template 'lost' of 'plug_in:LOST' does not load: "
            "AttributeError: module 'plug_in' has no attribute 'LOST'.",
            id="missing",
        ),
    ],
)
@pytest.mark.usefixtures("plug_in")
def test_wrong_plug_in(name, message):
    """A plug-in that provides something else raises when it is named."""
    with pytest.raises(bk.BackendKwargsError) as e:
        bk.make_backend("tmpl-inductor:default", template=name)
    assert str(e.value) == message


# --- TOML -----------------------------------------------------------------------------------------------------------

TOML = """
[templates.serve]
base = "max_autotune"
summary = "for the server"
options = {"triton.cudagraphs" = false, max-fusion-size = 32}

[templates.serve-frozen]
base = "serve+freezing"
[templates.serve-frozen.options.triton]
cudagraph_capture_sizes = [1, 2]
[templates.serve-frozen.options.post_grad_fusion_options]
some_pass = {size = 1}
[templates.serve-frozen.options.store]
url = "kept"
"""


@pytest.fixture
def toml(tmp_path):
    def write(text, name="templates.toml"):
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return write


def test_load_templates(toml):
    """Tables become templates: bases from above in the file, dotted names quoted or nested, values by type."""
    assert bk.load_templates(toml(TOML), trust=True) == ["serve", "serve-frozen"]
    assert bk.get_template("serve").summary == "for the server"
    assert dict(bk.make_backend("tmpl-inductor:serve-frozen").options) == {
        **BUILT_IN["max_autotune"].options,
        "triton.cudagraphs": False,
        "max_fusion_size": 32,
        "freezing": True,
        "triton.cudagraph_capture_sizes": (1, 2),
        "post_grad_fusion_options": {"some_pass": {"size": 1}},
        "store": bk.Store("kept"),
    }


def test_load_templates_of_a_pyproject(toml):
    """A pyproject.toml has its templates in [tool.backend_kwargs.templates]."""
    path = toml("[tool.backend_kwargs.templates.serve]\nbase = 'aten'\n[project]\nname = 'x'", "pyproject.toml")
    assert bk.load_templates(str(path)) == ["serve"]
    assert bk.get_template("serve").options == BUILT_IN["aten"].options


def test_load_templates_again(toml):
    """The same file may be loaded twice."""
    path = toml(TOML)
    assert bk.load_templates(path, trust=True) == bk.load_templates(path, trust=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("", "{path!r} has no [templates.NAME] table.", id="empty"),
        pytest.param("[tool.other]", "{path!r} has no [templates.NAME] table.", id="other-tool"),
        pytest.param("templates.x = 3", "[templates.x] must be a table, got 3 (int).", id="no-table"),
        pytest.param(
            "[templates.x]\nbas = 'aten'", "Unknown key in [templates.x] 'bas'. Did you mean 'base'?", id="key"
        ),
        pytest.param(
            "[templates.x]\nqqq = 1",
            "Unknown key in [templates.x] 'qqq'. It takes base, summary, options.",
            id="no-near-key",
        ),
        pytest.param("[templates.x]\nbase = 3", "'base' in [templates.x] must be str, got 3 (int).", id="type-of-base"),
        pytest.param(
            "[templates.x]\noptions = 3", "'options' in [templates.x] must be dict, got 3 (int).", id="type-of-options"
        ),
        pytest.param("[templates.x]\nbase = 'aen'", "Unknown template 'aen'. Did you mean 'aten'?", id="base"),
        pytest.param(
            "[templates.x]\nbase = 'y'\n[templates.y]",
            "Unknown template 'y'. `backend-kwargs list` shows all.",
            id="base-below",
        ),
        pytest.param(
            "[templates.x.options]\nmax_autotun = true",
            "Unknown Inductor option 'max_autotun'. Did you mean 'max_autotune'?",
            id="option",
        ),
        pytest.param(
            "[templates.x.options]\nmax_autotune = 3",
            "Inductor option 'max_autotune' must be bool, got 3 (int).",
            id="value",
        ),
        pytest.param(
            "[templates.'a b']",
            "A template's name must be letters, digits and '_', '-', '.', a letter first, got 'a b' (str).",
            id="name",
        ),
        pytest.param("[templates.aten]", "Template 'aten' exists with other options; choose another name.", id="taken"),
    ],
)
def test_wrong_toml(toml, text, message):
    """The error for a wrong file names table and key, and nothing in the file is registered."""
    path = toml(f"{text}\n" if text.startswith(("t", "[to")) or not text else f"[templates.fine]\n{text}")
    with pytest.raises(bk.BackendKwargsError) as e:
        bk.load_templates(path)
    assert str(e.value) == message.format(path=str(path))
    assert bk.list_templates() == list(BUILT_IN)


def test_no_toml(toml):
    """The error for a file that is not TOML has the parser's reason."""
    path = toml("x = ")
    with pytest.raises(bk.BackendKwargsError) as e:
        bk.load_templates(path)
    assert (
        str(e.value)
        == f"Cannot read templates from {str(path)!r}: TOMLDecodeError: Invalid value (at end of document)."
    )


def test_missing_toml(tmp_path):
    """A missing file raises."""
    path = str(tmp_path / "none.toml")
    with pytest.raises(bk.BackendKwargsError) as e:
        bk.load_templates(path)
    assert (
        str(e.value)
        == f"Cannot read templates from {path!r}: FileNotFoundError: [Errno 2] No such file or directory: {path!r}."
    )

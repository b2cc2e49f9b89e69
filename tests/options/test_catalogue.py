"""Facts about torch._inductor.config on which the catalogue relies."""

import json
import os
import subprocess
import sys
from itertools import chain
from typing import Literal

import pytest
import torch
from torch._inductor import config

from backend_kwargs.errors import BackendKwargsError
from backend_kwargs.options.catalogue import (
    ADDED,
    CORRECTED_TYPES,
    REMOVED,
    RENAMED,
    documented,
    inductor_option,
    inductor_options,
    read_notes,
    source_notes,
)
from backend_kwargs.options.option import check, convert, describe
from backend_kwargs.registry import make_backend

RELEASE = tuple(map(int, torch.__version__.split(".")[:2]))
HERE = ".".join(map(str, RELEASE))
UNREAD_COPIES = [name for name in config._config if name.startswith("cuda.cutlass_")]


def message_of(name):
    with pytest.raises(BackendKwargsError) as e:
        inductor_option(name)
    return str(e.value)


def in_child(code, **env):
    """Run `code` in a fresh process and return the JSON it prints."""
    run = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **env}, capture_output=True, text=True, check=True
    )
    return json.loads(run.stdout)


def test_every_option_is_there():
    """The catalogue has exactly Inductor's options, including private ones."""
    assert set(config._config) - set(inductor_options()) == {"TYPE_CHECKING"}
    assert set(inductor_options()) <= set(config._config)


def test_every_option_is_described_shortly():
    """The name of every type fits into a message."""
    assert max(len(describe(option.type)) for option in inductor_options().values()) <= 120


def test_every_default_passes_its_own_check():
    """Torch's defaults have the types in the catalogue."""
    for option in inductor_options().values():
        assert check(option, option.default) is option.default


def test_every_default_survives_json():
    """Defaults written as JSON are read back by `convert` unchanged."""
    for option in inductor_options().values():
        if isinstance(option.default, bool | int | float | list | tuple | dict | None):
            assert convert(option, json.dumps(option.default)) == option.default


def test_every_name_is_found_with_dashes():
    """A name with dashes instead of underscores finds the option, if this torch reads it."""
    for name, option in inductor_options().items():
        if not name.startswith("cuda."):
            assert inductor_option(name.replace("_", "-")) is option


def test_defaults_are_copies():
    """Changing a returned default does not change torch's own."""
    for name, option in inductor_options().items():
        if isinstance(option.default, list | dict | set):
            assert option.default is not config._config[name].default


def test_options_are_read_only():
    """The catalogue is read-only."""
    with pytest.raises(TypeError):
        inductor_options()["max_autotune"] = None


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        pytest.param("max_autotune", bool, id="from-the-default"),
        pytest.param("triton.max_tiles", int | None, id="annotated"),
        pytest.param("triton.multi_kernel", Literal[0, 1, 2, 3], id="literal"),
        pytest.param("cuda.cutlass_max_profiling_configs", int | None, id="inherited-without-annotation"),
        pytest.param("xpu.cutlass_max_profiling_swizzle_options", list[int], id="inherited-generic"),
        pytest.param("cpp.gemm_cache_blocking", str | None, id="declared-as-none"),
        pytest.param("_raise_error_for_testing", bool, id="private"),
    ],
)
def test_type(name, wanted):
    """An option's type is the one that torch declares, corrected where torch loses it."""
    assert inductor_options()[name].type == wanted


@pytest.mark.parametrize(
    ("name", "wanted"), [("compile_threads", "int of 1 to 1024 | None"), ("cpp.threads", "int of 1 to 1024 | -1")]
)
def test_numbers_of_threads_are_bounded(name, wanted):
    """A file with a number of threads that no machine has is refused, before torch starts them."""
    with pytest.raises(BackendKwargsError) as e:
        make_backend("tmpl-inductor", {name: 100_000})
    assert str(e.value) == f"Inductor option {name!r} must be {wanted}, got 100000 (int)."
    assert make_backend("tmpl-inductor", {name: 1}).options == {name: 1}


def test_corrected_types_are_needed():
    """Each correction is for an option that torch types as None, or that torch's code contradicts."""
    contradicted = {"cpp.cxx", "triton.cudagraph_capture_sizes", "compile_threads"}
    unset = {name for name in CORRECTED_TYPES if name in config._config and config._config[name].default is None}
    assert {config.get_type(name) for name in unset - contradicted} == {type(None)}


def test_nothing_is_left_typed_none():
    """No option accepts only None."""
    assert [name for name, option in inductor_options().items() if option.type in (None, type(None))] == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        pytest.param("cpp.cxx", "clang++", id="compiler"),
        pytest.param("cpp.cxx", (None, "clang++", "g++"), id="compilers"),
        pytest.param("triton.cudagraph_capture_sizes", (1, 2, (4, 8)), id="capture-sizes"),
    ],
)
def test_takes_what_torch_takes(name, value):
    """Where torch's annotation is narrower than its code, values that the code accepts pass."""
    assert check(inductor_option(name), value) is value


def test_alias_has_its_targets_default():
    """An alias shows the default of its target."""
    option = inductor_options()["use_static_triton_launcher"]
    assert option.alias == "torch._inductor.config.use_static_cuda_launcher"
    assert option.default is inductor_options()["use_static_cuda_launcher"].default


READ = """
import json, sys
from backend_kwargs.options.catalogue import inductor_options
found = inductor_options()
forced = {name: [x.forced, x.forced_value, x.default] for name, x in found.items() if x.forced}
print(json.dumps([forced, "torch._inductor.compile_fx" in sys.modules]))
"""


@pytest.mark.parametrize(
    "default", [{}, {"TORCHINDUCTOR_FX_GRAPH_CACHE_DEFAULT": "1"}], ids=["alone", "over a default"]
)
def test_forced_by_environment(default):
    """An option that the environment forces shows this with the value, as does its alias; a default from it does not.

    Reading the catalogue does not import Inductor's compiler.
    """
    variables = {"TORCHINDUCTOR_FX_GRAPH_CACHE": "0", "TORCH_COMPILE_FORCE_DISABLE_CACHES": "1", **default}
    forced, compiler_imported = in_child(READ, **variables)
    assert forced == {"fx_graph_cache": [True, False, False], "force_disable_caches": [True, True, True]}
    assert not compiler_imported


def test_config_is_untouched():
    """Building the catalogue does not read options through torch's config, which would store copies."""
    before = config.get_config_copy()
    inductor_options.__wrapped__()
    assert config.get_config_copy() == before


def test_source_notes_cover_the_options():
    """Each option of the installed torch is found in its source, with the variables that set or force it."""
    notes = source_notes()
    assert set(notes) == set(inductor_options())
    assert notes["fx_graph_cache"].env == ("TORCHINDUCTOR_FX_GRAPH_CACHE_DEFAULT",)
    assert notes["fx_graph_cache"].env_force == ("TORCHINDUCTOR_FX_GRAPH_CACHE",)


def test_source_notes_leave_out_what_is_no_option():
    """A name in the source that is not an option, such as a function, has no note."""
    assert [name for name in source_notes() if name not in config._config] == []


def test_source_notes_follow_an_alias():
    """An alias has the variables of its target and its own doc."""
    notes = source_notes()
    variables = ("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "TORCH_COMPILE_FORCE_DISABLE_CACHES")
    assert notes["force_disable_caches"].env_force == variables
    assert notes["force_disable_caches"].doc == "See torch.compiler.config.force_disable_caches"
    assert notes["use_static_triton_launcher"].env == notes["use_static_cuda_launcher"].env
    assert documented(inductor_option("force_disable_caches")).env_force == variables


def test_documented():
    """Docs and variables are added on request, and nothing else changes."""
    option = documented(inductor_option("max_autotune"))
    assert option.doc == "enable slow autotuning passes to select algorithms"
    assert option.env == ("TORCHINDUCTOR_MAX_AUTOTUNE",)
    assert option.type is bool


def test_no_doc_speaks_to_a_tool():
    """Comments for type checkers are not part of a doc."""
    assert [name for name, note in source_notes().items() if "ignore[" in note.doc or "noqa" in note.doc] == []


SOURCE = '''
def helper():
    if "ASKED" in os.environ:
        return True
    return os.environ.get("FROM_HELPER") == "1"

def handed(name):
    return name in os.environ or os.environ["OWN"]

# Far away

# First line
#   - second
# pyrefly: ignore [bad-assignment]
above: int = int(os.getenv("ABOVE", "1"))
beside = False  # ease testing
bare = os.environ.get(
    "BARE"
)  # type: ignore[assignment]
helped = helper()
named = handed("HANDED")
tri = get_tristate_env("TRI", default=True)
boxed: bool = Config(env_name_default=["A", "B"], env_name_force="FORCE", default=True)

if is_fbcode():
    # Only inside
    branch = 1
else:
    branch = os.environ.get("ELSE")

class parent:
    """Docstring."""
    # Shared
    field = os.environ.get("FIELD")
    # Old
    redone = 1

@inherit_fields_from(parent)
class child(parent):
    # New
    redone = 2
'''


@pytest.mark.parametrize(
    ("name", "doc", "env", "force"),
    [
        pytest.param("above", "First line\n  - second", ("ABOVE",), (), id="block-above"),
        pytest.param("beside", "ease testing", (), (), id="beside"),
        pytest.param("bare", "", ("BARE",), (), id="no-doc"),
        pytest.param("helped", "", ("ASKED", "FROM_HELPER"), (), id="helper"),
        pytest.param("named", "", ("HANDED", "OWN"), (), id="helper-is-handed-the-name"),
        pytest.param("tri", "", ("TRI",), (), id="tristate"),
        pytest.param("boxed", "", ("A", "B"), ("FORCE",), id="config"),
        pytest.param("branch", "Only inside", ("ELSE",), (), id="branches"),
        pytest.param("parent.field", "Shared", ("FIELD",), (), id="group"),
        pytest.param("child.field", "Shared", ("FIELD",), (), id="inherited"),
        pytest.param("child.redone", "New", (), (), id="overridden"),
    ],
)
def test_read_notes(name, doc, env, force):
    """Comments and environment variables of a config source are read per option."""
    note = read_notes(SOURCE)[name]
    assert (note.doc, note.env, note.env_force) == (doc, env, force)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        pytest.param("max_autotun", "Unknown Inductor option 'max_autotun'. Did you mean 'max_autotune'?", id="typo"),
        pytest.param(
            "cudagraphs", "Unknown Inductor option 'cudagraphs'. Did you mean 'triton.cudagraphs'?", id="group"
        ),
        pytest.param(
            "qqqq",
            "Unknown Inductor option 'qqqq'. Search them with: backend-kwargs explain inductor PATTERN",
            id="nothing-near",
        ),
        pytest.param(3, "Inductor option name must be str, got 3 (int).", id="no-name"),
        pytest.param(
            "cuda.cutlass-dir",
            f"Inductor option 'cuda.cutlass_dir' is called 'cutlass.cutlass_dir' on torch {HERE}.",
            id="unread-copy",
        ),
        pytest.param(
            "cuda.nvgemm_max_profiling_configs",
            "Inductor option 'cuda.nvgemm_max_profiling_configs' is called 'nvgemm_max_profiling_configs'"
            f" on torch {HERE}.",
            id="renamed",
        ),
    ],
)
def test_message(name, message):
    """A name that has no effect raises an error of one line with the name that has one."""
    assert message_of(name) == message


@pytest.mark.parametrize("name", [pytest.param(name, id=name) for name in UNREAD_COPIES])
def test_unread_copies_are_told(name):
    """Options that `cuda` inherits from `cutlass`, and nothing reads, are redirected there."""
    assert (
        message_of(name) == f"Inductor option {name!r} is called {name.replace('cuda', 'cutlass')!r} on torch {HERE}."
    )


def test_renames_are_told_both_ways():
    """Of each renamed pair the name valid here is found, and the other is redirected to it."""
    for pair in RENAMED.items():
        works = [name for name in pair if name in inductor_options()][-1]
        absent = [name for name in pair if name not in inductor_options()]
        assert inductor_option(works).name == works
        assert [message_of(name) for name in absent] == [
            f"Inductor option {name!r} is called {works!r} on torch {HERE}." for name in absent
        ]


@pytest.mark.parametrize(
    ("name", "known"),
    [
        pytest.param("numerics", "from torch 2.14", id="added"),
        pytest.param("cpp.march", "from torch 2.13", id="added-earlier"),
        pytest.param("force_same_precision", "up to torch 2.12", id="removed"),
        pytest.param(
            "autoheuristic_use.mixed_mm",
            "from torch 2.12" if RELEASE < (2, 12) else "up to torch 2.14",
            id="added-and-removed",
        ),
    ],
)
def test_name_of_another_release(name, known):
    """The error for a name of another torch names the release."""
    if name in inductor_options():
        pytest.skip(f"torch {HERE} has it")
    assert message_of(name) == f"Inductor option {name!r} exists {known}; this is torch {HERE}."


def test_release_tables_hold_on_this_torch():
    """The tables are right for the installed torch."""
    gone = set(chain.from_iterable(names for release, names in REMOVED.items() if release <= RELEASE))
    come = set(chain.from_iterable(names for release, names in ADDED.items() if release <= RELEASE))
    later = set(chain.from_iterable(names for release, names in ADDED.items() if release > RELEASE))
    lost_later = set(chain.from_iterable(names for release, names in REMOVED.items() if release > RELEASE))
    here = set(inductor_options())
    assert come - gone <= here
    assert lost_later - later <= here
    assert not (gone | later) & here


@pytest.mark.skipif(RELEASE < (2, 12), reason="torch 2.11 has no annotation as text")
def test_unresolvable_type_takes_anything():
    """An annotation that only a type checker can resolve accepts any value."""
    option = inductor_option("cudagraph_policy")
    assert isinstance(option.type, str)
    assert check(option, 3) == 3

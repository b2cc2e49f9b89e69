"""Files of templates, decisions and configs from untrusted authors."""

import contextlib
import json
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import backend_kwargs
from backend_kwargs import Backend, BackendKwargsError
from backend_kwargs.auto import race
from backend_kwargs.auto.decisions_toml import write_decisions
from backend_kwargs.auto.reporting import table
from backend_kwargs.auto.store import Catalogue
from backend_kwargs.facts.decision import Decision
from backend_kwargs.options.catalogue import inductor_options
from backend_kwargs.options.option import Option
from backend_kwargs.pipeline import OWN
from tests import forks
from tests.faults.attempts import TIMES

CODE = "which a file may set only if it is trusted: pass trust=True if you trust its author."
KEY = "ab" * 32


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """Put a module on the path that records its import; return its record file."""
    monkeypatch.syspath_prepend(tmp_path)
    module = tmp_path / "planted_module.py"
    module.write_text("import pathlib\npathlib.Path(__file__).with_suffix('.ran').touch()\ndef change(graph): pass\n")
    yield module.with_suffix(".ran")
    sys.modules.pop("planted_module", None)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        pytest.param("cpp.cxx", ["x.sh"], id="program"),
        pytest.param("post_grad_custom_pre_pass", "planted_module:change", id="module"),
        pytest.param("inductor_choices_class", "planted_module:change", id="class"),
        pytest.param("cpp.march", "native -fplugin=evil.so", id="flags"),
        pytest.param("trace.debug_dir", "/tmp/anywhere", id="folder"),
        pytest.param("cuda.cuda_cxx", "x.sh", id="nvcc"),
    ],
)
@pytest.mark.parametrize("head", ["templates.other", "tool.backend_kwargs.templates.other"])
def test_a_file_of_templates_is_data(tmp_path, planted, option, value, head):
    """A TOML file that sets options that are code is refused before anything is imported, unless trusted."""
    (tmp_path / "t.toml").write_text(f'[{head}]\noptions = {{ "{option}" = {json.dumps(value)} }}\n')
    with pytest.raises(BackendKwargsError) as error:
        backend_kwargs.load_templates(tmp_path / "t.toml")
    assert str(error.value) == f"Inductor option {option!r} is code, {CODE}"
    assert not planted.exists()
    assert backend_kwargs.list_templates().count("other") == 0
    assert backend_kwargs.load_templates(tmp_path / "t.toml", trust=True) == ["other"]


def test_an_export_with_code_is_not_loaded(tmp_path):
    """An export with options that are code is loaded as templates only with trust."""
    made = Decision(KEY, "graph", "cudagraphs", {"triton.cudagraphs": True}, fixed={"cpp.cxx": "x.sh"}, facts="3 ops")
    write_decisions([made], tmp_path / "d.toml")
    with pytest.raises(BackendKwargsError) as error:
        backend_kwargs.load_templates(tmp_path / "d.toml")
    assert str(error.value) == f"Inductor option 'cpp.cxx' is code, {CODE}"


def test_what_is_data_needs_no_trust(tmp_path):
    """Numbers, words of a list and names of kernel generators need no trust."""
    text = 'auto = true\ncandidates = ["aten"]\n"triton.cudagraphs" = false\nmax_autotune_gemm_backends = "ATEN"\n'
    (tmp_path / "t.toml").write_text(f"[templates.plain.options]\n{text}")
    assert backend_kwargs.load_templates(tmp_path / "t.toml") == ["plain"]


# ---- code and data


# Listed only to find options that nobody has reviewed.
INDUCTOR_CODE = {
    "calls or imports": """
        _cache_config_factory_keys _fuse_ddp_communication_passes _post_fusion_custom_pass _pre_fusion_custom_pass
        aten_distributed_optimizations.custom_runtime_estimation bucket_all_gathers_fx_bucket_size_determinator
        bucket_all_reduces_fx_bucket_size_determinator bucket_reduce_scatters_fx_bucket_size_determinator
        cudagraph_policy custom_partitioner_fn external_matmul inductor_choices_class joint_custom_post_pass
        joint_custom_pre_pass post_grad_custom_post_pass post_grad_custom_pre_pass pre_grad_custom_pass
        reorder_for_compute_comm_overlap_passes trace.upload_tar
    """,
    "runs a program, loads a library, or is written into a command line or code": """
        aot_inductor.aoti_shim_library aot_inductor.aoti_shim_library_path aot_inductor.compile_wrapper_opt_level
        aot_inductor.cross_target_platform aot_inductor.custom_op_libs aot_inductor.custom_ops_to_c_shims
        aot_inductor.metadata aot_inductor.presets aot_inductor.serialized_in_spec aot_inductor.serialized_out_spec
        autotune_lookup_table cpp.cxx cpp.enable_floating_point_contract_flag cpp.inject_log1p_bug_TESTING_ONLY
        cpp.inject_relu_bug_TESTING_ONLY cpp.march cuda.arch cuda.cuda_cxx cuda.cutlass_dir cuda.version
        cutlass.cutlass_dir halide.cpu_target halide.gpu_target lookup_table.table rocm.arch rocm.ck_dir rocm.rocm_home
        trace.graph_diagram_format trace.orig_fx_graph_diagram_format triton.inject_relu_bug_TESTING_ONLY xpu.arch
        xpu.cutlass_dir xpu.oneapi_root xpu.version
    """,
    "names a file, a folder or an address": """
        aot_inductor.model_name_for_generated_files aot_inductor.output_path
        aot_inductor.package_constants_on_disk_format
        aten_distributed_optimizations.profile_guided_estimations_profile_path autoheuristic_log_path
        enabled_metric_tables fx_passes_numeric_check global_cache_dir profile_bandwidth_output
        torchinductor_worker_logpath trace.debug_dir trace.log_url_for_graph_xform triton.debug_dump_kernel_inputs
        triton.proton_output_dir worker_log_path
    """,
    "decides which cache entries count as equal": """
        _cache_config_ignore_prefix _partitioned_scatter_default _profile_var _save_config_ignore
        unsafe_marked_cacheable_functions
    """,
}


def test_every_option_is_classified():
    """Each option of the installed torch that may contain a string or an object is in exactly one table."""
    from backend_kwargs.options import option as trust

    code = set(" ".join(INDUCTOR_CODE.values()).split())
    assert not code & trust.INDUCTOR_DATA
    unknown = [name for name, option in inductor_options().items() if not trust.chooses(option.type)]
    assert not set(unknown) - code - trust.INDUCTOR_DATA


def test_nothing_that_is_called_is_data():
    """No table can declare an option as data if its type accepts a callable."""
    from backend_kwargs.options import option as trust
    from backend_kwargs.options.option import describe

    assert not [
        name
        for name in trust.INDUCTOR_DATA & {*inductor_options()}
        if "callable" in describe(inductor_options()[name].type)
    ]
    assert [name for name in OWN if not trust.is_data(OWN[name])] == [
        "store",
        "on_progress",
        "lock",
    ]


def test_what_nobody_has_looked_at_is_code():
    """A string option of a later torch, or of a user's own backend, counts as code."""
    from backend_kwargs.options import option as trust

    types = {
        bool: True,
        int | None: True,
        list[int]: True,
        str: False,
        list: False,
        list[str]: False,
        dict[str, int]: False,
    }
    assert {wanted: trust.is_data(Option("new", wanted)) for wanted in types} == types


# ---- output

SAID = "\x1b]0;owned\x07\x1b[2J\nfake   cudagraphs  <- kept\r\u202e[bold]x[/bold]\x9b31m"


def controls(text):
    return [each for each in text if not each.isprintable() and each != "\n"]


def test_a_table_prints_no_control_characters():
    """Control characters of a store's text are escaped in the log."""
    row = race.RaceRow(SAID, status="fail_to_run", reason=SAID)
    found = table(Decision(KEY, "graph", SAID, rows=(row,), facts=SAID))
    assert not controls(found)
    assert len(found.splitlines()) == 2
    assert "[bold]" in found


def test_the_command_prints_no_control_characters(store):
    """`list`, `show` and errors escape control characters of a store's text."""
    made = Decision(KEY, "graph", SAID, facts=SAID, machine={SAID: SAID})
    Catalogue(store).add(made)
    for arguments in (["list"], ["show", "abab"]):
        done = forks.run("-m", "backend_kwargs", "decisions", *arguments)
        assert done.returncode == 0
        assert not controls(done.stdout + done.stderr)
        assert "[bold]" in done.stdout
        assert not [line for line in done.stdout.splitlines() if line.startswith("fake")]


# ---- configs of any kind

names = st.sampled_from(
    [*sorted(inductor_options()), *OWN, "template", "mode", "options", "inductor_config", "backend"]
)
plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
values = st.recursive(
    plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3)
)
specs = st.sampled_from(
    ["tmpl-inductor", "inductor:freezing", "eager", "tvm", "os:system", "planted_module:change", "x:y"]
)
configs = st.dictionaries(names | st.text(max_size=9), values, max_size=4) | st.fixed_dictionaries(
    {"backend": specs},
    optional={"version": plain, "options": st.dictionaries(names, values, max_size=3)},
)


@settings(max_examples=300 * TIMES, deadline=None, suppress_health_check=list(HealthCheck))
@given(config=configs)
def test_any_config_is_a_backend_or_an_error(planted, config):
    """`from_config` returns a backend that is read back equal, or raises our error; it imports nothing."""
    try:
        made = Backend.from_config(config)
        written = made.to_config()
    except BackendKwargsError:
        pass
    else:
        assert Backend.from_config(json.dumps(written), trust=True) == made
    assert not planted.exists()
    assert "planted_module" not in sys.modules


@settings(max_examples=300 * TIMES, deadline=None)
@given(text=st.text(max_size=200) | st.binary(max_size=200).map(lambda data: data.decode("latin-1")))
def test_any_text_is_a_backend_or_an_error(text):
    """The same holds for a string that is neither JSON nor base64."""
    with contextlib.suppress(BackendKwargsError):
        Backend.from_config(text)

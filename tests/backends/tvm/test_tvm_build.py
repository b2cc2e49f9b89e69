"""Targets, pipelines and loops, with the real TVM."""

import re

import pytest

tvm = pytest.importorskip("tvm")

import torch  # noqa: E402 - TVM's tests are skipped whole where it is missing
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch.testing import assert_close  # noqa: E402
from tvm import relax  # noqa: E402
from tvm.target import Target  # noqa: E402

from backend_kwargs import BackendKwargsWarning  # noqa: E402
from backend_kwargs.backends.tvm import build as build_module  # noqa: E402
from backend_kwargs.backends.tvm import cpu_schedule as schedule_loops  # noqa: E402
from backend_kwargs.backends.tvm.build import _dlight, build, legalized  # noqa: E402
from backend_kwargs.backends.tvm.cpu_schedule import schedule_cpu  # noqa: E402
from backend_kwargs.backends.tvm.lowering.graph import lower  # noqa: E402
from backend_kwargs.backends.tvm.settings import TVMOptions  # noqa: E402
from backend_kwargs.backends.tvm.target import host, target_of  # noqa: E402
from backend_kwargs.errors import BackendKwargsError  # noqa: E402
from tests.backends.tvm.lowered import traced  # noqa: E402

CPU = torch.device("cpu")
ONE = {"kind": "llvm", "num-cores": 1}
FOUR = {"kind": "llvm", "num-cores": 4}
AVX512 = "skylake-avx512"  # with vectors of 16


def module(body, *types):
    """Return a module whose main takes tensors of these (shape, dtype) and returns the result of `body`."""
    bb = relax.BlockBuilder()
    params = [relax.Var(f"x{i}", relax.TensorType(shape, dtype)) for i, (shape, dtype) in enumerate(types)]
    with bb.function("main", params):
        with bb.dataflow():
            result = bb.emit_output(relax.Tuple([bb.emit(body(*params))]))
        bb.emit_func_output(result)
    return bb.get()


def run(mod, *inputs, **settings):
    built = build(mod, TVMOptions(**settings), CPU)
    return torch.from_dlpack(relax.VirtualMachine(built.executable, tvm.cpu())["main"](*inputs)[0])


def loops(mod, target=ONE, scheduled=schedule_cpu):
    with Target(target):
        mod = tvm.transform.Sequential([relax.transform.LegalizeOps(), relax.transform.AnnotateTIROpPattern()])(mod)
        mod = tvm.transform.Sequential([relax.transform.FuseOps(), relax.transform.FuseTIR()])(mod)
    functions = [f for _, f in mod.functions_items() if isinstance(f, tvm.tirx.PrimFunc)]
    return "".join(scheduled(f, Target(target)).mod.script() for f in functions)


def f32(*shape):
    return shape, "float32"


# ---- targets


def test_the_default_target_is_this_machine_with_torchs_threads():
    target = target_of(None, CPU)
    assert (target.kind.name, target.attrs["mcpu"]) == ("llvm", tvm.target.codegen.llvm_get_system_cpu())
    assert int(target.attrs["num-cores"]) == torch.get_num_threads()


def test_a_bare_kind_is_this_machine_too():
    assert str(target_of("llvm", CPU)) == str(target_of(None, CPU))


def test_a_dict_is_taken_as_it_is():
    assert "mcpu" not in target_of(FOUR, CPU).attrs


def test_features_a_hypervisor_masks_are_left_out(monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"sse4_2": True, "ssse3": False}, raising=False)
    assert host().get("mattr") == (["-ssse3"] if "x86_64" in host()["mtriple"] else None)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        pytest.param(
            "llvm -mcpu=native",
            "Option 'target' must be a kind such as \"llvm\" or a dict such as "
            '{"kind": "llvm", "mcpu": "znver4", "num-cores": 4}, got \'llvm -mcpu=native\': Cannot parse target string '
            '"llvm -mcpu=native". CLI target string form (e.g. "llvm -mcpu=xxx") is no longer supported. Please use '
            'JSON dict form (e.g. {"kind": "llvm", "mcpu": "xxx"}) instead.',
            id="a command line",
        ),
        pytest.param(
            {"kind": "llvm", "num_cores": 2},
            "Option 'target' must be a kind such as \"llvm\" or a dict such as "
            '{"kind": "llvm", "mcpu": "znver4", "num-cores": 4}, got '
            "{'kind': 'llvm', 'num_cores': 2}: Unknown config option 'num_cores'.",
            id="no attribute",
        ),
        pytest.param(
            {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "nonsense"},
            "Option 'target' names mcpu 'nonsense', which LLVM does not know: leave 'mcpu' out.",
            id="no CPU",
        ),
        pytest.param(
            "cuda",
            "TVM compiles for 'cpu' by a target of kind 'llvm', got 'cuda': leave 'target' out, or name that kind.",
            id="another device",
        ),
    ],
)
def test_a_wrong_target_is_one_clear_line(target, message):
    with pytest.raises(BackendKwargsError) as e:
        target_of(target, CPU)
    assert str(e.value) == message


# ---- pipelines


@pytest.mark.parametrize("exec_mode", ["bytecode", "compiled"])
@pytest.mark.parametrize(
    "pipeline", [None, "zero", "default", relax.get_pipeline("zero")], ids=["ours", "zero", "default", "pass"]
)
def test_every_pipeline_builds_in_every_mode(pipeline, exec_mode):
    """Every pipeline builds, including "zero", which TVM alone cannot build."""
    x = torch.randn(4, 33)
    mod = module(lambda x: relax.op.nn.softmax(relax.op.add(x, x)), f32(4, 33))
    assert_close(run(mod, x, pipeline=pipeline, exec_mode=exec_mode), (x + x).softmax(-1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"pipeline": "defalt"}, "Option 'pipeline': Unknown pre-built pipeline defalt.", id="passes"),
        pytest.param({"tir_pipeline": "qq"}, "Option 'tir_pipeline': Unknown pre-built pipeline qq.", id="kernels"),
        pytest.param(
            {"pass_config": {"tirx.noalia": 1}},
            "Option 'pass_config': Invalid config option 'tirx.noalia'.",
            id="a pass's option",
        ),
    ],
)
def test_what_tvm_does_not_know_is_one_clear_line(compiled, options, message):
    """TVM's own check ends the compile of the first graph, without a list of all names."""
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as e:
        compiled(torch.exp, **options)(torch.ones(4))
    assert (type(e.value.inner_exception), str(e.value.inner_exception)) == (BackendKwargsError, message)


def test_pass_config_reaches_tvm_and_does_not_leak():
    mod = module(relax.op.exp, f32(64))
    seen = []

    @tvm.transform.module_pass(opt_level=0)
    def spy(mod, context):
        seen.append(dict(context.config))
        return mod

    build(mod, TVMOptions(pipeline=spy, pass_config={"tirx.disable_vectorize": True}), CPU)
    assert seen == [{"tirx.disable_vectorize": True}]
    assert dict(tvm.transform.PassContext.current().config) == {}


def test_cuda_graphs_are_for_cuda():
    """On a CPU the option for CUDA graphs has no effect."""
    seen = run(module(relax.op.exp, f32(64)), torch.ones(64), cuda_graph=True)
    torch.testing.assert_close(seen, torch.ones(64).exp())


# ---- our loops: right


SIZES = [1, 7, 33, 128, 1023]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("op", "wanted"),
    [
        pytest.param(relax.op.nn.softmax, lambda x: x.softmax(-1), id="softmax"),
        pytest.param(lambda x: relax.op.sum(relax.op.multiply(x, x), [-1]), lambda x: (x * x).sum(-1), id="rows"),
        pytest.param(lambda x: relax.op.sum(x, [0]), lambda x: x.sum(0), id="columns"),
        pytest.param(lambda x: relax.op.max(x, [-1]), lambda x: x.amax(-1), id="max"),
        pytest.param(lambda x: relax.op.permute_dims(x, [1, 0]), lambda x: x.T.contiguous(), id="transpose"),
    ],
)
def test_right_on_sizes_that_do_not_divide(op, wanted, size):
    x = torch.randn(5, size)
    assert_close(run(module(op, f32(5, size)), x), wanted(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("at", [0, 17, 63])
@pytest.mark.parametrize("reduce", [torch.amax, torch.amin], ids=["amax", "amin"])
def test_a_nan_in_any_lane_is_the_result(reduce, at):
    x = torch.randn(5, 64)
    x[2, at] = torch.nan
    executable = build(lower(traced(lambda x: (reduce(x, -1),), x)).mod, TVMOptions(), CPU).executable
    assert_close(
        torch.from_dlpack(relax.VirtualMachine(executable, tvm.cpu())["main"](x)[0]), reduce(x, -1), equal_nan=True
    )


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 7, 33), (33, 64, 48), (8, 1023, 5)], ids=str)
def test_a_product_is_right(shape):
    m, k, n = shape
    x, y, bias = torch.randn(m, k), torch.randn(k, n), torch.randn(n)
    mod = module(lambda x, y, b: relax.op.nn.relu(relax.op.add(relax.op.matmul(x, y), b)), f32(m, k), f32(k, n), f32(n))
    assert_close(run(mod, x, y, bias), (x @ y + bias).relu(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("stride", [1, 2])
def test_a_convolution_is_right(stride):
    x, w = torch.randn(2, 3, 17, 16), torch.randn(8, 3, 3, 3)
    mod = module(
        lambda x, w: relax.op.nn.relu(relax.op.nn.conv2d(x, w, strides=stride, padding=1)), f32(*x.shape), f32(*w.shape)
    )
    assert_close(run(mod, x, w), torch.conv2d(x, w, stride=stride, padding=1).relu(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int64, torch.bool], ids=str
)
def test_right_in_other_dtypes(dtype):
    where, x, y = torch.rand(6, 64) < 0.5, *torch.randint(0, 2, (2, 6, 64)).to(dtype)
    name = str(dtype).removeprefix("torch.")
    shape = (6, 64)
    mod = module(relax.op.where, (shape, "bool"), (shape, name), (shape, name))
    assert_close(run(mod, where, x, y), torch.where(where, x, y))


def test_one_compile_serves_every_size():
    n = tvm.tirx.Var("n", "int64")
    mod = module(lambda x: relax.op.nn.softmax(relax.op.add(x, x)), ((n, 32), "float32"))
    main = relax.VirtualMachine(build(mod, TVMOptions(), CPU).executable, tvm.cpu())["main"]
    for size in SIZES:
        x = torch.randn(size, 32)
        assert_close(torch.from_dlpack(main(x)[0]), (x + x).softmax(-1))


ONE_INPUT = (
    torch.sin, torch.tanh, torch.relu, torch.sigmoid, lambda x: x.clamp(-0.5, 0.5), lambda x: x.softmax(-1),
    lambda x: x.mean(-1, keepdim=True), lambda x: x.amax(-1, keepdim=True), lambda x: x.sum(0, keepdim=True),
    lambda x: (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + 1).sqrt(),
    lambda x: x.transpose(-1, -2).sin().transpose(-1, -2), lambda x: x.transpose(0, 1).cos().transpose(0, 1),
)  # fmt: skip
TWO_INPUTS = (torch.add, torch.mul, torch.maximum, lambda x, y: x @ y.transpose(-1, -2) @ x / 50)
GRAPHS = st.lists(
    st.tuples(st.sampled_from(ONE_INPUT) | st.sampled_from(TWO_INPUTS), st.integers(0, 3), st.integers(0, 3)),
    min_size=2,
    max_size=7,
)


@settings(max_examples=12, deadline=None, derandomize=True, database=None)
@given(steps=GRAPHS, shape=st.sampled_from([(4, 9), (3, 16), (2, 5, 32), (33, 7)]), outputs=st.integers(1, 3))
def test_fused_graphs_of_several_outputs_are_right(steps, shape, outputs):
    """Every output equals eager's, however parts are fused, inlined, moved to rows or vectorized."""

    def graph(x):
        values = [x]
        for step, *places in steps:
            taken = [values[-1 - place % len(values)] for place in places]
            values.append(step(*(taken if step in TWO_INPUTS else taken[:1])).expand(shape))
        return tuple(value + 1 for value in values[1:][-outputs:])

    x = torch.randn(shape)
    executable = build(lower(traced(graph, x)).mod, TVMOptions(), CPU).executable
    results = relax.VirtualMachine(executable, tvm.cpu())["main"](x)
    assert_close([torch.from_dlpack(each) for each in results], list(graph(x)), rtol=1e-4, atol=1e-4)


def test_a_loop_of_several_blocks_is_not_in_vectors(monkeypatch):
    """A value that is computed per row and not inlined keeps every element."""

    def refused(sch, block):
        raise ValueError

    monkeypatch.setattr(schedule_loops, "_inline", refused)

    def graph(x):
        return (x + 1) * 2 - x.abs().mean(-1, keepdim=True)

    x = torch.randn(4, 9)
    executable = build(lower(traced(graph, x)).mod, TVMOptions(), CPU).executable
    assert_close(torch.from_dlpack(relax.VirtualMachine(executable, tvm.cpu())["main"](x)[0]), graph(x))


def test_a_chain_of_choices_stays_small():
    """A chain of six choices is not written out at each use, which would take 300 MB."""
    assert len(scheduled(chain_of_choices, torch.randn(4, 9))) < 100_000


def scheduled(graph, x):
    """Return the text of a graph's functions with our schedules for one thread."""
    with Target(ONE) as target:
        mod = legalized(lower(traced(graph, x)).mod, target)
    functions = [f for _, f in mod.functions_items() if isinstance(f, tvm.tirx.PrimFunc)]
    return "".join(schedule_cpu(f, target).mod.script() for f in functions)


def chain_of_choices(x):
    for _ in range(6):
        x = torch.where(x > 0.5, x * x, x - x * x)
    return x


def test_a_short_symbolic_row_is_summed_right():
    """A symbolic row with fewer elements than lanes is summed correctly."""
    n = tvm.tirx.Var("n", "int64")
    mod = module(lambda x: relax.op.sum(x, [-1]), ((3, n), "float32"))
    assert "_rf" not in loops(mod)  # a lane without elements would contain arbitrary memory
    main = relax.VirtualMachine(build(mod, TVMOptions(), CPU).executable, tvm.cpu())["main"]
    for size in (1, 5, 40):
        x = torch.randn(3, size)
        assert_close(torch.from_dlpack(main(x)[0]), x.sum(-1))


# ---- our loops: what they are


@pytest.mark.parametrize(
    ("mod", "kinds"),
    [
        pytest.param(module(relax.op.exp, f32(64, 64)), ["T.vectorized"], id="pointwise"),
        pytest.param(module(lambda x: relax.op.sum(x, [-1]), f32(64, 64)), ["T.vectorized"], id="rows"),
        pytest.param(
            module(relax.op.matmul, f32(64, 64), f32(64, 64)),
            ["T.vectorized"],
            id="product",
        ),
        pytest.param(
            module(relax.op.nn.conv2d, f32(1, 8, 18, 18), f32(8, 8, 3, 3)),
            ["T.vectorized"],
            id="convolution",
        ),
    ],
)
def test_loops_are_in_vectors(mod, kinds):
    assert [kind for kind in kinds if kind not in loops(mod)] == []


@pytest.mark.parametrize("size", [64, 1001])
@pytest.mark.parametrize(
    ("reduced", "reductions"),
    [
        pytest.param(lambda x: x.sum(-1), 1, id="sum"),
        pytest.param(lambda x: x.amax(-1), 1, id="amax"),
        pytest.param(lambda x: x.amin(-1), 1, id="amin"),
        pytest.param(lambda x: x.var(-1), 2, id="var"),
        pytest.param(lambda x: x.softmax(-1), 2, id="softmax"),
        pytest.param(lambda x: x.log_softmax(-1), 2, id="log_softmax"),
    ],
)
def test_every_reduction_of_rows_is_in_lanes(reduced, reductions, size):
    """Every reduction of rows is split into lanes, also one that reads another one's result."""
    assert of_lanes(reduced, size) == reductions


def test_a_row_without_a_divisor_is_not_split():
    """A row whose size has no divisor is not split, since one lane is the same sum."""
    assert of_lanes(lambda x: x.sum(-1), 1009) == 0


def of_lanes(reduced, size):
    """Return the number of reductions of rows of a size that are split into lanes."""
    return len(re.findall(r'sblock\("\w+_rf_update"\)', scheduled(lambda x: (reduced(x),), torch.randn(8, size))))


@pytest.mark.parametrize(("size", "vectors"), [(1024, True), (1020, False), (1023, False)])
def test_a_width_that_no_vector_has_is_left_to_llvm(size, vectors):
    assert ("T.vectorized" in loops(module(relax.op.exp, f32(1, size)))) == vectors


@pytest.mark.parametrize(
    ("shape", "extents"),
    [
        pytest.param((1, 8, 28, 28), [8, 49, 16], id="28 by 28 fill vectors, 28 do not"),
        pytest.param((1, 8, 7, 7), [392], id="no axes fill vectors"),
        pytest.param((1, 16, 7, 7), [1, 49, 16], id="only all channels fill vectors"),
        pytest.param((1, 8, 32, 32), [512, 16], id="a row fills vectors"),
    ],
)
def test_a_loop_over_images_ends_where_they_fill_vectors(shape, extents):
    """The fused axes are the fewest that fill vectors of 16, or all."""
    mod = module(relax.op.exp, f32(*shape))
    found = loops(mod, {**ONE, "mcpu": AVX512})
    assert [int(size) for size in re.findall(r"T.int64\((\d+)\)", "".join(re.findall(r"for .*", found)))] == extents


@pytest.mark.parametrize("size", [56, 28, 32])
def test_a_vector_is_loaded_at_once(size):
    """A vector of a fused image is loaded whole, also where a stored value is read several times, as by SiLU."""

    def graph(x, mean, scale, weight, bias):
        return (torch.nn.functional.silu((x - mean) * scale * weight + bias),)

    lowered = lower(traced(graph, torch.randn(1, 16, size, size), *torch.rand(4, 16, 1, 1)))
    code = (
        build(lowered.mod, TVMOptions(target={**ONE, "mcpu": AVX512}), CPU)
        .executable.mod.imports[0]
        .inspect_source("ll")
    )
    assert "<16 x float>" in code
    assert not re.findall(r"insertelement <16 x float> %", code)  # one element loaded after the other


def test_channels_of_one_image_are_parallel():
    """The first axis of an image, of one element, is one loop with the channels."""
    assert "in T.parallel(T.int64(64))" in loops(module(relax.op.exp, f32(1, 64, 28, 28)), {**FOUR, "mcpu": AVX512})


def test_large_loops_are_parallel_only_with_several_cores():
    mod = module(relax.op.exp, f32(512, 512))
    assert "T.parallel" not in loops(mod, ONE)
    assert "T.parallel" in loops(mod, FOUR)


def test_small_loops_are_not_worth_threads():
    assert "T.parallel" not in loops(module(relax.op.exp, f32(8, 8)), FOUR)


def test_a_chain_is_one_loop():
    mod = module(lambda x: relax.op.add(relax.op.exp(relax.op.multiply(x, x)), x), f32(64, 64))
    assert loops(mod).count("T.writes(") == 1


def test_a_rule_that_fails_leaves_plain_loops(monkeypatch):
    def broken(func, target):
        raise RuntimeError("no")

    monkeypatch.setattr(build_module, "schedule_cpu", broken)
    x = torch.randn(3, 7)
    with pytest.warns(BackendKwargsWarning) as warned:
        assert_close(run(module(relax.op.exp, f32(3, 7)), x), x.exp())
    assert [str(each.message) for each in warned] == [
        "TVM runs a function in plain loops, since its schedule failed: RuntimeError: no."
    ]


def test_dlights_rules_on_the_cpu_are_right():
    x = torch.randn(5, 64)
    assert_close(run(module(relax.op.nn.softmax, f32(5, 64)), x, scheduler="dlight"), x.softmax(-1))


def test_dlights_rules_for_a_gpu_bind_threads():
    """DLight's rules bind threads; no GPU is needed to check the loops."""
    mod = module(lambda x: relax.op.nn.softmax(relax.op.exp(x)), f32(5, 64))
    assert "threadIdx.x" in loops(mod, {"kind": "cuda", "arch": "sm_80"}, _dlight)

"""Whatever call is drawn, a rewrite either does not match or gives eager's numbers."""

import math

import pytest
import torch
from hypothesis import strategies as st

from tests.rewrites.calls import COMPILED, DTYPES, check, tensor_of


def rows_of(program):
    """Draw the sizes of a batch."""
    return program.often([2], [], [1], [0], [2, 3], [2, 1, 3], [2, 0])


def broadcast(program, sizes):
    """Draw a shape that broadcasts to `sizes`."""
    if program.often(True, False):
        return sizes[-1:]
    kept = sizes[len(sizes) - program.draw(st.integers(0, len(sizes))) :]
    return [program.often(size, 1) for size in kept]


def linear(program, x, sizes, *, bias, parameter=False, dtype=None):
    """Draw a call of F.linear on `x`, whose sizes are given, and return its source and sizes."""
    columns = program.often(4, 1, 5, 0)
    weight = [columns] * program.often(1, 0) + sizes[-1:]
    made = sizes[:-1] + weight[:-1]
    given = {"input": x, "weight": program.tensor(*weight, dtype=dtype, parameter=parameter)}
    if bias:
        given["bias"] = program.tensor(*broadcast(program, made), dtype=dtype, parameter=parameter)
    elif program.pick(True, False):
        given["bias"] = None
    return program.call("F.linear", **given), made


def packed(program):
    dtype = program.often(*DTYPES)
    sizes = [*rows_of(program), program.often(3, 1, 0)]
    x = program.tensor(*sizes, dtype=dtype)
    layers = [
        linear(program, x, sizes, bias=program.pick(True, False), parameter=program.often(True, False), dtype=dtype)
        for _ in range(program.pick(2, 3))
    ]
    return program.returns(*(made for made, _ in layers))


def loss_of(program, logits, rows, classes, dtype):
    """Draw a call of F.cross_entropy on logits [*rows, classes], of up to two dimensions."""
    program.assume_indices(classes)
    if program.often(False, True):
        target = program.tensor(*rows, classes, dtype=dtype)
    else:
        target = program.tensor(value=torch.arange(math.prod(rows)).reshape(rows) % max(classes, 1))
    given = {"input": logits, "target": target}
    if program.often(False, True):
        given["weight"] = program.tensor(classes, dtype=dtype)
    if program.often(True, False):
        given["ignore_index"] = program.often(-100, 0, 1)
    if program.often(False, True):
        given["reduction"] = repr(program.pick("mean", "sum", "none"))
    if program.often(False, True):
        given["label_smoothing"] = program.pick(0.0, 0.1)
    return program.call("F.cross_entropy", **given)


def cross_entropy(program):
    dtype = program.often(torch.float32, torch.bfloat16, torch.float16)
    rows = program.often([3], [], [1], [0])
    classes = program.often(4, 1, 0)
    logits = program.tensor(*rows, classes, dtype=dtype)
    if program.often(False, True):
        logits = f"{logits}{program.pick('.float()', '.to(torch.float32)', '.view(torch.float16)')}"
    return program.returns(loss_of(program, logits, rows, classes, dtype))


def linear_cross_entropy(program):
    dtype = program.often(torch.float32, torch.bfloat16)
    sizes = [*program.often([3], [], [2, 3], [0], [1]), program.often(4, 1, 0)]
    logits, made = linear(
        program, program.tensor(*sizes, dtype=dtype), sizes, dtype=dtype, bias=program.often(False, True)
    )
    *rows, classes = made or [1]
    if len(rows) > 1 or program.often(False, True):
        rows, logits = [math.prod(rows)], f"{logits}.{program.pick('view', 'reshape')}(-1, {classes})"
    if program.often(False, True):
        logits = f"{logits}{program.pick('.float()', '.to(torch.float32)', '.view(torch.float16)')}"
    return program.returns(loss_of(program, logits, rows, classes, dtype))


RELU = ("F.relu({})", "torch.relu({})", "{}.relu()", "F.relu(input={})", "{}.clamp(min=0)")
GELU = ("F.gelu({}, approximate='tanh')", "0.5 * {0} * (1.0 + torch.tanh(0.7978845608 * ({0} + 0.044715 * {0} ** 3)))")
EXACT = ("F.gelu({})", "F.gelu(input={}, approximate='none')")
ONEDNN = (
    "F.gelu({})",
    "F.silu({})",
    "{}.sigmoid()",
    "torch.tanh({})",
    "F.hardswish({})",
    "F.hardsigmoid({})",
    "F.relu6({})",
    "F.hardtanh({}, 0.0, 6.0)",
    "F.hardtanh({}, max_val=2.0)",
)


def product(program):
    """Draw a product, mostly with a bias, as F.linear or as what it consists of."""
    dtype = program.often(*DTYPES)
    sizes = [*rows_of(program), program.often(3, 1, 0)]
    if program.often(True, False):
        x = program.tensor(*sizes, dtype=dtype)
        made, _ = linear(program, x, sizes, bias=program.often(True, False), dtype=dtype)
        made = program.let(made)
    else:
        rows, columns, between = program.often(2, 1, 0), program.often(4, 1, 0), program.often(3, 1, 0)
        sizes = [rows, columns]
        one, other = program.tensor(rows, between, dtype=dtype), program.tensor(between, columns, dtype=dtype)
        bias = program.tensor(*broadcast(program, sizes), dtype=program.often(dtype, torch.float32))
        given = {name: program.pick(1, 2, 0) for name in ("beta", "alpha") if program.often(False, True)}
        written = f"torch.{program.pick('mm', 'matmul')}({one}, {other}) + {bias}"
        named = "".join(f", {name}={value!r}" for name, value in given.items())
        made = program.let(program.pick(written, f"torch.addmm({bias}, {one}, {other}{named})"))
    if program.often(False, True):
        made = program.let(f"{made}.{program.pick('flatten()', 'reshape(-1, 1)', 'unsqueeze(0)', 'mT')}")
    if program.often(False, True):
        made = program.let(f"{made}.to({program.pick(*DTYPES)})")
    return made


def activated(source, activations):
    def program_of(program):
        made = source(program)
        more = (made,) if program.often(False, True) else ()
        return program.returns(program.pick(*activations).format(made), *more)

    return program_of


def picture(program, *sizes, dtype):
    """Draw an image, in channels-last layout too."""
    if program.often(True, False) and len(sizes) == 4:
        return program.tensor(value=tensor_of(sizes, dtype, seed=1).to(memory_format=torch.channels_last))
    return program.tensor(*sizes, dtype=dtype)


def convolution(
    program,
    *,
    groups=(1, 2),
    dtypes=DTYPES,
    kernels=(3, 1, 2),
    strides=(1, 2, 3),
    widths=(2, 1),
    transposed=(False, True),
):
    """Draw a convolution; return its source and the number of its channels."""
    dims = program.often(2, 1, 3)
    dtype, group = program.often(*dtypes), program.often(*groups)
    channels, out = group * program.pick(*widths), group * program.often(*widths)
    kernel, size = program.pick(*kernels), program.often(6, 5)
    batch = [] if program.often(False, True) else [program.often(2, 1, 0)]
    x = picture(program, *batch, channels, *[size] * dims, dtype=dtype)
    target, weight = f"F.conv{dims}d", (out, channels // group, *[kernel] * dims)
    if program.often(*transposed):
        target, weight = f"F.conv_transpose{dims}d", (channels, out // group, *[kernel] * dims)
    given = {"input": x, "weight": picture(program, *weight, dtype=dtype)}
    if program.pick(True, False):
        given["bias"] = program.tensor(out, dtype=dtype)
    forms = lambda value: program.pick(value, [value] * dims, (value,))  # noqa: E731
    if program.often(True, False):
        given["stride"] = forms(kernel if program.pick(True, False) and kernel in strides else program.pick(*strides))
    if program.pick(False, True):
        given["padding"] = program.often(forms(program.pick(0, 1)), "'same'", "'valid'")
    if program.often(False, True):
        given["dilation"] = forms(program.pick(1, 2))
    if group > 1 or program.often(False, True):
        given["groups"] = group
    names = [*given]  # positional only as far as the function's order goes
    gap = next((at for at, name in enumerate(("input", "weight", "bias", "stride", "padding")) if name not in names), 9)
    return program.let(program.call(target, positional=min(gap, 5), **given)), out, dims


STEPS = ("{0} * {1}", "{0} + {1}", "{0} - {1}", "{1} * {0}")
OTHER_STEPS = ("{1} - {0}", "torch.add({0}, {1}, alpha=2)")
SUMS = ("{0} + {1}", "{1} + {0}", "torch.add({0}, {1})")
OTHER_SUMS = ("torch.add({1}, {0}, alpha=2)", "{0} - {1}")


def normed(program, **options):
    """Draw a convolution with numbers of each channel added or multiplied, and a residual."""
    made, out, dims = convolution(program, **options)
    dtype, ones = program.value(made).dtype, [1] * dims
    for _ in range(program.often(1, 0, 2)):
        sizes = program.often([out, *ones], [1, out, *ones], [1, 1, *ones], [1], [], [2 * out, *ones], ones)
        operand = program.often(program.tensor(*sizes, dtype=program.often(dtype, torch.float32)), 2, 0.5)
        made = program.let(program.pick(*program.often(STEPS, OTHER_STEPS)).format(made, operand))
    if program.often(False, True):
        made = program.let(f"{made}.to({program.pick(*DTYPES)})")
    if program.pick(False, True):
        like = program.value(made)
        shape = program.often(like.shape, like.shape[1:], (1, *like.shape[1:]), (*like.shape[:-1], 1))
        residual = program.tensor(*shape, dtype=program.often(like.dtype, torch.float32))
        residual = program.often(
            residual, made, f"F.conv{dims}d({residual}, torch.ones({shape[1]}, {shape[1]}, *{ones}))"
        )
        made = program.let(program.pick(*program.often(SUMS, OTHER_SUMS)).format(made, residual))
    return made


def grouped(program):
    return normed(program, groups=(2, 4), dtypes=(torch.bfloat16, torch.float16))


def stem_convolution(program):
    made = normed(program, groups=(1, 2), dtypes=(torch.bfloat16, torch.float16), widths=(3, 2, 5))
    made = program.let(program.pick("{0}", "F.relu6({0})", *RELU, *ONEDNN).format(made))
    return program.returns(program.often(made, f"{made}.sum((-2, -1))"))


def patches(program):
    made, *_ = convolution(program, dtypes=(torch.bfloat16, torch.float16), kernels=(2, 3), strides=(2, 3))
    return program.returns(made)


def convolution_as_product(program):
    made, *_ = convolution(program, groups=(2, 3), dtypes=(torch.bfloat16, torch.float16), widths=(8, 16, 4))
    return program.returns(made)


def depthwise_convolution(program):
    made, *_ = convolution(program, groups=(2, 3, 1), widths=(1, 2))
    made = program.let(f"{made}[..., :{program.pick(5, 6, -1)}]") if program.pick(False, True) else made
    return program.returns(f"F.silu({made})" if program.pick(True, False) else made)


def transposed_convolution(program):
    made, *_ = convolution(program, kernels=(2, 3), strides=(2, 3), transposed=(True, False))
    return program.returns(made)


INTERPOLATED = (
    "F.interpolate({}, scale_factor=2)",
    "F.interpolate({}, size=(4, 6), mode='bilinear')",
    "F.interpolate({}, (4, 6), None, 'bicubic', True)",
    "F.interpolate({}, scale_factor=(1.5, 1.0), mode='area')",
    "F.interpolate({}, size=2, mode='nearest-exact')",
    "{}",
)


def interpolation(program):
    dtype = program.often(*DTYPES)
    sizes = program.often([2, 4, 6], [1, 4, 6], [2, 2, 3], [0, 4, 6])
    images, channels = [], []
    for _ in range(program.pick(1, 2, 3)):
        channels.append(program.often(4, 1, 7))
        form = program.pick(*INTERPOLATED)
        small = [sizes[0], 2, 3] if form != "{}" else sizes
        images.append(program.let(form.format(picture(program, small[0], channels[-1], *small[1:], dtype=dtype))))
    x = images[0]
    if len(images) > 1 or program.often(False, True):
        x = program.let(f"torch.{program.pick('cat', 'concat')}([{', '.join(images)}], {program.often(1, -3, 0)})")
    kernel = program.often([1, 1], [1, 2])
    given = {"input": x, "weight": program.tensor(program.often(2, 9), sum(channels), *kernel, dtype=dtype)}
    if program.pick(True, False):
        given["bias"] = program.tensor(program.value(given["weight"]).shape[0], dtype=dtype)
    if program.often(False, True):
        given["stride"] = program.pick(1, (1, 2))
    if program.often(False, True):
        given["padding"] = program.pick(0, "'same'", (0, 1))
    return program.returns(program.call("F.conv2d", positional=2, **given))


SCALED = ("{0} * {1}", "{1} * {0}", "{0} / {1}", "{0} + {1}", "{1} - {0}", "torch.addcmul({0}, {1}, x)",
          "{0} + {1} * x", "{0}.mul({1})")  # fmt: skip


def scaled_product(program):
    dtype = program.often(torch.bfloat16, torch.float32)
    pictured = program.pick(False, True)
    x = picture(program, 2, 3, 4, 5, dtype=dtype) if pictured else program.tensor(2, 4, 5, 3, dtype=dtype)
    program.lines.append(f"x = {x}.relu()")
    made = "x"
    for _ in range(program.pick(1, 2, 3)):
        sizes = [program.often(2, 1), 1, 1, 1]
        sizes[1 if pictured else 3] = program.often(3, 1)
        operand = program.often(program.tensor(*sizes, dtype=program.often(dtype, torch.float32)), 2, 0.5)
        made = program.let(program.pick(*SCALED).format(made, operand))
    weight = program.tensor(program.often(2, 9), 3, *[1] * 2 * pictured, dtype=dtype)
    given = {"input": f"{made}.to({weight}.dtype)" if program.often(False, True) else made, "weight": weight}
    if program.pick(True, False):
        given["bias"] = program.tensor(program.value(weight).shape[0], dtype=dtype)
    return program.returns(program.call(f"F.{'conv2d' if pictured else 'linear'}", positional=2, **given), "x.sum()")


def matrix_vector(program):
    dtype = program.often(*DTYPES)
    between, rows, columns = program.often(3, 1, 2), program.often(1, 4, 0), program.often(1, 5)
    batch = program.often([2], [], [2, 3], [1], [0])
    one, other = (
        program.tensor(*program.often(batch, [1, *batch], batch[1:]), *sizes, dtype=dtype)
        for sizes in ((program.pick(rows, 4), between), (between, columns))
    )
    if program.often(False, True):
        other = program.tensor(between, dtype=dtype)
    form = program.pick("torch.matmul({}, {})", "{} @ {}", "{}.matmul({})", "torch.bmm({}, {})", "{}.bmm(mat2={})",
                        "torch.matmul(other={1}, input={0})", "torch.bmm({}, mat2={})")  # fmt: skip
    made = program.let(form.format(one, other))
    return program.returns(f"{made}.view(-1)" if program.pick(False, True) else made)


def aligned_products(program):
    dtype = program.often(torch.bfloat16, torch.float16, torch.float32)
    summed, columns = program.often(30, 31, 32, 3, 0, 1), program.often(25, 47, 48, 2, 0, 1)
    batch = program.often([2], [], [2, 3], [1], [0])
    x = program.tensor(*batch, program.often(4, 1, 0), summed, dtype=dtype)
    if program.pick(False, True):
        w = program.tensor(columns, summed, dtype=dtype)
        bias = program.often(program.tensor(columns, dtype=dtype), None, program.tensor(1, dtype=dtype))
        made = program.let(program.call("F.linear", input=x, weight=w, bias=bias))
    else:
        y = program.tensor(*program.often(batch, [], [1]), summed, columns, dtype=dtype)
        form = program.pick("torch.matmul({}, {})", "{} @ {}", "{}.matmul({})", "torch.bmm({}, {})")
        made = program.let(form.format(x, y))
    after = program.often("", ".softmax(-1)", ".relu()", ".mT", ".flatten()")
    return program.returns(f"{made}{after}")


ROWS = ("{}[..., :, None, :]", "{}.unsqueeze(-2)", "{0}[..., None, :].expand(*{0}.shape[:-1], 8, -1)", "{}")
COLUMNS = ("{}[..., None, :, :]", "{}.unsqueeze(-3)", "{}.mT[..., None].transpose(-1, -3).transpose(-1, -2)", "{}")
VIEWS = (".transpose(-1, -2)", ".flatten(-3, -2)", "[..., None, :]", ".unsqueeze(0)", ".contiguous()", ".view(-1, 6)",
         ".movedim(-1, 0)", "[..., 1:]", ".squeeze()", ".mT.flatten(-2)", ".reshape(2, -1)", ".float()")  # fmt: skip


def contraction(program):
    dtype, batch, width = program.often(*DTYPES), program.often([2], [], [1], [0]), program.often(6, 4, 3, 1, 0)
    program.assume_indices(width)
    rows = program.tensor(*batch, program.often(9, 16, 1), width, dtype=dtype)
    columns = program.tensor(*program.often(batch, []), program.often(8, 1, 0), width,
                             dtype=program.often(dtype, torch.float32, torch.float64))  # fmt: skip
    one = program.let(program.pick(*program.often(ROWS[:1], ROWS)).format(rows))
    other = program.let(program.pick(*program.often(COLUMNS[:1], COLUMNS)).format(columns))
    made = program.let(program.pick("{} * {}", "torch.mul({1}, {0})", "{}.multiply({})").format(one, other))
    if program.pick(False, True):
        sizes = broadcast(program, [*program.value(made).shape])
        third = program.often(program.tensor(*sizes, dtype=program.often(dtype, torch.float32)), 0.5, 2, one)
        made = program.let(program.pick("{} * {}", "{1} * {0}").format(made, third))
    if program.pick(False, True):
        made = program.let(f"{made}{program.pick(*VIEWS)}")
    dim = program.often(-1, "(-1,)", -2, 0, "(-1, -2)", "(0, -1)", "()")
    more = program.often("", ", keepdim=True", ", dtype=torch.float64", ", True", ", dtype=torch.float32")
    return program.returns(program.pick(*SUMMED).format(made, dim, more))


def indices(program, *sizes):
    """Draw numbers of rows of a table of five."""
    kind, first = program.often(torch.int64, torch.int32), program.often(0, -5)
    program.assume_indices(first == 0)
    value = torch.randint(first, first + 5, sizes, generator=torch.Generator().manual_seed(1)).to(kind)
    return program.tensor(value=program.often(value, value.mT.contiguous().mT if len(sizes) > 1 else value))


def bag(program, table, dtype):
    given = {"input": indices(program, *program.often([4, 3], [4], [0, 3], [4, 0], [4, 1])), "weight": table}
    if program.often(False, True):
        given["offsets"] = program.tensor(value=torch.tensor([0, 2]))
    if program.often(False, True):
        given["max_norm"] = 1.0
    if program.pick(True, False):
        given["mode"] = repr(program.often("sum", "mean", "max"))
    if program.often(False, True):
        given["per_sample_weights"] = program.tensor(4, 3, dtype=dtype)
    if program.often(False, True):
        given["include_last_offset"] = program.pick(True, False)
    if program.often(False, True):
        given["padding_idx"] = program.pick(0, -1, 4)
    return program.call("F.embedding_bag", positional=2, **given)


GATHERED = (
    "{0}[{1}]",
    "{0}[{1}, :]",
    "{0}[:, {1}.clamp(0, 0)]",
    "F.embedding({1}, {0})",
    "F.embedding(weight={0}, input={1}, padding_idx=1)",
    "F.embedding({1}, {0}, max_norm=1.0)",
    "{0}.index_select(0, {1}.flatten())",
    "torch.index_select({0}, dim=0, index={1}.flatten())",
)
WEIGHTED = ("{0} * {1}", "{1} * {0}", "{0}.mul({1})", "torch.mul(other={0}, input={1})")
SUMMED = ("{0}.sum({1}{2})", "{0}.mean({1}{2})", "torch.sum({0}, {1}{2})", "torch.mean(input={0}, dim={1})")


def gather_sum(program):
    dtype = program.often(*DTYPES)
    width = program.often(4, 1, 0)
    program.assume_indices(width)
    table = program.tensor(5, width, dtype=dtype)
    if program.pick(False, True):
        return program.returns(bag(program, table, dtype))
    shape = program.often([4, 3], [4], [2, 4, 3], [0, 3], [4, 0], [2, 1])
    rows = program.let(program.pick(*GATHERED).format(table, indices(program, *shape)))
    if program.often(False, True):
        rows = program.let(f"{rows}.{program.pick('unflatten(0, (2, -1))', 'flatten(0, 1)', 'reshape(-1, 2, 4)')}")
    if program.pick(False, True):
        sizes = program.often([*shape, 1], [*shape[:-1], 1, 1], [*shape, 4], [1], [4])
        weights = program.tensor(*sizes, dtype=program.often(dtype, torch.float32))
        rows = program.let(program.pick(*WEIGHTED).format(rows, weights))
    dim = program.often(-2, 0, 1, "(-2,)", "(0, 1)", -1)
    more = program.often("", ", keepdim=True", ", dtype=torch.float64", ", True")
    return program.returns(program.pick(*SUMMED).format(rows, dim, more))


def scatter_reduce(program):
    dtype = program.often(*DTYPES, torch.float64)
    of_rows, of_targets = program.often(5, 1, 0), program.often(4, 1, 0)
    sizes = program.often([4], [2, 3], [], [1], [0])
    given = {"input": program.tensor(of_targets, *sizes, dtype=dtype), "dim": program.often(0, -1 - len(sizes), 1)}
    program.assume_indices(of_targets and given["dim"] != 1)
    src = program.tensor(of_rows, *sizes, dtype=program.often(dtype, torch.float32))
    value = torch.randint(max(of_targets, 1), [2 * of_rows], generator=torch.Generator().manual_seed(1))
    index = program.tensor(value=program.often(value[::2], value[:of_rows].int()))
    if program.pick(True, False):
        ones = ", 1" * len(sizes)
        given["index"] = f"{index}.long().view(-1{ones}).{program.often('expand_as({0})', 'repeat(1, 4)').format(src)}"
        given["src"] = program.often(src, f"{src}[:, :1]")
        names = {"scatter_add": (), "scatter_reduce": ("sum", "mean", "amax", "amin", "prod")}
    else:
        given |= {"index": index, "source": src}
        names = {"index_add": (), "index_reduce": ("mean", "amax", "amin", "prod")}
    name = program.pick(*names)
    if names[name]:
        given["reduce"] = repr(program.pick(*names[name]))
        if program.draw(st.booleans()):
            given["include_self"] = program.pick(False, True)
    elif "source" in given and program.draw(st.booleans()):
        given["alpha"] = program.often(1, 2)
    if program.pick(True, False):
        return program.returns(program.call(f"torch.{name}", positional=3, **given))
    own = program.often(f"torch.zeros_like({given.pop('input')})", f"{src}.new_ones({[of_targets, *sizes]})")
    return program.returns(program.call(f"{own}.{name}{program.pick('_', '')}", positional=2, **given))


PROGRAMS = {
    "packed": packed,
    "cross_entropy": cross_entropy,
    "linear_cross_entropy": linear_cross_entropy,
    "linear_activation": activated(product, RELU + GELU),
    "approximate_gelu": activated(product, EXACT),
    "onednn": activated(lambda program: program.pick(product, normed)(program), ONEDNN),
    "convolution": activated(normed, RELU),
    "grouped_convolution": activated(grouped, ("{0}", "F.relu6({0})", *RELU, *ONEDNN)),
    "stem_convolution": stem_convolution,
    "patches": patches,
    "interpolation": interpolation,
    "scaled_product": scaled_product,
    "depthwise_convolution": depthwise_convolution,
    "transposed_convolution": transposed_convolution,
    "convolution_as_product": convolution_as_product,
    "matrix_vector": matrix_vector,
    "aligned_products": aligned_products,
    "contraction": contraction,
    "gather_sum": gather_sum,
    "scatter_reduce": scatter_reduce,
}
LOSSES = ("cross_entropy", "linear_cross_entropy")  # with gradients of their own
TRAINING = (*LOSSES, "patches", "interpolation", "scaled_product", "convolution_as_product", "matrix_vector",
            "contraction", "aligned_products", "depthwise_convolution", "transposed_convolution")  # fmt: skip


def options(name, training=TRAINING):
    """Return the options of `matches` for a rewrite."""
    return {"training": name in training, "atol": 5e-4 if name == "approximate_gelu" else 0.0}


@pytest.mark.parametrize("name", PROGRAMS)
def test_gives_eagers_results(name):
    """A rewrite gives what eager does, for any call that the functional takes, and a part of the calls match."""
    found = check(name, PROGRAMS[name], **options(name))
    assert sum(map(bool, found)) >= len(found) / 20


@pytest.mark.parametrize("name", PROGRAMS)
def test_gives_eagers_results_compiled(name):
    """So does code that Inductor compiles."""
    check(name, PROGRAMS[name], COMPILED, compiled=True, **options(name, LOSSES))

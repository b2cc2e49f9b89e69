"""Whatever attention, norm or rotation is drawn, a rewrite either does not match or gives eager's numbers."""

import math

import pytest
import torch
from hypothesis import strategies as st

from backend_kwargs.rewrites.matching import HALF
from tests.rewrites.calls import COMPILED, DTYPES, check

NUMBERS = (0.3, 2, 1.0, -0.5, 0.0)


def broadcast(program, sizes):
    """Draw a shape that broadcasts to `sizes`."""
    kept = sizes[program.often(0, *range(len(sizes) + 1)) :]
    return [program.often(size, 1) for size in kept]


# ---- attention that is written out


def scores(program, text, shape, dtype):
    """Draw what is done to scores of this shape before the softmax, and return the source."""
    for step in program.often(["scale", "bias"], ["bias"], ["heads", "bias"], ["bias", "scale"], ["bias", "bias"]):
        if step == "scale":
            number = program.often(0.3, *NUMBERS)
            text = program.let(f"{text} {program.pick('*', '/')} {number or 1e-40}")
        elif step == "heads":
            text = program.let(
                f"{text} * {program.tensor(*program.often(shape[-3:-2], [1, *shape[-3:-2]]), 1, 1, dtype=dtype)}"
            )
        else:
            bias = program.tensor(*broadcast(program, shape), dtype=program.often(dtype, *DTYPES))
            text = program.let(program.pick(f"{text} + {bias}", f"{bias} + {text}"))
    return program.let(f"{text}{program.often('', '.float()', '.tanh()', '.mT.mT')}")


def attention(program):
    dtype = program.pick(*DTYPES)
    heads = program.often([2, 3], [4, 1], [6], [1, 1], [2, 1, 3], [], [0, 2])
    queries, keys = program.often(5, 1, 0), program.often(7, 5, 1, 0)
    width, width_of_v = program.often(8, 5, 1, 0), program.often(8, 3, 0)
    folded = program.often(False, True, True)
    q, k, v = (
        program.tensor(*(heads if folded else broadcast(program, heads)), *sizes, dtype=program.often(dtype, *DTYPES))
        for sizes in ((queries, width), (keys, width), (keys, width_of_v))
    )
    shape = heads
    if folded:
        number = math.prod(heads)
        q, k, v = (f"{x}.reshape({number}, {rows}, -1)" for x, rows in ((q, queries), (k, keys), (v, keys)))
        shape = program.often(heads, [number], *([n, number // n] for n in range(1, number + 1) if number % n == 0))
    made = program.let(f"{q} @ {k}.mT")
    if folded:
        made = program.let(f"{made}.view({[*shape, queries, keys]})")
    made = scores(program, made, [*shape, queries, keys], dtype)
    dims = len(shape) + 2
    dim = program.often(-1, dims - 1, -2, dims - 2, 0)
    made = program.let(f"{made}.softmax({dim}{program.often('', ', dtype=torch.float32')}).to({v}.dtype)")
    if folded:
        made = program.let(f"{made}.view({number}, {queries}, {keys})")
    elif queries == 1:
        made = f"{made}{program.often('', f'.expand({[*[-1] * (dims - 2), 4, keys]})')}"
    made = program.let(f"{made} @ {v}")
    if folded:
        made = program.let(f"{made}.view({[*heads, queries, width_of_v]})")
    if len(heads) == 2:
        made += program.pick("", ".transpose(1, 2).contiguous()", ".transpose(1, 2).flatten(2)")
    return program.returns(made)


# ---- calls of attention


def attention_mask_of(program, shape, dtype):
    """Draw the source of a mask for scores of this shape."""
    sizes = broadcast(program, shape)
    mask = program.tensor(*sizes[:-1], *program.often([1] * bool(sizes), sizes[-1:]), dtype=dtype)
    mask = program.pick(f"({mask} > -0.5)", f"{mask}{program.often('.detach()', '')}")
    expanded = f".expand({program.pick(sizes, shape)})"
    return f"{mask}{program.often(expanded, '', f'{expanded}.contiguous()')}"


def options(program, shape, dtype):
    """Draw the arguments of attention after queries, keys and values, whose scores have this shape."""
    given = {}
    if program.often(True, False):
        given["attn_mask"] = attention_mask_of(program, shape, program.often(dtype, *DTYPES))
    for name, values in (
        ("dropout_p", (0.0,)), ("is_causal", (False, True)), ("scale", (None, *NUMBERS)), ("enable_gqa", (False, True))
    ):  # fmt: skip
        if program.draw(st.booleans()):
            given[name] = program.often(*values, values[-1])
    return given


def call_of_attention(program, given):
    """Draw the form of a call; what is behind the first option that it lacks is given by keyword."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    first = next((at for at, name in enumerate(names) if name not in given), len(names))
    return program.call("F.scaled_dot_product_attention", positional=first, **given)


def attention_mask(program):
    dtype = program.often(*DTYPES, torch.float64)
    leading = program.often([2, 3], [3], [], [1, 2, 3])
    queries, keys, width = program.often(5, 1, 0), program.often(7, 5, 1, 0), program.often(8, 1)
    sizes = {"query": (queries, width), "key": (keys, width), "value": (keys, program.often(width, 3))}
    given = {name: program.tensor(*leading, *each, dtype=dtype) for name, each in sizes.items()}
    given |= options(program, [*leading, queries, keys], dtype)
    return program.returns(call_of_attention(program, given))


def fused_attention(program):
    dtype = program.often(*DTYPES, torch.float64)
    leading = program.pick([2, 3, 2], [3], [2, 3], [], [2, 1, 2, 3])
    queries, keys, width = program.often(5, 1, 0), program.often(7, 5, 1, 0), program.often(8, 1)
    sizes = {"query": (queries, width), "key": (keys, width), "value": (keys, program.often(width, 3))}
    given = {name: program.tensor(*broadcast(program, leading), *each, dtype=dtype) for name, each in sizes.items()}
    given |= options(program, [*leading, queries, keys], dtype)
    return program.returns(call_of_attention(program, given))


def window_attention(program):
    dtype = program.often(*HALF, torch.float32)
    batch, heads, queries = program.often(6, 1, 0), program.often(2, 1, 0), program.often(5, 1, 65, 0)
    keys, width, of_v = program.often(7, 1, 64, 65), program.often(8, 5, 1, 65), program.often(8, 3)
    sizes = {"query": (queries, width), "key": (keys, width), "value": (keys, of_v)}
    given = {name: program.tensor(batch, heads, *each, dtype=dtype) for name, each in sizes.items()}
    given |= options(program, [batch, heads, queries, keys], dtype)
    bias = program.tensor(*program.often([1], [batch]), heads, queries, keys, dtype=dtype)
    masks = program.tensor(*program.often([1, 3], [1, 2], [3, 1]), program.often(1, heads), queries, keys, dtype=dtype)
    repeated = f"{masks}.expand({batch} // {masks}.shape[1], -1, {heads}, -1, -1)"
    added = program.pick(f"{bias} + {{}}", f"{{}} + {bias}", f"torch.add({bias}, {{}}, alpha={program.often(1, 2)})")
    windows = added.format(f"{repeated}.reshape(-1, {heads}, {queries}, {keys})")
    given["attn_mask"] = program.often(bias, windows, given.get("attn_mask", bias))
    return program.returns(call_of_attention(program, given))


REPEATS = {
    "repeat_interleave": "{x}.repeat_interleave({times}, 1)",
    "function": "torch.repeat_interleave(input={x}, repeats={times}, dim=-3)",
    "expand": "{x}[:, :, None].expand(-1, -1, {times}, -1, -1).reshape({batch}, {all}, {keys}, {width})",
    "tile": "{x}[:, None].expand(-1, {times}, -1, -1, -1).reshape({batch}, {all}, {keys}, {width})",
    "of keys": "{x}.repeat_interleave({times}, 2)",
}


def decode_attention(program):
    odd = program.often("nothing", "dtype", "batch", "heads", "repeats", "width", "dimension")  # one at a time
    dtype = torch.float64 if odd == "dtype" else program.pick(*DTYPES)
    batch, queries, keys = program.often(2, 1, 0), program.often(1, 3, 0), program.often(9, 4, 1)
    width, heads, shared = program.often(8, 1, 0), program.pick(4, 8, 2, 1), program.pick(2, 1, 4)
    repeats = program.pick("expand", "repeat_interleave", "function", "")
    given = {"query": program.tensor(batch, heads, queries, width, dtype=dtype)}
    for name in ("key", "value"):
        of = {"batch": batch, "heads": shared, "keys": keys, "width": width}
        if odd in of:
            of[odd] = program.pick(1, 2, 4, 5)
        if odd == "repeats":
            repeats = program.pick("", *REPEATS)
        of |= {"x": program.tensor(*of.values(), dtype=dtype), "times": max(heads // of["heads"], 1)}
        of["all"] = of["heads"] * of["times"]
        given[name] = REPEATS[repeats].format(**of) if repeats else of["x"]
    given |= options(program, [batch, heads, queries, keys], dtype)
    given["enable_gqa"] = given.get("enable_gqa", not repeats)
    if odd == "dimension":
        given |= {name: f"{given[name]}[:, :, None]" for name in ("query", "key", "value")}
    return program.returns(call_of_attention(program, given))


def multihead_attention(program):
    dtype = program.often(torch.float32, torch.bfloat16)
    heads = program.pick(2, 1)
    width, batch = 4 * heads, program.often(2, 1, 0)
    queries, keys = program.often(5, 1), program.often(5, 3)
    lead = program.often([batch], [])
    query = program.tensor(queries, *lead, width, dtype=dtype)
    key = program.often(query, program.tensor(keys, *lead, width, dtype=dtype))
    keys = queries if key is query else keys
    value = program.often(key, query if keys == queries else key, program.tensor(keys, *lead, width, dtype=dtype))
    separate = program.often(False, True)

    def optional(*sizes, **given):
        return program.often(program.tensor(*sizes, dtype=dtype, **given), None)

    given = {
        "query": query, "key": key, "value": value, "embed_dim_to_check": width, "num_heads": heads,
        "in_proj_weight": None if separate else program.tensor(3 * width, width, dtype=dtype),
        "in_proj_bias": optional(3 * width), "bias_k": None, "bias_v": None,
        "add_zero_attn": program.often(False, True), "dropout_p": 0.0,
        "out_proj_weight": program.tensor(width, width, dtype=dtype), "out_proj_bias": optional(width),
        "training": True, "key_padding_mask": None, "need_weights": program.often(False, True), "attn_mask": None,
        "use_separate_proj_weight": separate,
    }  # fmt: skip
    if program.often(False, True):
        given |= {name: program.tensor(1, 1, width, dtype=dtype) for name in ("bias_k", "bias_v")}
    if separate:
        given |= {f"{each}_proj_weight": program.tensor(width, width, dtype=dtype) for each in "qkv"}
    extra = bool(given["bias_k"]) + given["add_zero_attn"]
    if program.draw(st.booleans()):
        sizes = program.pick([queries, keys], [math.prod(lead) * heads, queries, keys])
        mask = program.tensor(*sizes, dtype=dtype)
        given["attn_mask"] = program.pick(mask, f"({mask} > 0.9)")
        given["is_causal"] = program.often(False, True) and not extra
    if program.draw(st.booleans()):
        mask = program.tensor(*lead, keys, dtype=dtype)
        given["key_padding_mask"] = program.pick(mask, f"({mask} > 0.9)")
    given["average_attn_weights"] = program.pick(True, False)
    return program.returns(f"{program.call('F.multi_head_attention_forward', positional=17, **given)}[0]")


# ---- norms, rotations and activations


def layer_norm_backward(program):
    dtype = program.pick(*DTYPES)
    shape = [*program.often([3], [], [2, 3], [0], [2, 1, 3]), program.often(6, 1, 0)]
    normalized = shape[-program.often(1, 2) :]
    given = {
        "input": program.tensor(*shape, dtype=dtype),
        "normalized_shape": program.pick(tuple(normalized), normalized),
    }
    for name, share in (("weight", dtype), ("bias", dtype)):
        given[name] = program.often(program.tensor(*normalized, dtype=program.often(share, *DTYPES)), None)
    if program.draw(st.booleans()):
        given["eps"] = program.often(1e-5, 0.1, 1)
    return program.returns(program.call(program.pick("F.layer_norm", "torch.layer_norm"), **given))


def called_gradients(program):
    """Draw a call of ATen's gradients of a layer norm."""
    dtype = program.pick(*DTYPES)
    shape = [*program.often([3], [], [2, 3], [0]), program.often(6, 1)]
    sizes = shape[-program.often(1, 2) :]
    rows = shape[: len(shape) - len(sizes)]
    kept = [*rows, *[1] * len(sizes)]
    weight, bias = (program.tensor(*sizes, dtype=program.often(dtype, torch.float32)) for _ in range(2))
    x, grad = (program.tensor(*shape, dtype=dtype) for _ in range(2))
    of_rows = program.often(torch.float32, dtype)
    # torch itself reads these two as if they were dense.
    mean, rstd = (program.tensor(*program.often(kept, rows), dtype=of_rows, layouts=["contiguous"]) for _ in range(2))
    mask = program.often([True, True, True], [True, False, True], [False, True, True], [True, True, False])
    call = program.call(
        f"torch.ops.aten.native_layer_norm_backward{program.pick('', '.default')}",
        grad_out=grad, input=x, normalized_shape=sizes, mean=mean, rstd=rstd, weight=program.often(weight, None),
        bias=program.often(bias, None), output_mask=mask,
    )  # fmt: skip
    made = program.let(call)
    return program.returns(*(f"{made}[{at}]" for at, wanted in enumerate(mask) if wanted))


PROGRAMS = {
    "attention": attention,
    "attention_mask": attention_mask,
    "decode_attention": decode_attention,
    "fused_attention": fused_attention,
    "window_attention": window_attention,
    "multihead_attention": multihead_attention,
    "layer_norm_backward": layer_norm_backward,
}
INFERENCE = ("attention", "decode_attention")


@pytest.mark.parametrize("name", PROGRAMS)
def test_gives_eagers_results(name):
    """A rewrite gives what eager does, for any call that the functional takes, and a part of the calls match."""
    found = check(name, PROGRAMS[name], training=name not in INFERENCE)
    assert sum(map(bool, found)) >= len(found) / 10


def test_called_gradients():
    """Gradients of a layer norm that are called by their name are ATen's, and a part of the calls match."""
    found = check("layer_norm_backward", called_gradients)
    assert sum(map(bool, found)) >= len(found) / 10


@pytest.mark.parametrize("name", PROGRAMS)
def test_gives_eagers_results_compiled(name):
    """So does code that Inductor compiles."""
    check(name, PROGRAMS[name], COMPILED, training=name not in INFERENCE, compiled=True)

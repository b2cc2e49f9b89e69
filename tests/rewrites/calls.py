"""Properties of rewrites: hypothesis draws a call, and the rewritten graph gives eager's results or is not rewritten.

A test draws a `Program`, as source text that a failure shows. `matches` traces it as the rewrite sees it (dynamo's
graph, or the one that Inductor lowers), rewrites it, and runs it on a CPU, uncompiled unless asked.
"""

import os
from functools import partial
from itertools import chain

import hypothesis
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch._inductor.compile_fx import compile_fx

from backend_kwargs.rewrites.table import find_rewrite, resolved
from backend_kwargs.rewrites.traced import PLACE, RewritePass
from tests.rewrites.lowering import Rewriting
from tests.rewrites.on_a_cpu import compiled_by

EXAMPLES = os.environ.get("BACKEND_KWARGS_EXAMPLES")  # how many to draw at random; without it the same few each time
# A failure is shown as it was drawn: the search for a smaller one traces hundreds of programs.
PROPERTY = settings(
    max_examples=int(EXAMPLES or 20),
    derandomize=EXAMPLES is None,
    database=None,
    deadline=None,
    phases=(Phase.generate,),
    suppress_health_check=list(HealthCheck),
)
COMPILED = settings(PROPERTY, max_examples=2)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LAYOUTS = ("contiguous", "transposed", "expanded", "apart", "shifted")


def tensor_of(shape, dtype=torch.float32, layout="contiguous", seed=0, device="cpu"):
    """Return random numbers in a layout: `apart` has gaps between them, `shifted` begins inside its memory."""
    random = partial(torch.randn, generator=torch.Generator(device).manual_seed(seed), device=device)
    if layout == "transposed":
        made = random(shape[::-1]).permute([*reversed(range(len(shape)))])
    elif layout == "expanded":
        at = next((at for at, size in enumerate(shape) if size > 1), None)
        made = random([1 if each == at else size for each, size in enumerate(shape)])
        return made.to(dtype).expand(shape)
    elif layout == "apart" and shape:
        return random([*shape[:-1], 2 * shape[-1]]).to(dtype)[..., ::2]
    elif layout == "shifted":
        made = random(torch.Size(shape).numel() + 1)
        return made.to(dtype)[1:].view(shape)
    else:
        made = random(shape)
    return made.to(dtype)


class Program:
    """A function of drawn tensors; `draw` is hypothesis's."""

    def __init__(self, draw, device="cpu"):
        self.draw, self.device = draw, device
        self.tensors = []
        self.lines = []

    def pick(self, *values):
        """Draw one of `values`; the first is the simplest."""
        return self.draw(st.sampled_from(values))

    def often(self, value, *others):
        """Draw `value` in most cases, so that most programs are ordinary but for one thing."""
        return value if self.draw(st.integers(0, 5)) else self.pick(*others)

    def tensor(self, *shape, dtype=torch.float32, layouts=LAYOUTS, value=None, parameter=False):
        """Draw a tensor, or take the `value`, and return its name."""
        name, seed = f"t{len(self.tensors)}", self.draw(st.integers(0, 9))
        if value is None:
            value = tensor_of(shape, dtype, self.often("contiguous", *layouts), seed, self.device)
        value = value.to(self.device)
        self.tensors.append(torch.nn.Parameter(value) if parameter else value)
        return name

    def call(self, target, /, positional=None, **given):
        """Return the source of a call with at most `positional` arguments; the others are keywords, in any order."""
        names = [*given]
        most = len(names) if positional is None else positional
        cut = self.often(most, *range(most + 1))
        texts = [str(given[name]) for name in names[:cut]]
        texts += [f"{name}={given[name]}" for name in self.draw(st.permutations(names[cut:]))]
        return f"{target}({', '.join(texts)})"

    def assume_indices(self, exist):
        """Draw again unless indices are in range, or on a CPU: a GPU's assert ends all further calls of the process."""
        hypothesis.assume(exist or self.device == "cpu")

    def let(self, expression):
        """Name the value of an expression, which may be under autocast or without gradients, and return the name."""
        autocast = f"with torch.autocast({self.device!r}, torch.bfloat16): "
        context = self.often("", "", autocast, "with torch.no_grad(): ")
        self.lines.append(f"{context}v{len(self.lines)} = {expression}")
        return f"v{len(self.lines) - 1}"

    def value(self, expression):
        """Return the value of an expression on the tensors so far, if it has one."""
        try:
            return self._function(expression)(*self.tensors)
        except Exception:  # noqa: BLE001 - what torch raises for calls of a wrong form
            hypothesis.reject()

    def returns(self, *results):
        """Return the function and its arguments."""
        results = [*map(self.let, results)]
        for at, each in enumerate(self.tensors):
            hypothesis.note(f"t{at}: {tuple(each.shape)} {each.stride()} {each.dtype}")
        return self._function(*results), self.tensors

    def _function(self, *results):
        names = ", ".join(f"t{at}" for at in range(len(self.tensors)))
        source = f"def fn({names}):\n" + "".join(f"    {line}\n" for line in self.lines)
        source += f"    return {', '.join(results)}\n"
        hypothesis.note(source)
        scope = {"torch": torch, "F": F}
        exec(source, scope)
        return scope["fn"]


def check(name, program, setting=PROPERTY, *, device="cpu", **options):
    """Run the property of a rewrite on drawn programs and return the number of matches in each."""
    found = []

    @setting
    @given(st.data())
    def gives_eagers_results(data):
        found.append(matches(name, *program(Program(data.draw, device)), **options))

    gives_eagers_results()
    return found


def matches(name, fn, args, *, training=False, compiled=False, atol=0.0):
    """Return how often a rewrite matches, after asserting that the rewritten graph gives what eager does.

    Results have eager's layout; that of a gradient is torch's own affair. A call that eager does not take, or that
    fails without the rewrite too, is no example. `atol` is for a rewrite that is an approximation.
    """
    try:
        eager = _run(fn, args, training)
        exact = _run(fn, [arg.double() if arg.is_floating_point() else arg for arg in args], training)
    except Exception:  # noqa: BLE001 - what torch raises for calls of a wrong form
        hypothesis.reject()
    rewritten, count = _rewritten(name, fn, compiled)
    try:
        got = _run(rewritten, args, training)
    except Exception:
        if _fails_unchanged(name, fn, args, training, compiled):
            hypothesis.reject()
        raise
    if (found := count()) == 0:  # then the graph is as it was, but for torch's own decompositions
        return 0
    if not compiled:  # Inductor may lay out a result otherwise than eager does
        assert [*map(_layout, got[0])] == [*map(_layout, eager[0])]
    for one, plain, wide in zip(*map(chain.from_iterable, (got, eager, exact)), strict=True):
        _agree(one, plain, wide, atol)
    return found


def _rewritten(name, fn, compiled):
    """Return the function with the rewrite, and a function that returns the number of matches so far."""
    rewrite = find_rewrite(name)
    if rewrite.traced:
        call, counts = compiled_by(resolved(rewrite.traced), fn, inductor=compiled)
        return call, lambda: sum(counts)
    if not compiled:
        rewriting = Rewriting(fn, name)
        return rewriting, rewriting.counts.total
    torch._dynamo.reset()
    options = {PLACE: RewritePass((name,), ())}
    return torch.compile(fn, backend=partial(compile_fx, config_patches=options)), lambda: None


def _fails_unchanged(name, fn, args, training, compiled):
    torch._dynamo.reset()
    traced = compiled or find_rewrite(name).traced
    plain = torch.compile(fn, backend="inductor" if compiled else "eager") if traced else Rewriting(fn)
    try:
        _run(plain, args, training)
    except Exception:  # noqa: BLE001 - whatever it is, the rewrite is not the cause
        return True
    return False


def _run(fn, args, training):
    """Return the results, and in training the gradients of arguments for fixed gradients of the results."""
    if not training:
        with torch.no_grad():
            return _flat(fn(*args)), []
    args = [arg.detach().requires_grad_() if arg.is_floating_point() else arg for arg in args]
    results = _flat(fn(*args))
    chosen = [each for each in results if each.requires_grad]
    given = [tensor_of(each.shape, each.dtype, seed=3, device=each.device) for each in chosen]
    wanted = [arg for arg in args if arg.requires_grad]
    gradients = torch.autograd.grad(chosen, wanted, given, allow_unused=True, materialize_grads=True) if chosen else ()
    return results, [*gradients]


def _flat(value):
    return [value] if isinstance(value, torch.Tensor) else [*value]


def _agree(got, eager, exact, atol):
    """Raise unless a result equals eager's up to rounding and `atol`, by the distance of both to float64's."""
    assert (got.dtype, got.shape) == (eager.dtype, eager.shape)
    own, error = ((each.detach().double() - exact.detach()).abs() for each in (eager, got))
    finite = own.isfinite()
    torch.testing.assert_close(got.detach()[~finite], eager.detach()[~finite], equal_nan=True)
    if finite.any():
        rounding = max(8 * torch.finfo(eager.dtype).eps, 1e-5) * exact.detach()[finite].abs().max().clamp(min=1e-2)
        assert error[finite].max() <= atol + rounding + 2 * own[finite].max()


def _layout(result):
    """Return the strides that tell where a number is, and whether it has a derivative."""
    sizes = zip(result.stride(), result.shape, strict=True)
    return [stride for stride, size in sizes if size > 1 and result.numel()], result.requires_grad

"""Whether audits find decisions that have lost, and how often they raise an alarm over decisions that have not.

    python -m benchmarks audit --out FOLDER

Each planted decision is default with a kernel that waits for 6 % of its time; it is audited among the others of one
audit, with default as its rival. Then unchanged decisions of the same models are audited again and again.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

import backend_kwargs as bk
from backend_kwargs.auto.question import Question
from backend_kwargs.backend import Backend
from backend_kwargs.backends import CapturedGraph
from backend_kwargs.facts.decision import DEFAULT, Decision, RaceRow
from backend_kwargs.files import write_whole
from backend_kwargs.fleet.audit import Auditor, Effort, Finding, Target, judged
from backend_kwargs.trial import environment, interleave, percentile

SLOWER = 0.06  # at least 5 % are asked for, and a kernel cannot wait for less than its own launch
QUIET = 1.02  # the widest A/A band for which a planted loser must be found
MOST_ALARMS = 1
HOOK = "post_grad_custom_post_pass"
LOSER = "planted_loser"
Say = Callable[[str], None]
waits = {"s": 0.0}  # of the planted kernel


@torch.library.custom_op("backend_kwargs_benchmarks::wait", mutates_args=())
def wait(x: torch.Tensor) -> torch.Tensor:
    """Return a copy after the planted time."""
    until = time.perf_counter() + waits["s"]
    while time.perf_counter() < until:
        pass
    return x.clone()


@wait.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def planted(graph: torch.fx.Graph) -> None:
    """Let the first output wait."""
    (output,) = graph.find_nodes(op="output")
    (first, *others) = output.args[0]
    with graph.inserting_before(output):
        late = graph.call_function(torch.ops.backend_kwargs_benchmarks.wait.default, (first,))
    output.args = ((late, *others),)


def models() -> dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]]:
    """Return twenty models by name: five kinds at four sizes, whose calls take milliseconds."""
    kinds: dict[str, Callable[[int], tuple[nn.Module, torch.Tensor]]] = {
        "mlp": lambda n: (_mlp(n), torch.randn(8 * n, n)),
        "norms": lambda n: (nn.Sequential(*(_normed(n) for _ in range(4))), torch.randn(16 * n, n)),
        "convolutions": lambda n: (_convolutions(n // 8), torch.randn(4, n // 8, 32, 32)),
        "attention": lambda n: (nn.TransformerEncoderLayer(n, 4, 2 * n, 0.0, batch_first=True), torch.randn(4, 128, n)),
        "pointwise": lambda n: (nn.Sequential(*(nn.GELU() for _ in range(8))), torch.randn(64 * n, 64)),
    }
    return {f"{kind} {n}": lambda make=make, n=n: _made(make, n) for kind, make in kinds.items() for n in SIZES}


SIZES = (128, 192, 256, 384)


def _made(make: Callable[[int], tuple[nn.Module, torch.Tensor]], n: int) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model, x = make(n)
    return model.eval(), x


def _mlp(n: int) -> nn.Module:
    return nn.Sequential(nn.Linear(n, 4 * n), nn.GELU(), nn.Linear(4 * n, n))


def _normed(n: int) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(n), nn.SiLU())


def _convolutions(n: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(n, n, 3, padding=1), nn.ReLU(), nn.Conv2d(n, n, 3, padding=1))


@dataclass(frozen=True, slots=True)
class Asked:
    """The arguments: how many models are planted in, how many audits of how many unchanged ones, and the effort."""

    plants: int
    audits: int
    unchanged: int
    effort: Effort
    out: Path


def measure(asked: Asked, say: Say) -> None:
    """Measure, and write FOLDER/audit.json and FOLDER/audit.md."""
    asked.out.mkdir(parents=True, exist_ok=True)
    bk.register_template(LOSER, {HOOK: planted, "fx_graph_cache": False})
    backend = bk.make_backend("tmpl-inductor:auto", candidates=[LOSER])
    names = list(models())[: asked.plants]
    found = _audit(asked, backend, dict.fromkeys(names, LOSER), say)
    say(f"{sum(each.failed for each in found)} of {len(found)} planted losers are found")
    alarms: list[list[Finding]] = []
    spread = list(models())[:: max(len(models()) // asked.unchanged, 1)][: asked.unchanged]
    for at in range(1, asked.audits + 1):
        alarms.append(_audit(asked, backend, dict.fromkeys(spread, DEFAULT), say))
        say(f"audit {at} of {asked.audits} of unchanged decisions: {sum(e.failed for e in alarms[-1])} alarms")
    where = environment(torch.device("cpu"))
    data = {"environment": where, "planted": found, "unchanged": alarms}
    write_whole(asked.out / "audit.json", msgspec.json.format(msgspec.json.encode(data, enc_hook=repr)).decode() + "\n")
    write_whole(asked.out / "audit.md", "\n".join(page(found, alarms, where)) + "\n")


def _audit(asked: Asked, backend: Backend, winners: Mapping[str, str], say: Say) -> list[Finding]:
    """Audit one decision for each model, which names this winner."""
    auditor = Auditor({}, asked.effort, say)
    for name, winner in winners.items():
        make = models()[name]
        decision = _decision(backend, make, winner)
        waits["s"] = SLOWER * _seconds(make) if winner == LOSER else 0.0
        auditor.decisions = {decision.key: [decision]}
        auditor.audit(Target(name, make, backend))
    return judged(auditor.found)


def _decision(backend: Backend, make: Callable[[], tuple[nn.Module, torch.Tensor]], winner: str) -> Decision:
    """Return the decision for a model's graph, as if a race had chosen this winner; its rival is the other."""
    model, x = make()
    keys: list[Any] = []

    def noting(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        keys.append(Question(backend.request(CapturedGraph(gm, inputs))))
        return gm.forward

    torch.compiler.reset()
    with torch.no_grad():
        torch.compile(model, backend=noting, dynamic=False)(x)
    own: Mapping[str, Any] = {HOOK: planted, "fx_graph_cache": False} if winner == LOSER else {}
    # An unchanged decision's rival is default's own code under another option, which must not win.
    rows = (RaceRow("no_size_asserts", {"size_asserts": False}, seconds=1.0),) if winner == DEFAULT else ()
    (asked,) = keys
    return Decision(asked.key, asked.graph, winner, own, rows, asked.here)


def _seconds(make: Callable[[], tuple[nn.Module, torch.Tensor]]) -> float:
    """Return the time of a model's call under default."""
    model, x = make()
    torch.compiler.reset()
    compiled = torch.compile(model, backend="inductor", dynamic=False)
    with torch.no_grad():
        samples = interleave({"default": lambda: compiled(x)}, rounds=60, device=torch.device("cpu"))["default"]
    return percentile(samples, 0.5)


def page(found: Sequence[Finding], alarms: Sequence[Sequence[Finding]], where: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the page: what was found, and whether the bars are met."""
    quiet = [each for each in found if each.noise and each.noise.reach <= QUIET]
    caught = sum(each.failed for each in quiet)
    alarmed = sum(any(each.failed for each in audit) for audit in alarms)
    yield from ("# Audits", "", f"{where['device_name']}, torch {where['torch']}.", "")
    of_quiet = f"{caught} of {len(quiet)}, **{_met(caught == len(quiet), of=quiet)}**"
    yield f"- Planted losers found, where the A/A band is under {QUIET - 1:.0%}: {of_quiet}."
    yield f"- Of all planted losers, {sum(each.failed for each in found)} of {len(found)} are found."
    whole = [audit for audit in alarms if all(each.verdict != "not audited" for each in audit)]
    alarmed_of = f"{alarmed} of {len(alarms)}, **{_met(alarmed <= MOST_ALARMS, of=whole)}**"
    yield f"- Audits of {len(alarms[0]) if alarms else 0} unchanged decisions with an alarm: {alarmed_of}."
    if left := len(alarms) - len(whole):
        yield f"- {left} of them did not measure each decision."
    yield from ("", "| planted in | A/A | slower than default | p | verdict |", "|---|---|---|---|---|")
    for each in found:
        ratio = next((of.ratio for of in each.against if of.ratio), None)
        noise = f"{each.noise.low:.3f} to {each.noise.high:.3f}" if each.noise else ""
        slower = f"{ratio.median - 1:.1%} [{ratio.low - 1:.1%}, {ratio.high - 1:.1%}]" if ratio else each.reason
        yield f"| {each.model} | {noise} | {slower} | {each.p:.1e} | {each.verdict} |"


def _met(met: bool, *, of: Sequence[object]) -> str:
    return "not measured" if not of else "met" if met else "missed"

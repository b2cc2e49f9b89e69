"""Training steps of public nets, under default and in eager, by the accuracy check of `auto`: which of them it refuses.

Weights are random and nothing is downloaded. A net's loss is compiled; each of its graphs is run in eager, in float64
and under default, forward and backward, and the check compares all that it returns, changes, and its gradients. A
refused graph gets the float64 error of each leaf, of eager and of default. Records that exist are not made again.

    python -m benchmarks training-nets --out nets --jobs 14 --max-minutes 25
    python -m benchmarks training-nets --out one --nets held_out:mobilenetv4_train --precisions all --variants all \
        --leaves --jobs 1
    python -m benchmarks training-nets --out nets --page
"""

import copy
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import product
from math import inf
from pathlib import Path
from typing import Any, Literal

import torch

from backend_kwargs import make_backend
from backend_kwargs.auto.budget import Budget
from backend_kwargs.auto.result_checks import ResultChecks
from backend_kwargs.auto.sandbox import Sandbox, sandboxed
from backend_kwargs.errors import BackendKwargsError, unknown
from backend_kwargs.files import write_whole
from backend_kwargs.graphs.replay import Task
from backend_kwargs.graphs.writes import copy_of_graph
from backend_kwargs.harness.named_models import imported
from backend_kwargs.trial import fresh_inputs
from backend_kwargs.trial.accuracy import is_number, root_mean_square, wide
from backend_kwargs.trial.trees import walk
from benchmarks.analysis.markdown import short, table
from benchmarks.execution import process
from benchmarks.workloads.held_out import BY_NAME
from benchmarks.workloads.nets.libraries import Called

Say = Callable[[str], None]
Sizes = Mapping[str, Any]
Record = dict[str, Any]

IMAGE, BATCH, TOKENS = 64, 4, 16
NETS_OF_TORCHVISION: Mapping[str, Sizes] = {
    "alexnet": {},
    "convnext_tiny": {},
    "densenet121": {},
    "efficientnet_b0": {},
    "googlenet": {"init_weights": False},
    "inception_v3": {"init_weights": False, "aux_logits": False, "image": 80},
    "maxvit_t": {"image": 224, "batch": 2},
    "mnasnet0_5": {},
    "mobilenet_v2": {},
    "mobilenet_v3_small": {},
    "regnet_y_400mf": {},
    "resnet18": {},
    "resnet50": {},
    "shufflenet_v2_x0_5": {},
    "squeezenet1_1": {},
    "swin_t": {},
    "vgg11_bn": {},
    "vit_b_16": {"image": 32},
}
NETS_OF_TIMM: Mapping[str, Sizes] = {
    "cait_xxs24_224": {"img_size": 64, "depth": 4},
    "convnextv2_atto": {},
    "dla34": {},
    "edgenext_xx_small": {},
    "efficientformerv2_s0": {"img_size": 64},
    "fastvit_t8": {},
    "gcvit_xxtiny": {"img_size": 224, "batch": 2, "image": 224},
    "ghostnet_100": {},
    "gmlp_ti16_224": {"img_size": 64},
    "levit_128s": {"img_size": 64},
    "mixer_s32_224": {"img_size": 64},
    "mobilenetv4_conv_small": {},
    "mobilevit_xxs": {},
    "nf_resnet50": {},
    "poolformer_s12": {},
    "pvt_v2_b0": {},
    "regnety_002": {},
    "repvgg_a0": {},
    "resmlp_12_224": {"img_size": 64},
    "rexnet_100": {},
    "tf_efficientnet_lite0": {},
    "vit_tiny_patch16_224": {"img_size": 64},
    "xcit_nano_12_p16_224": {"img_size": 64},
}
TINY: Sizes = {
    "vocab_size": 128,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
GROUPED: Sizes = {**TINY, "num_key_value_heads": 1, "head_dim": 16}
STACKS: Sizes = {
    **TINY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
}
PATCHES: Sizes = {**TINY, "image_size": 64, "patch_size": 16}
NETS_OF_TRANSFORMERS: Mapping[str, Sizes] = {
    "AlbertForMaskedLM": {**TINY, "embedding_size": 16},
    "BartForConditionalGeneration": STACKS,
    "BertForMaskedLM": TINY,
    "BloomForCausalLM": {**TINY, "n_layer": 2, "n_head": 2},
    "ConvBertForMaskedLM": {**TINY, "embedding_size": 16},
    "DistilBertForMaskedLM": {**TINY, "dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64},
    "ElectraForMaskedLM": {**TINY, "embedding_size": 16},
    "FNetForMaskedLM": TINY,
    "Gemma2ForCausalLM": GROUPED,
    "GPT2LMHeadModel": {**TINY, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64},
    "GPTNeoXForCausalLM": TINY,
    "LlamaForCausalLM": GROUPED,
    "MobileBertForMaskedLM": {**TINY, "embedding_size": 16, "intra_bottleneck_size": 16, "true_hidden_size": 16},
    "OPTForCausalLM": {**TINY, "ffn_dim": 64, "word_embed_proj_dim": 32},
    "PhiForCausalLM": TINY,
    "Qwen3ForCausalLM": GROUPED,
    "RobertaForMaskedLM": TINY,
    "T5ForConditionalGeneration": {
        **TINY,
        "d_model": 32,
        "d_kv": 16,
        "d_ff": 64,
        "num_layers": 2,
        "num_heads": 2,
        "decoder_start_token_id": 0,
    },
    "ViTForImageClassification": PATCHES,
    "BeitForImageClassification": PATCHES,
    "ResNetForImageClassification": {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1]},
    "SegformerForImageClassification": {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 24, 32]},
}
FROM_INFINITY = 3  # so many times a scale is halved, since other roundings overflow where eager does not
NETS: Mapping[str, Mapping[str, Sizes]] = {
    "torchvision": NETS_OF_TORCHVISION,
    "timm": NETS_OF_TIMM,
    "transformers": NETS_OF_TRANSFORMERS,
}
HELD_OUT = "held_out"  # its models at their full sizes, only where they are named
ALL_PRECISIONS = ("bfloat16 autocast", "float32", "float16 autocast", "bfloat16")  # the last is the whole net's
VARIANTS = (
    "",
    "contiguous",
    "cudnn.benchmark",
    "cudnn.benchmark contiguous",
    "no tf32",
    "eager's casts",
    "other images 1",
    "other images 2",
)


@dataclass(frozen=True, slots=True)
class Asked:
    """What is to be checked: the nets by `library:name`, where, and how many processes for how long."""

    nets: Sequence[str]
    precisions: Sequence[str]
    variants: Sequence[str]
    device: str
    out: Path
    jobs: int
    each_s: float
    max_s: float
    leaves: bool  # of passed graphs too

    @property
    def records(self) -> Path:
        """The file of one JSON line for each net, precision and variant."""
        return self.out / "training_nets.jsonl"


@dataclass(frozen=True, slots=True)
class Case:
    """One net in one precision, on a device."""

    net: str
    precision: str
    variant: str
    device: str


@dataclass(frozen=True, slots=True)
class Leaf:
    """One tensor: its size in float64, and the errors of eager and of default to it, all root mean squares."""

    name: str
    size: float
    eager: float
    default: float


@dataclass(slots=True)
class Graph:
    """The verdict on one graph, and its leaves if they are asked for or it was refused."""

    status: str = "pass"
    reason: str = ""
    reference: bool = True
    random: bool = False
    count: int = 0
    call_s: float = 0.0
    compile_s: float = 0.0
    leaves: list[Leaf] = field(default_factory=list)


def names() -> list[str]:
    """Return all nets."""
    return [f"{library}:{name}" for library, nets in NETS.items() for name in nets]


def chosen(given: Sequence[str], known: Sequence[str], what: str) -> Sequence[str]:
    """Return what is given, all that is known for ["all"]; raise for an unknown one."""
    for each in given:
        if each not in (*known, "all") and not each.startswith(f"{HELD_OUT}:"):
            raise unknown(what, each, known)
    return known if "all" in given else given


def measure(asked: Asked, say: Say) -> bool:
    """Check all that the records lack, each net in its own process, and write the page; return whether all is done."""
    asked.out.mkdir(parents=True, exist_ok=True)
    # Each process compiles alone: `jobs` of them are as many as the machine has room for.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // asked.jobs)))
    done, until = known(asked.records), time.monotonic() + asked.max_s
    triples = product(asked.precisions, asked.nets, asked.variants)
    every = [Case(net, precision, variant, asked.device) for precision, net, variant in triples]
    left = [case for case in every if case not in done or done[case]["status"] == "timeout"]
    say(f"{len(left)} of {len(every)} to check")

    def check(case: Case) -> Record | None:
        if time.monotonic() + asked.each_s / 4 > until:
            return None
        about = {"step_s": asked.each_s, "deadline": until, "preload": "benchmarks.execution.preload_models"}
        found = process.run(check_net, case, asked.leaves, **about)
        if found.out_of_time:
            return None
        record = {**asdict(case), "status": found.status, "reason": found.reason, "graphs": [], **(found.value or {})}
        say(f"{case.net} {case.precision} {case.variant}: {record['status']} {short(record['reason'], 160)}")
        return record

    with ThreadPoolExecutor(asked.jobs) as pool, asked.records.open("a") as file:
        for record in pool.map(check, left):
            if record is not None:
                file.write(json.dumps(record) + "\n")
                file.flush()
    write_page(asked.out)
    done = known(asked.records)
    return all(case in done and done[case]["status"] != "timeout" for case in every)


def known(file: Path) -> dict[Case, Record]:
    """Return the records of a file, the last of each case."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    made = [json.loads(line) for line in lines]
    return {Case(each["net"], each["precision"], each["variant"], each["device"]): each for each in made}


# ---- one net, in its own process


def check_net(tell: Say, case: Case, leaves: bool) -> Record:
    """Return the verdict on each graph of one net's training step."""
    tell(case.net)
    model, inputs = built(case)
    if case.variant.startswith("other images"):
        inputs = fresh_inputs(inputs, int(case.variant.split()[-1]))
    options = {"emulate_precision_casts": True} if case.variant == "eager's casts" else {}
    amp: Any = nullcontext()
    if case.precision.endswith(" autocast"):
        amp = torch.autocast(case.device, getattr(torch, case.precision.split()[0]))
    step = _step_of(model, inputs, amp) if case.precision.startswith("float16") else model
    graphs: list[Graph] = []
    cudnn = torch.backends.cudnn.flags(
        enabled=True, benchmark="cudnn.benchmark" in case.variant, allow_tf32=case.variant != "no tf32"
    )
    with cudnn, amp:
        torch.compile(step, backend=partial(_check_graph, graphs, leaves, options))(*inputs)
    bad = next((graph for graph in graphs if graph.status != "pass"), Graph())
    return {"status": bad.status, "reason": bad.reason, "graphs": [asdict(graph) for graph in graphs]}


def built(case: Case) -> tuple[Any, tuple[Any, ...]]:
    """Return a net that returns its loss in training, and its inputs."""
    library, name = case.net.split(":")
    torch.manual_seed(0)
    dtype = torch.bfloat16 if case.precision == "bfloat16" else torch.float32
    if library == HELD_OUT:
        scale: Literal["full", "tiny"] = "full" if case.device == "cuda" else "tiny"
        model, inputs = BY_NAME[name].build(torch.device(case.device), dtype, scale)
        if "contiguous" in case.variant:
            model = model.to(memory_format=torch.contiguous_format)
            inputs = tuple(each.contiguous() for each in inputs)
        return model, inputs
    given = dict(NETS[library][name])
    with torch.device(case.device):
        model, inputs = (_of_transformers if library == "transformers" else _of_images)(library, name, given)
    model = model.to(dtype).train()
    return model, tuple(each.to(dtype) if each.is_floating_point() else each for each in inputs)


def _of_images(library: str, name: str, given: dict[str, Any]) -> tuple[Any, tuple[Any, ...]]:
    batch, image = given.pop("batch", BATCH), given.pop("image", IMAGE)
    if library == "timm":
        model = imported("timm").create_model(name, pretrained=False, num_classes=10, **given)
    else:
        given |= {"image_size": image} if name == "vit_b_16" else {}
        model = getattr(imported("torchvision").models, name)(num_classes=10, **given)
    return _loss_of(model), (torch.randn(batch, 3, image, image), torch.randint(10, (batch,)))


def _of_transformers(library: str, name: str, given: dict[str, Any]) -> tuple[Any, tuple[Any, ...]]:
    made_by = getattr(imported(library), name)
    if name.endswith("ForImageClassification"):
        model = made_by(made_by.config_class(**given, num_labels=10))
        images = torch.randn(BATCH, 3, IMAGE, IMAGE), torch.randint(10, (BATCH,))
        return Called(model, ("pixel_values", "labels"), "loss"), images
    model = made_by(made_by.config_class(**given))
    ids = [torch.randint(1, given["vocab_size"], (BATCH, TOKENS)) for _ in range(2)]
    return Called(model, ("input_ids", "labels"), "loss"), tuple(ids)


def _loss_of(model: Any) -> Any:
    """Return a net that returns the sum of the losses of all its heads."""

    class Loss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, images: Any, labels: Any) -> Any:
            made = self.model(images)
            heads = [made] if isinstance(made, torch.Tensor) else [each for each in made if each is not None]
            return sum(torch.nn.functional.cross_entropy(each, labels) for each in heads)

    return Loss()


def _step_of(model: Any, inputs: Sequence[Any], amp: Any) -> Callable[..., Any]:
    """Return the net's loss, scaled as by a GradScaler, by 2**16 or less, some way from where eager overflows."""
    for power in range(16, -1, -1):
        trial = copy.deepcopy(model)
        with amp:
            loss = trial(*inputs) * 2.0**power
        loss.backward()
        if all(bool(each.grad.isfinite().all()) for each in trial.parameters() if each.grad is not None):
            break
    scale = 2.0 ** max(0, power - FROM_INFINITY)

    def step(*args: torch.Tensor) -> Any:
        return model(*args) * scale

    return step


def _check_graph(graphs: list[Graph], leaves: bool, options: Sizes, gm: Any, inputs: Sequence[Any]) -> Any:
    """Check a graph as a race checks default; run it in eager."""
    with sandboxed(gm, collects=False) as sandbox:
        graphs.append(_checked(gm, inputs, leaves, options, sandbox))
    return gm.forward


def _checked(gm: Any, inputs: Sequence[Any], leaves: bool, options: Sizes, sandbox: Sandbox) -> Graph:
    task = Task.of(copy_of_graph(gm), inputs, sandbox.begin)
    sandbox.keep_generators(task)
    eager = task.observe(task.copy())
    random, began = task.has_drawn(), time.perf_counter()
    again_seen = task.observe(task.copy())
    call_s = time.perf_counter() - began
    device = next((each.device for each in inputs if isinstance(each, torch.Tensor)), torch.device("cpu"))
    checks = ResultChecks(task, random, device, Budget(inf, began, call_s), None, eager)
    if not (again := checks.of_eager(again_seen)).passed:
        return Graph("eager_two_runs_differ", again.reason, reference=False, random=random, call_s=call_s)
    checks.compute_reference()
    began = time.perf_counter()
    drawing = {"fallback_random": True} if random else {}
    seen = task.observe(make_backend("tmpl-inductor", {**options, **drawing})(task.copy(), inputs))
    verdict = checks.of_results(seen)
    found = Graph(verdict.status, verdict.reason, checks.reference is not None, random, len(verdict.leaves), call_s)
    found.compile_s = time.perf_counter() - began
    if leaves or not verdict.passed:
        found.leaves = [*_leaves(seen, eager, checks.reference or eager)]
    return found


def _leaves(seen: Any, eager: Any, precise: Any) -> Iterator[Leaf]:
    for what in eager:
        got, truth = (dict(walk(what, tree[what])) for tree in (seen, precise))
        for path, value in walk(what, eager[what]):
            if is_number(value):
                exact = wide(truth[path])
                errors = (root_mean_square(wide(each) - exact) for each in (value, got[path]))
                yield Leaf(path, root_mean_square(exact), *errors)


# ---- the page


def write_page(out: Path) -> None:
    """Write the table of the records in a folder."""
    records = known(out / "training_nets.jsonl")
    if not records:
        raise BackendKwargsError(f"{out} has no records: run the study first.")
    write_whole(out / "training_nets.md", page(records) + "\n")


def page(records: Mapping[Case, Record]) -> str:
    """Return a table of verdicts, and the leaves of what was refused."""
    precisions = list(dict.fromkeys(f"{case.precision} {case.variant}".strip() for case in records))
    nets: dict[str, dict[str, str]] = {}
    for case, record in records.items():
        cell = record["status"] if record["status"] != "pass" else f"pass ({_leaves_of(record)})"
        nets.setdefault(f"{case.net}, {case.device}", {})[f"{case.precision} {case.variant}".strip()] = cell
    rows = [[net, *(cells.get(each, "") for each in precisions)] for net, cells in sorted(nets.items())]
    passed = sum(record["status"] == "pass" for record in records.values())
    lines = [f"{passed} of {len(records)} passed. In parentheses: the tensors compared.", ""]
    lines += table(["net", *precisions], rows)
    for case, record in records.items():
        if record["status"] != "pass":
            lines += ["", *_refused(case, record)]
    return "\n".join(lines)


def _leaves_of(record: Record) -> int:
    return sum(graph["count"] for graph in record["graphs"])


def _refused(case: Case, record: Record) -> Iterator[str]:
    where = " ".join(filter(None, (case.precision, case.variant, case.device)))
    yield f"**{case.net}, {where}**: {short(record['reason'], 300)}"
    for graph in record["graphs"]:
        if graph["leaves"] and graph["status"] != "pass":
            worst = sorted(graph["leaves"], key=lambda leaf: leaf["default"] / (leaf["eager"] or 1e-300), reverse=True)
            figures = (
                [leaf["name"], *(f"{leaf[key]:.2g}" for key in ("size", "eager", "default"))] for leaf in worst[:8]
            )
            yield ""
            yield from table(["leaf", "size in float64", "eager's error", "default's error"], figures)

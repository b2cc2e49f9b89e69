"""Train a small model over two ranks, compiled and in eager, and say how they differ.

    python tests/frameworks/two_ranks.py --device cuda                 every parallelism under a template and auto
    python tests/frameworks/two_ranks.py --device cpu --only ddp:auto

Two processes are started, on two GPUs with NCCL or on the CPU with gloo. A line of JSON is printed for each case; the
exit status is 1 if a loss, a gradient or a checkpoint differs from eager's.
"""

import argparse
import copy
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import backend_kwargs as bk

STEPS = 2
BUCKET_MB = {"cpu": 1, "cuda": 16}
TEMPLATES = {"template": "tmpl-inductor:aten", "auto": "tmpl-inductor:auto"}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def model_of(width: int, depth: int, device: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(depth))).to(device)


# ---- each parallelism: the model, sharded or replicated, then compiled if there is a backend


def ddp(model: nn.Module, device: str, backend: Any) -> nn.Module:
    """Replicate with several buckets, at whose boundaries dynamo cuts the graph."""
    from torch.nn.parallel import DistributedDataParallel

    wrapped = DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB[device.partition(":")[0]])
    return torch.compile(wrapped, backend=backend) if backend else wrapped


def fsdp2(model: nn.Module, device: str, backend: Any) -> nn.Module:
    """Compile each block, then shard it."""
    from torch.distributed.fsdp import fully_shard

    for block in model:
        if backend:
            block.compile(backend=backend)
        fully_shard(block)
    return fully_shard(model)


def tensor_parallel(model: nn.Module, device: str, backend: Any) -> nn.Module:
    """Split each block's two products over the ranks; the graph contains the collective between them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh(device.partition(":")[0], (dist.get_world_size(),))
    for block in model:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return torch.compile(model, backend=backend) if backend else model


PARALLEL: dict[str, Callable[[nn.Module, str, Any], nn.Module]] = {"ddp": ddp, "fsdp2": fsdp2, "tp": tensor_parallel}


# ---- one case


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a parameter or gradient, gathered if it is sharded."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def trained(model: nn.Module, xs: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the loss of each step, and the gradients of the last."""
    optimizer = torch.optim.SGD(
        model.parameters(), 0.05, foreach=False
    )  # tensor parallelism mixes DTensors with tensors
    losses = []
    for x in xs:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, [whole(parameter.grad).clone() for parameter in model.parameters()]


def largest(pairs: Any) -> float:
    """Return the largest difference, relative to the largest value of its tensor."""
    return max(((a - b).abs().max() / b.abs().max().clamp_min(1e-12)).item() for a, b in pairs)


def loads_uncompiled(model: nn.Module, plain: nn.Module, x: torch.Tensor) -> float:
    """Load a full checkpoint of `model` into an uncompiled model; return the largest difference of their outputs."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=False))
    with torch.no_grad():
        expected = model(x)
        if dist.get_rank():  # only rank 0 has the full state dict of a sharded model
            return 0.0
        plain.load_state_dict(state)
        return largest([(plain(x), expected)])


def case(kind: str, which: str, device: str, sizes: dict[str, int], options: dict[str, Any]) -> dict[str, Any]:
    """Train in eager and compiled from the same weights on the same inputs; return how they differ."""
    torch._dynamo.reset()
    model = model_of(sizes["width"], sizes["depth"], device)
    reference, plain = copy.deepcopy(model), copy.deepcopy(model)
    # Each rank has different data, except in tensor parallelism, where all ranks work on the same.
    torch.manual_seed(1 if kind == "tp" else 1 + dist.get_rank())
    xs = [torch.randn(sizes["rows"], sizes["width"], device=device) for _ in range(STEPS)]
    backend = bk.make_backend(TEMPLATES[which], options if which == "auto" else {})
    expected = trained(PARALLEL[kind](reference, device, None), xs)
    began = time.time()
    compiled = PARALLEL[kind](model, device, backend)
    got = trained(compiled, xs)
    seconds = time.time() - began
    from backend_kwargs.compile_records import records

    found = [record for record in records() if record.spec == TEMPLATES[which] and record.at > began * 1e6]
    return {
        "case": f"{kind}:{which}",
        "loss": largest(zip(got[0], expected[0], strict=True)),
        "gradients": largest(zip(got[1], expected[1], strict=True)),
        "checkpoint": loads_uncompiled(compiled, plain, xs[0]),
        "graphs": len(found),
        "decided": [
            f"{each.facts.decision.winner} for {each.facts.decision.facts}" for each in found if each.facts.decision
        ],
        "seconds": round(seconds, 1),
    }


def rank(at: int, given: argparse.Namespace, folder: str) -> None:
    """Run the cases as one of two ranks; rank 0 prints them."""
    os.environ["BACKEND_KWARGS_STORE"] = f"{folder}/decisions-{at}"
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/cache"
    on_gpu = given.device == "cuda"
    device = f"cuda:{at}" if on_gpu else "cpu"
    if on_gpu:
        torch.cuda.set_device(at)
        torch.backends.cuda.matmul.fp32_precision = "ieee"
        sizes = {"width": 1024, "depth": 3, "rows": 2048}
    else:
        torch.set_num_threads(1)
        sizes = {"width": 256, "depth": 2, "rows": 8}
    group = "nccl" if on_gpu else "gloo"
    dist.init_process_group(group, init_method=f"file://{folder}/init", rank=at, world_size=2)
    wrong = 0
    for name in given.only or [f"{kind}:{which}" for kind in PARALLEL for which in TEMPLATES]:
        kind, _, which = name.partition(":")
        found = case(kind, which, device, sizes, {"budget_s": given.budget_s})
        bad = max(found["loss"], found["gradients"], found["checkpoint"]) > given.tolerance
        wrong += bad
        if at == 0:
            print(json.dumps(found | {"right": not bad}), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(bool(wrong))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", nargs="*", metavar="KIND:WHICH", help="such as ddp:auto; all where none is given")
    parser.add_argument("--budget_s", type=float, default=5.0, help="of each graph's race")
    parser.add_argument("--tolerance", type=float, default=1e-3, help="relative to the largest value of a tensor")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        context = torch.multiprocessing.get_context("fork")  # this process has imported torch, and done nothing
        ranks = [context.Process(target=rank, args=(at, given, folder)) for at in range(2)]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join()
    sys.exit(any(each.exitcode for each in ranks))


if __name__ == "__main__":
    main()

"""One rank of a group that shares a race: `shared_race_of_a_rank.py CASE RANK WORLD FILE`. It prints what it saw.

Every candidate is timed for real. Which one is better is decided by its name, since timings on shared cores are noise:
default beats eager, and what starts with "quick" beats what came before.
"""

import json
import logging
import math
import os
import signal
import sys
import time

import torch
import torch.distributed as dist

import backend_kwargs
from backend_kwargs.auto import decide, helping, race, ranks, shared_race

CASE, RANK, WORLD, FILE = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
CODES = {"slow": {"nan_asserts": True}, "quick": {"size_asserts": False}, "slower": {"scalar_asserts": False}}


def better(challenger, champion, objective):
    return challenger.candidate.name.startswith(("default", "quick"))


def chain(x):
    return torch.relu(x * 2 + 1).sum(-1)


def other(x):
    return x.cos().exp()


def main():
    os.environ["BACKEND_KWARGS_STORE"] = f"{FILE}-{RANK}"
    ranks.BEAT_S, shared_race.GONE_S, shared_race.LATE = 0.1, 5.0 if CASE == "killed" else 600.0, 1000.0
    race.better = better
    for name, options in CODES.items():
        backend_kwargs.register_template(name, options)
    gpu = CASE == "GPUs"
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("backend_kwargs.auto").setLevel(logging.INFO)
    if gpu:
        torch.cuda.set_device(RANK)
    dist.init_process_group("nccl" if gpu else "gloo", init_method=f"file://{FILE}", rank=RANK, world_size=WORLD)
    words = ranks._process_group_store()
    _arrange(words)
    told = []
    tell, decide.tell = decide.tell, lambda decision: told.append(decision) or tell(decision)
    options = {"budget_s": math.inf, "process_budget_s": math.inf}
    if not gpu:  # on GPUs of their own it is the default
        options["share_race"] = True
    backend = backend_kwargs.make_backend("tmpl-inductor:auto", candidates=[*CODES], **options)
    fn = other if CASE == "another graph" and RANK == 1 else chain
    torch.compile(fn, backend=backend)(torch.randn(8, 64, device="cuda" if gpu else "cpu"))
    rows = [(row.name, row.status, row.rank, row.seconds is not None) for row in told[-1].rows]
    seen = {"winner": told[-1].winner, "rows": rows, "facts": told[-1].facts, "options": dict(told[-1].options)}
    if gpu:
        dist.barrier(device_ids=[RANK])
    sys.stdout.write(f"\n{json.dumps(seen)}\n")  # NCCL may have begun a line
    sys.stdout.flush()
    if CASE == "killed":
        os._exit(0)
    if not gpu:
        dist.barrier()
    dist.destroy_process_group()


def _arrange(words):
    """Let rank 0 race, and let every rank go on once each other one has taken a candidate."""

    def take_turns():
        while CASE != "another graph" and words.add("took", 0) < min(WORLD - 1, len(CODES)):
            time.sleep(0.05)

    if RANK:
        words.wait(["racing"])
        raced = helping._raced

        def one(*given):
            words.add("took", 1)
            if RANK == 1 and CASE == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if RANK == 1 and CASE == "raises":
                raise RuntimeError("planted")
            take_turns()
            return raced(*given)

        helping._raced = one
        return
    offer = shared_race.Exchange.offer

    def offered(self, given):
        offer(self, given)
        take_turns()

    shared_race.Exchange.offer = offered
    opening = race.race

    def racing(request, tick):
        words.set("racing", "yes")
        return opening(request, tick)

    race.race = racing


main()

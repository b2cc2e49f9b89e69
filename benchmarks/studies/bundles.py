"""First calls from a bundle, compared with the compile that made it: built in one process, served in a fresh one.

The serving process has empty cache folders, compilers that exit with 1 first on PATH and in CC and CXX, and every
start of a process is logged.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from backend_kwargs.files import write_whole

STARTS = ("subprocess.Popen", "os.posix_spawn", "os.fork", "os.forkpty", "os.exec", "os.system")
COMPILERS = ("g++", "gcc", "c++", "cc", "clang", "clang++", "nvcc", "ptxas")
CASES = {
    "cuda": (
        ("bert", None),
        ("bert", "reduce-overhead"),
        ("llama", None),
        ("vit", None),
    ),
    "cpu": tuple((model, None) for model in ("bert", "llama", "vit")),
}
# Layers and widths, larger for a GPU.
SIZES = {"cuda": (4, 768), "cpu": (4, 256)}


def made(model: str, device: str) -> tuple[Any, tuple[Any, ...]]:
    """Return a transformers model with random weights, and its inputs."""
    import torch
    import transformers

    torch.manual_seed(0)
    layers, width = SIZES[device]
    shape = {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": 4,
        "intermediate_size": 2 * width,
    }
    kinds = {"bert": "Bert", "llama": "Llama", "vit": "ViT"}
    extra = {"llama": {"vocab_size": 2000, "use_cache": False}, "vit": {"image_size": 64}}.get(model, {})
    config = getattr(transformers, f"{kinds[model]}Config")(**shape, **extra, return_dict=False)
    dtype = torch.float16 if device == "cuda" else torch.float32
    net = getattr(transformers, f"{kinds[model]}Model")(config).eval().to(device, dtype)
    if model == "vit":
        return net, (torch.randn(2, 3, 64, 64, device=device, dtype=dtype),)
    return net, (torch.randint(1000, (2, 64), device=device),)


def build(model: str, mode: str | None, device: str, bundle: Path) -> dict[str, Any]:
    """Compile, save, and return the seconds of both."""
    import backend_kwargs as bk

    net, args = made(model, device)
    began = time.perf_counter()
    compiled = bk.CompiledModule(bk.CompileConfig(mode=mode, fullgraph=True)).build(net, [args])
    built = time.perf_counter()
    compiled.save(bundle)
    manifest = json.loads((bundle / "manifest.json").read_text())
    size = sum(file.stat().st_size for file in (bundle / "parts").iterdir()) - manifest["weights"]["size"]
    return {"cold_s": manifest["cold_s"], "build_s": built - began, "code_bytes": size, "says": compiled.describe()}


def serve(model: str, device: str, bundle: Path) -> dict[str, Any]:
    """Load, deploy, call once, compare with eager, and return the seconds and the processes started."""
    started: list[str] = []
    sys.addaudithook(lambda event, args: started.append(f"{event} {args[:2]}"[:200]) if event in STARTS else None)
    import torch

    import backend_kwargs as bk
    from backend_kwargs.bundles.running import import_compiler
    from backend_kwargs.trial import check, interleave, median_interval, reference, synchronize

    net, args = made(model, device)
    on = torch.device(device)
    import_compiler()
    if device == "cuda":
        torch.zeros(1, device=on)
        synchronize(on)
    before, began = len(started), time.perf_counter()
    loaded = bk.CompiledModule.load(bundle, net, trust=True)
    loaded.deploy(None)
    result = loaded(*args)
    synchronize(on)
    first_s = time.perf_counter() - began
    starts = started[before:]
    with torch.no_grad():
        verdict = check(loaded(*args), net(*args), reference(net, args))
    samples = interleave({"call": lambda: loaded(*args)}, rounds=20, device=on)["call"]
    call = median_interval(samples).median
    return {
        "first_s": first_s,
        "starts": starts,
        "accuracy": verdict.status,
        "call_us": call * 1e6,
        "says": loaded.describe(),
        "outputs": len(result),
    }


def barren(folder: Path) -> dict[str, str]:
    """Return the environment of a machine that cannot compile and has empty caches."""
    programs = folder / "bin"
    programs.mkdir(parents=True)
    for name in COMPILERS:
        (programs / name).write_text("#!/bin/sh\nexit 1\n")
        (programs / name).chmod(0o755)
    return {
        **{name: value for name, value in os.environ.items() if name != "TRITON_CACHE_DIR"},
        "PATH": f"{programs}:{os.environ['PATH']}",
        "CXX": str(programs / "g++"),
        "CC": str(programs / "gcc"),
        "HOME": str(folder),  # Triton's cache is below it
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
    }


def worked(arguments: list[str], environment: dict[str, str]) -> dict[str, Any]:
    """Return the JSON that a process of this module printed last, or its error."""
    command = [sys.executable, "-m", "benchmarks.studies.bundles", *arguments]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if ran.returncode:
        return {"error": ran.stderr[-2000:]}
    return json.loads(ran.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def measure_bundles(device: str, only: Sequence[str], out: Path | None) -> None:
    """Run the device's cases, print a line for each when it is done, and write all figures to the file `out`.

    `only` names models; empty for all.
    """
    rows = []
    columns = f"{'model':6} {'mode':16} {'cold s':>8} {'first s':>8} {'ratio':>7}"
    print(f"{columns}  starts accuracy", flush=True)
    for model, mode in CASES[device]:
        if only and model not in only:
            continue
        row: dict[str, Any] = {"model": model, "mode": mode, **_measured(device, model, mode)}
        rows.append(row)
        if out:
            write_whole(out, json.dumps(rows, indent=1) + "\n")
        print(f"{model:6} {mode or '':16} {_line(row)}", flush=True)
    print("seconds are wall time; both processes had torch's compiler imported before")


def _measured(device: str, model: str, mode: str | None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        case = [device, model, mode or "-", str(folder / "bundle")]
        built = worked(["build", *case], {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder / "cold")})
        if "error" in built:
            return {"built": built}
        return {"built": built, "served": worked(["serve", *case], barren(folder / "barren"))}


def _line(row: dict[str, Any]) -> str:
    built, served = row["built"], row.get("served", {})
    if error := built.get("error") or served.get("error"):
        return f"failed: {error}"
    ratio = served["first_s"] / built["cold_s"]
    figures = f"{built['cold_s']:8.2f} {served['first_s']:8.2f} {ratio:7.3f}  {len(served['starts']):6}"
    return "\n    ".join([f"{figures} {served['accuracy']}", *served["starts"]])


def main(step: str, device: str, model: str, mode: str, bundle: str) -> None:
    """Run one step of one case in this process, and print its cost as JSON."""
    path = Path(bundle)
    if step == "build":
        print(json.dumps(build(model, None if mode == "-" else mode, device, path)))
    else:
        print(json.dumps(serve(model, device, path)))


if __name__ == "__main__":
    main(*sys.argv[1:])

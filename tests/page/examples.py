"""Documents for the tests: one with all parts, and figures like those of an H200; one of a real `compare` on a CPU."""

from pathlib import Path

from backend_kwargs.interval import Interval
from backend_kwargs.page import parse, tradeoffs_of
from backend_kwargs.page.document import (
    Cause,
    Change,
    Changes,
    Document,
    Graph,
    Kernel,
    Lane,
    Lead,
    Option,
    Race,
    Result,
    Rewrite,
    Row,
    Source,
    Span,
    Speedup,
    Speedups,
    Verdict,
    Warned,
)

ENVIRONMENT = {
    "device_name": "NVIDIA H200",
    "torch": "2.13.0+cu130",
    "cuda": "13.0",
    "triton": "3.7.0",
    "python": "3.12.11",
    "threads": 16,
    "mode": "inference",
    "dtype": "torch.bfloat16",
    "rounds": 30,
}
WINNER = "tmpl-inductor:max_autotune+freezing"
TORCH_BEST = "inductor, mode max-autotune"


def interval(median, spread=0.02):
    return Interval(median, median * (1 - spread), median * (1 + spread))


def row(name, speedup=None, ms=None, compile_s=None, mib=None, error=None, spread=0.02, **more):
    return Row(
        name,
        speedup=speedup and interval(speedup, spread),
        latency=ms and interval(ms / 1e3, spread / 2),
        compile_s=compile_s,
        peak_bytes=mib and int(mib * 2**20),
        error=error,
        bound=error and 1e-2,
        **more,
    )


def speedups(title=""):
    rows = (
        row("eager", 1.0, 8.42, None, 612, 2.1e-3, note="baseline"),
        row("inductor", 1.71, 4.92, 21.4, 540, 2.3e-3, graphs=1),
        row(TORCH_BEST, 1.94, 4.34, 148.0, 566, 2.3e-3, graphs=1),
        row("tmpl-inductor:freezing", 1.78, 4.73, 30.2, 498, 2.2e-3, spread=0.03),
        row("tmpl-inductor:cudagraphs", 1.88, 4.48, 24.9, 771, 2.3e-3),
        row(WINNER, 2.31, 3.65, 171.5, 505, 2.4e-3, won=True),
        row("tmpl-inductor[precision=bf16]", 1.01, 8.33, 19.0, 410, 4.9e-3, note="within noise"),
        row("tmpl-tvm", None, None, 312.0, status="fail_accuracy", reason="output[0]: RMSE 0.41, at most 0.01 allowed"),
        row("tmpl-inductor:cutlass", status="unavailable", reason="CUTLASS sources are not importable"),
    )
    return Speedups(title, "eager", Interval(1.0, 0.985, 1.016), rows)


def race(graph="graph 0/0"):
    lanes = (
        Lane("eager", spans=(Span("time", 0, 1.1),), seconds=8.4e-3),
        lane("default", 1.1, 22.5, 4.92e-3, 1.71, "eager"),
        lane("freezing", 24.8, 31.0, 4.73e-3, 1.04, "default"),
        lane("max_autotune", 57.0, 92.0, 3.9e-3, 1.21, "freezing"),
        lane("max_autotune+freezing", 150.2, 64.0, 3.65e-3, 1.07, "max_autotune", won=True),
        Lane("cutlass", "unavailable", "CUTLASS sources are not importable"),
        Lane("coordinate_descent", "skipped", "predicted 140 s to compile, and 25 s were left", predicted_s=140.0),
    )
    leads = (
        Lead("eager", 0.0),
        Lead("default", 24.6),
        Lead("max_autotune", 149.9),
        Lead("max_autotune+freezing", 215.5),
    )
    return Race(graph, "max_autotune+freezing", 215.9, 240.0, lanes=lanes, leads=leads)


def lane(name, start, compile_s, seconds, speedup, against, *, won=False):
    spans = (
        Span("compile", start, start + compile_s),
        Span("check", start + compile_s, start + compile_s + 0.5),
        Span("time", start + compile_s + 0.5, start + compile_s + 1.3),
    )
    return Lane(name, spans=spans, seconds=seconds, speedup=interval(speedup), against=against, won=won, error=2.3e-3)


def graph(name="graph 0/0", kernels=20):
    return Graph(
        name,
        function="forward",
        backend="tmpl-inductor:auto",
        winner="max_autotune+freezing",
        seconds=171.5,
        cache="cold",
        options=(
            Option("max_autotune", "True", "False", "auto"),
            Option("freezing", "True", "False", "auto"),
            Option("triton.cudagraphs", "True", "False", "template max_autotune"),
            Option("epilogue_fusion", "True", "True", "user"),
        ),
        rewrites=(Rewrite("packed", 12, "12.5 MiB of packed weights"), Rewrite("rms_norm", 25)),
        kernels=tuple(
            Kernel(f"triton_red_fused_add_mul_native_layer_norm_{n}", "Triton", 4e-4 / (n + 1), 12)
            for n in range(kernels)
        ),
        causes=(
            Cause(
                "break",
                "Unsupported: data-dependent branch",
                "use torch.cond",
                Source("…/examples/decoder.py:41", 41),
            ),
            Cause(
                "recompile",
                "tensor 'x' size mismatch at index 0. expected 8, actual 16",
                "torch.compile(..., dynamic=True)",
            ),
        ),
        notes=("CUDA graphs recorded twice.",),
    )


def document(graphs=1):
    compared = speedups()
    return Document(
        "Decoder block, 8 sequences of 512 tokens",
        subtitle="inference on NVIDIA H200, torch 2.13.0+cu130",
        made="2026-11-26T08:00:00Z",
        by="backend-kwargs 0.1.0",
        environment=ENVIRONMENT,
        verdict=Verdict(
            WINNER,
            speedups=(Speedup(f"the best torch mode ({TORCH_BEST})", interval(1.19)), Speedup("eager", interval(2.31))),
            latency=interval(3.65e-3),
            error=2.4e-3,
            error_bound=1e-2,
            compile_s=171.5,
            pays_back_calls=34_058,
            pays_back_over=TORCH_BEST,
            peak_bytes=505 << 20,
            other_peak_bytes=612 << 20,
            other_peak_of="eager",
            paste='torch.compile(model, backend="tmpl-inductor:max_autotune+freezing")',
        ),
        warnings=(
            Warned("The baseline against itself differed by 1.6 %: changes below that are noise.", "noise"),
            Warned("The race was cut by its budget of 240 s: coordinate_descent was not tried.", "cut", "graph 0/0"),
            Warned("The graph ended early at decoder.py:41.", "break", "graph 0/0"),
        ),
        speedups=(compared,),
        races=tuple(race(f"graph {n}/0") for n in range(graphs)),
        tradeoffs=tradeoffs_of(compared),
        graphs=tuple(graph(f"graph {n}/0") for n in range(graphs)),
        accuracy=(
            Result("output[0]", error=2.4e-3, bound=1e-2),
            Result("gradient of up.weight", "gradient", error=7.1e-3, bound=1e-2),
            Result(
                "gradient of down.weight",
                "gradient",
                error=3.1e-2,
                bound=1e-2,
                passed=False,
                reason="RMSE to the reference 0.031, at most 0.01 allowed",
            ),
            Result("buffer running_mean", "buffer", error=1.2e-5, bound=1e-2),
        ),
        changes=Changes(
            "Decoder block",
            "2026-10-02T08:00:00Z",
            6,
            ("torch was 2.12.0, and is 2.13.0",),
            (
                Change("winner", "the winner", old="tmpl-inductor:max_autotune", new=WINNER),
                Change("faster", WINNER, before=interval(2.02), after=interval(2.31)),
                Change("slower", "tmpl-inductor:cudagraphs", before=interval(2.05), after=interval(1.88)),
                Change("new", "tmpl-inductor[precision=bf16]", after=interval(1.01)),
                Change("lost", "tmpl-inductor:triton", before=interval(1.4)),
            ),
        ),
        notes=("Compile seconds are the first call, with an empty Inductor cache for each candidate.",),
    )


def compared():
    """A `compare` of two linear layers on a busy CPU: eager, Inductor, two templates, and a backend that fails."""
    return parse((Path(__file__).parent / "compared.json").read_bytes())

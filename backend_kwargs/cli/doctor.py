"""`backend-kwargs doctor`: what this machine has, and which templates, backends and precisions work with it."""

from dataclasses import asdict

from backend_kwargs.cli.arguments import AsJson, judged
from backend_kwargs.cli.console import print_json, print_table
from backend_kwargs.explain import precision_verdict
from backend_kwargs.options.precisions import PRECISIONS
from backend_kwargs.options.requirements import machine
from backend_kwargs.registry import PLAIN, list_templates

TVM = "tmpl-tvm"
OTHERS = ("tmpl-onnxruntime", "tmpl-openvino-native", "tmpl-openvino", "tmpl-tensorrt")


def show(json: AsJson = False) -> None:
    """Show what this machine has, what works on it (templates, backends, precisions), and how to make the rest work."""
    facts, templates = machine().facts(), {name: judged(f"{PLAIN}:{name}")[0] for name in list_templates()}
    backends = {TVM: judged(TVM)[0], f"{TVM}[target=cuda]": judged(TVM, target="cuda")[0]}
    backends |= {name: judged(name)[0] for name in OTHERS}
    precisions = {name: precision_verdict(name, machine()) for name in PRECISIONS}
    if json:
        judged_here = {"templates": templates, "backends": backends, "precisions": precisions}
        data = {kind: {name: asdict(v) for name, v in verdicts.items()} for kind, verdicts in judged_here.items()}
        return print_json({"machine": facts, **data})
    print_table(("part", "found"), facts.items(), "machine")
    for title, verdicts in (
        (f"templates, as {PLAIN}:NAME", templates),
        ("other backends", backends),
        ("precisions, as precision=NAME", precisions),
    ):
        rows = [(name, v.word, v.reason, v.remedy) for name, v in verdicts.items()]
        print_table(("name", "verdict", "because", "to change it"), rows, title)

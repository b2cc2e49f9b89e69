"""`backend-kwargs doctor`: what this machine has, and what each template and backend can do with it."""

from collections.abc import Mapping
from dataclasses import asdict

from backend_kwargs.cli.arguments import AsJson, judged
from backend_kwargs.cli.console import print_json, print_table
from backend_kwargs.explain import Verdict
from backend_kwargs.registry import PLAIN, list_templates
from backend_kwargs.requirements import machine

TVM = "tmpl-tvm"
OTHERS = ("tmpl-onnxruntime", "tmpl-openvino-native", "tmpl-openvino", "tmpl-tensorrt")


def show(json: AsJson = False) -> None:
    """Show what this machine has, which templates and backends work on it, and how to make the others work."""
    facts, templates = machine().facts(), {name: judged(f"{PLAIN}:{name}")[0] for name in list_templates()}
    backends = {TVM: judged(TVM)[0], f"{TVM}[target=cuda]": judged(TVM, target="cuda")[0]}
    backends |= {name: judged(name)[0] for name in OTHERS}
    if json:
        return print_json({"machine": facts, "templates": _data(templates), "backends": _data(backends)})
    print_table(("part", "found"), facts.items(), "machine")
    for title, verdicts in ((f"templates, as {PLAIN}:NAME", templates), ("other backends", backends)):
        rows = [(name, v.word, v.reason, v.remedy) for name, v in verdicts.items()]
        print_table(("name", "verdict", "because", "to change it"), rows, title)


def _data(verdicts: Mapping[str, Verdict]) -> dict[str, dict[str, str]]:
    return {name: asdict(verdict) for name, verdict in verdicts.items()}

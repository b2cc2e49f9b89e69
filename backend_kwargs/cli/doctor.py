"""`backend-kwargs doctor`: what this machine has, and what each template can do with it."""

from dataclasses import asdict

from backend_kwargs.cli.arguments import AsJson, judged
from backend_kwargs.cli.console import print_json, print_table
from backend_kwargs.registry import PLAIN, list_templates
from backend_kwargs.requirements import machine


def show(json: AsJson = False) -> None:
    """Say what this machine has, which templates work on it, and what would make the others work."""
    facts, verdicts = machine().facts(), {name: judged(f"{PLAIN}:{name}")[0] for name in list_templates()}
    if json:
        return print_json({"machine": facts, "templates": {name: asdict(v) for name, v in verdicts.items()}})
    print_table(("part", "found"), facts.items(), "machine")
    rows = [(name, v.word, v.reason, v.remedy) for name, v in verdicts.items()]
    print_table(("name", "verdict", "because", "to change it"), rows, f"templates, as {PLAIN}:NAME")

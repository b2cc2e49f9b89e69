"""`backend-kwargs doctor`: what this machine has, and which templates, backends and precisions work with it."""

from dataclasses import asdict

from backend_kwargs.backends.others import COMPILERS
from backend_kwargs.cli.console import AsJson, judged, judged_by_name, options_alone, print_json, print_table, say
from backend_kwargs.explain import Verdict, precision_verdict
from backend_kwargs.options import DYNAMO_BACKENDS, join_candidate, limits
from backend_kwargs.options.machine import machine
from backend_kwargs.options.precisions import PRECISIONS
from backend_kwargs.registry import PLAIN, list_templates


@options_alone()
def show(json: AsJson = False) -> None:
    """Show what this machine has, what works on it, how to make the rest work, and whether it is ready to compile."""
    facts = machine().facts() | {each.library: each(each.registered).installed() for each in COMPILERS}
    templates = {name: judged(f"{PLAIN}:{name}")[0] for name in list_templates()}
    backends = {
        join_candidate(each.registered, options): judged(each.registered, **options)[0]
        for each in COMPILERS
        for options in each.variants
    }
    backends |= {f"dynamo:{name}": judged_by_name(name) for name in DYNAMO_BACKENDS}
    precisions = {name: precision_verdict(name, machine()) for name in PRECISIONS}
    lacking = limits("torch.compile", ("triton",) if machine().gpu else ("cxx",))
    ready = Verdict("no", lacking[0].reason, lacking[0].remedy) if lacking else Verdict("yes")
    if json:
        judged_here = {"templates": templates, "backends": backends, "precisions": precisions}
        data = {kind: {name: asdict(v) for name, v in verdicts.items()} for kind, verdicts in judged_here.items()}
        return print_json({"ready": asdict(ready), "machine": facts, **data})
    print_table(("part", "found"), facts.items(), "machine")
    for title, verdicts in (
        (f"templates, as {PLAIN}:NAME", templates),
        ("other backends", backends),
        ("precisions, as precision=NAME", precisions),
    ):
        rows = [(name, v.word, v.reason, v.remedy) for name, v in verdicts.items()]
        print_table(("name", "verdict", "because", "to change it"), rows, title)
    say(f"ready: {ready}" + (f"; {ready.remedy}" if ready.remedy else ""))

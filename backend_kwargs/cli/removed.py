"""Commands and flags of earlier releases, with what to write instead."""

from collections.abc import Sequence

from backend_kwargs.errors import removed

FILE = "-o FILE, whose ending says what is written: .html, .json or .md"
OLDER = "write a page, and then `backend-kwargs compare --from NEW.html --against OLD.html -o CHANGES.html`"
AUTOS = "--option {0}=VALUE"
BRACKETS = "write the options in brackets: --backends 'inductor,tmpl-inductor[NAME=VALUE]'"
STORE = "--store FILE.toml, with url and signing_key or trusted_keys, as bk.Store takes them; keys lie beside the file"
QUICK = "`--quick` measures less"
REMOVED = {
    "build": "`backend-kwargs bundle build MODEL -o BUNDLE`",
    "inspect": "`backend-kwargs bundle inspect BUNDLE`",
    "options": "`backend-kwargs explain BACKEND PATTERN`, such as explain inductor '*tma*'",
    "page": "`backend-kwargs compare --from FILE -o OUT.html`",
    "run": "`backend-kwargs bundle run BUNDLE FACTORY`",
    "seal": "count the sizes of your calls, and declare them in bk.seal(..., sizes=...) or buckets=...",
    "serve": "write a page, `backend-kwargs decisions list --store STORE -o OUT.html`",
    "tune --plan": "`backend-kwargs tune-plan PLAN.toml`",
    "tune-plan --workers": "--on local:N",
    "audit --candidates": AUTOS.format("candidates"),
    "audit --effort": AUTOS.format("effort"),
    "audit --flip-s": QUICK,
    "audit --flips": QUICK,
    "audit --html": FILE,
    "audit --json": FILE,
    "audit --model": "name the model as the argument, `audit MODEL --store STORE`, or after a bundle",
    "audit --rounds": QUICK,
    "audit --timing-s": QUICK,
    "audit --signing-key": STORE,
    "audit --trusted-key": STORE,
    "bundle --fullgraph": "CompileConfig(fullgraph=True) in Python, which says where a graph breaks",
    "bundle --guards": "leave it out",
    "bundle --json": "read BUNDLE/manifest.json",
    "bundle --mode": "--backend tmpl-inductor:max_autotune, say: modes are templates too",
    "bundle --no-guards": "leave it out; the module is traced when it is loaded",
    "bundle --out": "-o BUNDLE",
    "bundle --rounds": "leave it out",
    "compare --cold": "leave it out",
    "compare --config": "make it in a file, `mine = bk.Backend.from_config(...)`, and write --backends file.py:mine",
    "compare --html": FILE,
    "compare --json": FILE,
    "compare --markdown": FILE,
    "compare --option": BRACKETS,
    "compare --over": "--fail-below NAME=RATIO",
    "compare --plot": FILE,
    "compare --with-code": "print(bk.report(compiled)), or .graphs[0].codes[0].source of it, in Python",
    "compare --precision": "--backends 'tmpl-inductor[precision=bf16,max_error=1e-2]'",
    "compare --report": "call bk.report(compiled) in Python, or look at the page, -o FILE.html",
    "compare --samples": "-o FILE.json has the rows; backend_kwargs.compare.to_json(...) in Python all samples",
    "compare --warm": "`--quick` uses Inductor's cache as it is",
    "decisions --against": OLDER,
    "decisions --html": FILE,
    "decisions --signing-key": STORE,
    "decisions --trusted-key": STORE,
    "explain -o": "--option NAME=VALUE",
    "tune --against": OLDER,
    "tune --budget-s": AUTOS.format("budget_s"),
    "tune --candidates": AUTOS.format("candidates"),
    "tune --effort": AUTOS.format("effort"),
    "tune --freezing": "--option freezing=true",
    "tune --html": FILE,
    "tune --json": FILE,
    "tune --max-error": AUTOS.format("max_error"),
    "tune --print-plan": "copy the plan in docs/fleet.md",
    "tune --precision": AUTOS.format("precision"),
}


def check_removed(given: Sequence[str]) -> None:
    """Raise if a command or a flag was removed."""
    words = {word.partition("=")[0] for word in given[1:]}
    for name, instead in REMOVED.items():
        command, *flags = name.split()
        if given[:1] == [command] and words.issuperset(flags):
            raise removed(f"'backend-kwargs {name}'", instead)

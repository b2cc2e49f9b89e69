"""`backend-kwargs audit`: stored decisions are raced again; one that has lost ends it with 1."""

import re
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from typer.testing import CliRunner

import backend_kwargs as bk
from backend_kwargs import trial
from backend_kwargs.auto import process_memory
from backend_kwargs.auto.store import Catalogue
from backend_kwargs.cli import app
from backend_kwargs.errors import BackendKwargsWarning, warn_once
from backend_kwargs.fleet.audit import AuditDocument, targets_of
from backend_kwargs.fleet.board import KIND, Unit, UnitDocument, name_of
from backend_kwargs.page import read_document
from backend_kwargs.stores import Store
from backend_kwargs.stores.documents import Document, encoded
from backend_kwargs.stores.opening import opened
from tests.auto.graphs import change
from tests.fleet.stores import store_file

# Sixty small operators: in eager they take several times as long as in one kernel.
FACTORY = """
from pathlib import Path

import torch

Path("imported").touch()

def chain(x):
    for _ in range(30):
        x = torch.sin(x) + 0.1
    return x

def build(rows=64):
    return chain, torch.linspace(0, 1, rows * 8).view(rows, 8)
"""
QUICKLY = ("--option", "candidates=", "--quick")


@pytest.fixture
def folder(tmp_path, monkeypatch, fresh_dynamo):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_chain.py").write_text(FACTORY, encoding="utf-8")
    process_memory.forget_process()
    yield tmp_path
    process_memory.forget_process()


@pytest.fixture
def decided(folder):
    """Race the model with eager and default alone, and return the folder of the store."""
    scope = {}
    exec(FACTORY, scope)
    chain, x = scope["build"]()
    backend = bk.make_backend("tmpl-inductor:auto", candidates=[], store="decisions", budget_s=300.0)
    with torch.no_grad():
        torch.compile(chain, backend=backend)(x)
    assert [each.winner for each in Catalogue("decisions").all()] == ["default"]
    (folder / "imported").unlink()
    return folder / "decisions"


@pytest.fixture
def keys(folder):
    """Return the PEM files of a private key and of its public one."""
    ed25519 = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ed25519")
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

    key, private, public = ed25519.Ed25519PrivateKey.generate(), folder / "mine.pem", folder / "public.pem"
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return private, public


def audit(*arguments):
    return CliRunner().invoke(app, ["audit", *map(str, arguments)])


def test_a_planted_loser_is_found_and_replaced(decided, folder, monkeypatch):
    """What is right exits with 0, what lost with 1; after --update it is right again."""

    def interleave(calls, *, rounds, **_):  # on a busy machine real times would prove no loss
        return {label: [2.0 if call is calls["eager"] else 1.0] * rounds for label, call in calls.items()}

    monkeypatch.setattr(trial, "interleave", interleave)
    of = ("my_chain.py:build", "--store", decided, *QUICKLY)
    ran = audit(*of)
    assert ran.exit_code == 0, ran.output
    change(decided, winner="eager", options={})
    ran = audit(*of, "--update", "-o", "audit.json", "-o", "audit.html")
    assert ran.exit_code == 1, ran.output
    assert "1 decision: 1 lost." in ran.output
    assert "1 stored in" in ran.output
    (finding,) = msgspec.json.decode((folder / "audit.json").read_bytes(), type=AuditDocument).findings
    assert (finding.verdict, finding.winner, finding.lost_to) == ("lost", "eager", "default")
    assert read_document("audit.html").warnings[0].kind == "advice"  # not failed: it runs, and can be replaced
    (decision,) = Catalogue(decided).all()
    assert decision.winner == "default"
    (content,) = [content for _, content in opened(str(decided)).store.list("decisions/")]
    assert msgspec.json.decode(content)["document"]["generation"] == 2
    ran = audit(*of)
    assert ran.exit_code == 0, ran.output


def test_a_decision_of_an_older_torch_is_audited(decided):
    """It is raced against default here; its recorded time is not compared, and the output says what differs."""
    (decision,) = Catalogue(decided).all()
    Catalogue("older").add(replace(decision, machine={**decision.machine, "torch": "2.11.0+cpu"}))
    ran = audit("my_chain.py:build", "--store", "older", *QUICKLY)
    assert ran.exit_code == 0, ran.output
    assert "its recorded time is not comparable: torch '2.11.0+cpu' (here " in ran.output


def test_each_mode_is_audited(decided):
    """With gradients recorded and without, a model has a decision each; another model's is counted."""
    scope = {}
    exec(FACTORY, scope)
    chain, x = scope["build"]()
    backend = bk.make_backend("tmpl-inductor:auto", candidates=[], store="decisions", budget_s=300.0)
    torch._dynamo.reset()
    torch.compile(chain, backend=backend)(x)
    (decision, *_) = Catalogue(decided).all()
    Catalogue(decided).add(replace(decision, key="ab" * 32, graph="ab" * 8))
    ran = audit("my_chain.py:build", "--store", decided, *QUICKLY)
    assert ran.exit_code == 0, ran.output
    assert "2 decisions: " in ran.output
    assert (
        "1 more for this device was not audited: of other models, sizes (--shapes, --dynamic) or options."
        in " ".join(ran.output.split())
    )


def test_the_graph_whose_sizes_vary(decided):
    """What torch compiled for any size, once it had varied, is audited with two sizes and --dynamic."""
    scope = {}
    exec(FACTORY, scope)
    backend = bk.make_backend("tmpl-inductor:auto", candidates=[], store="decisions", budget_s=300.0)
    torch._dynamo.reset()
    for rows in (64, 48):
        chain, x = scope["build"](rows)
        with torch.no_grad():
            torch.compile(chain, backend=backend)(x)
    assert len(Catalogue(decided).all()) == 2
    ran = audit("my_chain.py:build", "--store", decided, "--shapes", "rows=64,32", "--dynamic", *QUICKLY)
    assert ran.exit_code == 0, ran.output
    assert "my_chain.py:build sizes that vary" in " ".join(ran.output.split())
    assert re.search("3 decisions: .*, 1 not audited.", ran.output)  # that of rows=32 alone


def failure(ran):
    return " ".join((ran.output + str(ran.exception)).split())


def test_a_model_without_decisions(decided):
    """A key that no graph has is an error that says what such decisions may be of."""
    ran = audit("my_chain.py:build", "--store", decided, "--shapes", "rows=3", *QUICKLY)
    assert (
        "No graph of my_chain.py:build rows=3 has the key of one of the 1 decisions in 'decisions': they are of other "
        "models, devices, sizes (--shapes, --dynamic) or options (--option)."
    ) in failure(ran).replace(str(decided), "decisions")
    assert ran.exit_code == 1


def stored_unit(model, **options):
    """Store a decision and a unit of it that names this model."""
    (decision,) = Catalogue("decisions").all()
    unit = Unit(model, "cpu", candidates=(), options=options)
    name = f"decisions/{next(name for name, _ in opened('decisions').store.list('decisions/')).partition('/')[2]}"
    document = UnitDocument(unit=unit, decisions=(name,))
    opened("decisions").store.put(name_of(unit), encoded(KIND, Document(name_of(unit), document)))
    assert decision
    return document


def test_a_documents_model_is_not_imported_without_consent(decided, folder):
    """A store's document is data: what it names is imported only if the user names it, or trusts the store."""
    stored_unit("my_chain.py:build")
    ran = audit("--store", decided, "--quick")
    assert failure(ran) == (
        "A store's document is data, and the model that it names is not imported without consent: name it, or pass "
        "--trust for all of them. It names 'my_chain.py:build'."
    )
    assert not (folder / "imported").exists()
    for word, value in (
        ("--shapes", "rows=64"),
        ("--option", "freezing=true"),
    ):
        ran = audit("--store", decided, "--trust", word, value)
        assert failure(ran) == "--shapes, --dynamic and --option are of a model: name it, as FILE_OR_MODULE:FACTORY."
    ran = audit("--store", decided, "--trust", "--quick")
    assert ran.exit_code == 0, ran.output
    assert "my_chain.py:build  cpu" in ran.output


def test_a_model_that_is_gone_is_not_passed_over(decided, folder):
    """Of two models one no longer exists: its decision is in the table and in the JSON, with the reason."""
    stored_unit("my_chain.py:build")
    (decision,) = Catalogue(decided).all()
    Catalogue(decided).add(replace(decision, key="ab" * 32, graph="ab" * 8))
    name = next(name for name, _ in opened(str(decided)).store.list("decisions/") if "abab" in name)
    unit = Unit("gone.py:build", "cpu", candidates=())
    content = encoded(KIND, Document(name_of(unit), UnitDocument(unit=unit, decisions=(name,))))
    opened(str(decided)).store.put(name_of(unit), content)
    ran = audit("--store", decided, "--trust", "--quick", "-o", "audit.json")
    assert ran.exit_code == 0, ran.output
    found = msgspec.json.decode((folder / "audit.json").read_bytes(), type=AuditDocument).findings
    (gone,) = [each for each in found if each.verdict == "not audited"]
    assert (gone.model, gone.key, gone.reason) == ("gone.py:build  cpu", "ab" * 32, "No file 'gone.py'")
    assert len(found) == 2
    ran = audit("gone.py:build", "--store", decided, "--quick")
    assert ran.exit_code == 2, ran.output
    assert "not audited: No file 'gone.py'" in ran.output


def test_a_size_that_cannot_be_audited_is_in_the_table(decided, folder):
    """Of the sizes that were asked for, one has no decision, and one fails; both have a row."""
    text = FACTORY.replace("    return chain,", "    assert rows < 100, 'too many rows'\n    return chain,")
    (folder / "my_chain.py").write_text(text, encoding="utf-8")
    sizes = ("my_chain.py:build", "--shapes", "rows=3,64,100")
    ran = audit(*sizes, "--store", decided, *QUICKLY, "-o", "audit.html")
    assert ran.exit_code == 0, ran.output
    assert "my_chain.py:build  rows=3" in ran.output
    assert "not audited: no graph of it has the key of a decision there" in ran.output
    assert "too many rows" in ran.output
    assert "3 decisions: " in ran.output
    assert [each.kind for each in read_document("audit.html").warnings if each.kind != "noise"] == ["other"] * 2


def test_a_signed_decision_is_not_replaced_by_an_unsigned_one(decided, keys):
    """Those who check signatures would lose it; that is said before anything is measured."""
    key, public = keys
    decided.chmod(0o755)  # others may read it
    (decision,) = Catalogue(decided).all()
    Catalogue(Store(decided, signing_key=str(key))).add(decision)
    of = ("my_chain.py:build", "--store", decided, *QUICKLY)
    name, before = next(opened(str(decided)).store.list("decisions/"))
    ran = audit(*of, "--update")
    assert failure(ran) == (
        f"Cannot write store {str(decided)!r}: {name} is signed there, so its place is for signed ones: give a signing "
        "key."
    )
    assert opened(str(decided)).store.get(name) == before
    mine = store_file(key.with_name("mine.toml"), str(decided), signing_key=key.name, trusted_keys=[public.name])
    ran = audit("my_chain.py:build", "--store", mine, *QUICKLY, "--update")
    assert ran.exit_code == 0, ran.output
    assert [each.winner for each in Catalogue(Store(decided, trusted_keys=[str(public)])).all()] == ["default"]


def test_with_trusted_keys_only_what_they_signed_is_audited(decided, keys):
    """An unsigned decision is none, as where `trusted_keys` serve."""
    _, public = keys
    warn_once.cache_clear()
    team = store_file(public.with_name("team.toml"), str(decided), trusted_keys=[public.name])
    with pytest.warns(BackendKwargsWarning, match="it is not signed"):
        ran = audit("my_chain.py:build", "--store", team, *QUICKLY)
    assert failure(ran) == f"No decisions in {str(decided)!r}; compile with tmpl-inductor:auto, or tune."


def test_a_documents_options_are_data(decided):
    """A unit of a store that sets a compiler's path is refused, whoever named its model."""
    document = stored_unit("my_chain.py:build", **{"cpp.cxx": ["/tmp/evil"]})
    warn_once.cache_clear()
    with pytest.warns(BackendKwargsWarning) as caught:
        assert targets_of([document]) == []
    (message,) = [str(each.message) for each in caught]
    assert message == (
        "my_chain.py:build  cpu is not audited: Inductor option 'cpp.cxx' is code, which a file may set only if it is "
        "trusted: pass trust=True if you trust its author."
    )


def test_what_the_options_do_not_permit_is_not_run(decided):
    """A winner that the request could not have chosen is not audited, and the audit exits with 2."""
    change(decided, winner="freezing", options={"freezing": True})
    ran = audit("my_chain.py:build", "--store", decided, *QUICKLY)
    assert "not audited: these options do not permit freezing" in ran.output
    assert ran.exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(
            ["--store", "nothing"],
            "Store 'nothing' does not exist: compile with tmpl-inductor:auto and store='nothing', or name another one.",
            id="missing",
        ),
        pytest.param(
            ["my_chain.py:build", "other.py:build"],
            "'my_chain.py:build' is no bundle, which 'other.py:build' could make the model of.",
            id="two models",
        ),
        pytest.param(
            ["env:TUNED"],
            "'env:TUNED' is neither a bundle nor a model; a store is --store env:TUNED.",
            id="a store as the model",
        ),
        pytest.param(
            ["x", "-o", "nowhere/a.json"],
            "Cannot write 'nowhere/a.json': there is no directory 'nowhere'.",
            id="no directory",
        ),
        pytest.param(
            ["my_chain.py"],
            "FACTORY must be 'package.module:function' or 'file.py:function', got 'my_chain.py': write a function that "
            "returns (model, example_inputs), such as build in my_model.py, and pass my_model.py:build.",
            id="a file without its function",
        ),
    ],
)
def test_what_is_wrong_is_one_line(folder, arguments, message):
    """Wrong arguments raise before a model is made."""
    assert failure(audit(*arguments)) == message


def test_the_first_command_of_the_docs(folder):
    """It runs as it is written, with decisions for both sizes."""
    page = (Path(__file__).parents[2] / "docs" / "stability.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^backend-kwargs audit (.* decisions/.*?) +#", page, re.MULTILINE)
    (folder / "my_model.py").write_text(FACTORY.replace("rows", "batch"), encoding="utf-8")
    backend = bk.make_backend("tmpl-inductor:auto", store="decisions", budget_s=3.0)
    for size in (1, 8):
        scope = {}
        exec((folder / "my_model.py").read_text(), scope)
        chain, x = scope["build"](size)
        torch._dynamo.reset()
        with torch.no_grad():
            torch.compile(chain, backend=backend, dynamic=False)(x)
    ran = audit(*command.split(), "--quick")
    assert ran.exit_code == 0, ran.output
    assert "2 decisions: " in ran.output


MODULE = """
import torch

class Chain(torch.nn.Module):
    def forward(self, x):
        for _ in range(30):
            x = torch.sin(x) + 0.1
        return x

def build():
    return Chain().eval(), torch.linspace(0, 1, 512).view(64, 8)
"""


def test_what_a_bundle_contains_is_audited(folder):
    """Its manifest names what auto chose for each graph; the model is asked for, and nothing is updated."""
    (folder / "my_module.py").write_text(MODULE, encoding="utf-8")
    scope = {}
    exec(MODULE, scope)
    model, x = scope["build"]()
    config = bk.CompileConfig("tmpl-inductor:auto", {"candidates": [], "budget_s": 300.0})
    bk.CompiledModule(config).build(model, [x]).save(folder / "bundle")
    assert failure(audit("bundle")) == (
        "Pass FACTORY too, the function that makes the bundle's model: MODULE_OR_FILE:NAME."
    )
    assert failure(audit("bundle", "my_module.py:build", "--update")) == (
        "--update is for stores: build a bundle again, and its graphs are decided anew."
    )
    assert failure(audit("bundle", "my_module.py:build", "--option", "effort=quick")) == (
        "--shapes, --dynamic and --option, and --store, are not for a bundle, which has its own."
    )
    ran = audit("bundle", "my_module.py:build", "--quick")
    assert ran.exit_code == 0, ran.output
    assert "not recorded" in ran.output


def test_a_store_without_models_asks_for_one(decided):
    """Graphs are never stored as code, so the factory is asked for."""
    why = "do not name their model: pass MODEL, FILE_OR_MODULE:FACTORY, which makes it."
    assert failure(audit("--store", decided)) == f"The documents of {str(decided)!r} {why}"

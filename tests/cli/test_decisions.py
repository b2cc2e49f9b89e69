"""`backend-kwargs decisions` on folders: what each command prints, writes and refuses."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from backend_kwargs.auto.decisions_toml import write_decisions
from backend_kwargs.auto.store import KIND, Catalogue, name_of
from backend_kwargs.cli import app
from backend_kwargs.errors import BackendKwargsError
from backend_kwargs.fleet.board import Result, Unit, document_of
from backend_kwargs.page import read_document
from backend_kwargs.stores import Store
from backend_kwargs.stores.documents import Document, encoded, heading, public_key
from backend_kwargs.stores.opening import opened
from tests.auto.graphs import MADE
from tests.fleet.stores import Documents, store_file, written

CPU = {"device": "cpu AVX2", "threads": 4}
FIRST = replace(MADE, machine=CPU, model="Net", inputs=("float32 8x64",), cut_s=0.0, made=1e9)
SECOND, THIRD = (replace(FIRST, key=digits * 32, made=made) for digits, made in (("cd", 2e9), ("ef", 3e9)))
TWIN = replace(FIRST, key=f"abcd{'0' * 60}", made=1e8)  # another key that begins with "ab"
DAY = "2001-09-09T01:46:40+00:00"
ELSEWHERE = replace(FIRST, winner="default", options={}, machine=CPU | {"threads": 8}, made=9e8)


@pytest.fixture
def folder(tmp_path):
    """Return a store, as a path, with some decisions."""

    def make(*given, name="store", **signing):
        Catalogue(Store(tmp_path / name, **signing)).add(*given)
        return tmp_path / name

    return make


@pytest.fixture
def key(tmp_path):
    """Return the files of a private key and of its public one."""
    ed25519 = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ed25519")
    from cryptography.hazmat.primitives import serialization as form

    made, private, public = ed25519.Ed25519PrivateKey.generate(), tmp_path / "key.pem", tmp_path / "public.pem"
    private.write_bytes(made.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption()))
    private.chmod(0o600)
    public.write_bytes(made.public_key().public_bytes(form.Encoding.PEM, form.PublicFormat.SubjectPublicKeyInfo))
    return private, public


def run(*arguments):
    """Return what a command prints, line by line; raise its error."""
    ran = CliRunner().invoke(app, ["decisions", *map(str, arguments)], catch_exceptions=False)
    return ran.output.splitlines()


def winners(store):
    return {each.key[:2]: each.winner for each in Catalogue(store).all()}


# ---- list and show


@pytest.mark.parametrize(
    ("changed", "shown"),
    [
        pytest.param({}, {"key": "ab" * 10, "winner": "cudagraphs", "model": "Net", "graph": "3 ops"}, id="texts"),
        pytest.param({"inputs": ("a", "b", "c")}, {"sizes": "a, b, c"}, id="three sizes"),
        pytest.param({"inputs": ("a", "b", "c", "d")}, {"sizes": "a, b, c, ..."}, id="four sizes"),
        pytest.param({}, {"device": "cpu AVX2", "machine": "cpu-avx2, 4 threads"}, id="a CPU"),
        pytest.param({"machine": {"device": "cpu AVX2"}}, {"machine": "cpu-avx2"}, id="a CPU of unknown threads"),
        pytest.param(
            {"machine": {"device": "NVIDIA H200", "gpu": "NVIDIA H200", "threads": 4}},
            {"device": "NVIDIA H200", "machine": "nvidia-h200"},
            id="a GPU",
        ),
        pytest.param({"machine": {"gpu": "NVIDIA H200"}}, {"device": "NVIDIA H200"}, id="a GPU of an older release"),
        pytest.param({"machine": {}}, {"device": ""}, id="nothing known"),
        pytest.param({}, {"made": DAY}, id="made"),
        pytest.param({"made": 1e30}, {"made": ""}, id="made at no time"),
    ],
)
def test_a_row_of_the_list(folder, changed, shown):
    """Each column says what is known of the decision, and is blank where nothing is."""
    (row,) = json.loads("\n".join(run("list", "--json", "--store", folder(replace(FIRST, **changed)))))
    assert {name: row[name] for name in shown} == shown


def test_an_empty_store_is_named(tmp_path):
    """In JSON the list is empty."""
    store = tmp_path / "none"
    store.mkdir()
    assert run("list", "--store", store) == [f"No decisions in '{store}'."]
    assert run("list", "--json", "--store", store) == ["[]"]


@pytest.mark.parametrize(
    "arguments",
    [
        *(["list", "--store"], ["list", "--json", "--store"], ["show", "ab", "--store"], ["export", "o", "--store"]),
        *(["forget", "--all", "--store"], ["sync"], ["audit", "--store"]),
        ["audit", "no.py:model", "--store"],
    ],
    ids=" ".join,
)
def test_a_store_that_does_not_exist(tmp_path, monkeypatch, arguments):
    """A mistyped folder is an error, and is not created; `sync` writes none either."""
    monkeypatch.chdir(tmp_path)
    store = str(tmp_path / "none")
    words = [*arguments, store, *(["there"] if arguments == ["sync"] else [])]
    group = [] if arguments[0] == "audit" else ["decisions"]
    with pytest.raises(BackendKwargsError) as e:
        CliRunner().invoke(app, [*group, *words], catch_exceptions=False)
    assert str(e.value) == (
        f"Store {store!r} does not exist: compile with tmpl-inductor:auto and store={store!r}, or name another one."
    )
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        pytest.param(
            [FIRST], ["Not listed: 2 decisions of an earlier release, whose keys no graph has now."], id="others"
        ),
        pytest.param([], ["2 decisions of an earlier release, whose keys no graph has now."], id="nothing else"),
    ],
)
def test_decisions_of_an_earlier_release_are_counted(folder, given, said):
    """They are not listed, since no graph has their keys; those that were forgotten are not counted."""
    store, earlier = folder(*given), replace(KIND, schema=1, oldest=1)
    for each, body in ((SECOND, SECOND), (THIRD, THIRD), (TWIN, None)):
        opened(str(store)).store.put(name_of(each), encoded(earlier, Document(name_of(each), body)))
    told = [line for line in run("list", "--store", store) if "earlier release" in line]
    assert (told, len(winners(store))) == (said, len(given))


def test_the_whole_of_a_decision(folder):
    """What it was made for, on what, when, and by what its winner was compiled is shown by its name."""
    made = replace(FIRST, compiler="tmpl-tvm", fixed={"debug": True}, budget_s=2.5)
    shown = run("show", "abab", "--store", folder(made))
    head = [line.partition(":")[0] for line in shown]
    wanted = {
        "compiler": "tmpl-tvm",
        "options": "{'triton.cudagraphs': True}",
        "fixed": "{'debug': True}",
        "model": "Net",
        "inputs": "float32 8x64",
        "device": "cpu AVX2",
        "threads": "4",
        "budget_s": "2.5",
        "made": DAY,
    }
    lines = dict(line.split(": ", 1) for line in shown if line.partition(":")[0] in wanted)
    assert lines == wanted
    assert head[-len(wanted) :] == [*wanted]


def test_what_is_not_known_is_not_shown(folder):
    """A decision of an older release names neither a model nor inputs, and one of Inductor no compiler."""
    shown = run("show", "abab", "--store", folder(replace(FIRST, model="", inputs=())))
    assert not {"model", "inputs", "compiler"} & {line.partition(":")[0] for line in shown}


def test_the_latest_of_several_machines_is_shown(folder):
    """The others of its key are named with what differs; those of other keys are not."""
    shown = run("show", "abab", "--store", folder(FIRST, ELSEWHERE, SECOND))
    assert shown[0].startswith("auto: cudagraphs for 3 ops")
    assert [line for line in shown if line.startswith("also")] == [
        "also decided on another machine: default; threads 8 (above 4)"
    ]


def test_the_options_of_a_winner(folder):
    """They are those for Inductor under torch.compile, or for AOTInductor, which alone freezes."""
    store = folder(replace(FIRST, winner="freezing", options={"freezing": True}))
    assert json.loads("\n".join(run("show", "ab", "--as", "aoti-config", "--store", store)))["freezing"] is True
    with pytest.raises(BackendKwargsError, match=r"^Option 'freezing' does not work in a plain dict: "):
        run("show", "ab", "--as", "inductor-config", "--store", store)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        pytest.param("ab", "2 decisions' keys begin with 'ab'; give more digits.", id="several"),
        pytest.param("ba", "No decision's key begins with 'ba'; `decisions list` shows all.", id="within a key"),
    ],
)
def test_which_one_is_shown(folder, given, message):
    """It is the one whose key begins with the digits that are given."""
    with pytest.raises(BackendKwargsError) as raised:
        run("show", given, "--store", folder(FIRST, TWIN))
    assert str(raised.value) == message


def test_pages(folder, tmp_path):
    """The page of a single decision has the line to paste; that of several, or of none that text makes, has none."""
    both = folder(FIRST, SECOND)
    gone = folder(replace(FIRST, winner="mine", options={"no_such_option": 1}), name="gone")
    for arguments in (["show", "ab", "--store", both], ["list", "--store", both], ["show", "ab", "--store", gone]):
        run(*arguments, "-o", tmp_path / f"{arguments[0]}-{arguments[-1].name}.html")
    pasted = [read_document(tmp_path / f"{name}.html").verdict for name in ("show-store", "list-store", "show-gone")]
    assert [bool(each and each.paste) for each in pasted] == [True, False, False]


# ---- export and import


@pytest.mark.parametrize(
    ("keys", "exported"),
    [
        pytest.param([], ["cd", "ab", "ab"], id="all"),
        pytest.param(["abab"], ["ab"], id="one"),
        pytest.param(["ab"], ["ab", "ab"], id="all that begin so"),
        pytest.param(["ab", "cd"], ["ab", "ab", "cd"], id="in the order of the keys"),
    ],
)
def test_which_are_exported(folder, tmp_path, keys, exported):
    """All, the latest first, or those whose keys are given; a file has one of each key, that of the latest."""
    store = folder(FIRST, SECOND, ELSEWHERE, TWIN)
    run("export", tmp_path / "d.toml", *keys, "--store", store)
    text = (tmp_path / "d.toml").read_text()
    assert [line[14:16] for line in text.splitlines() if line.startswith('["decisions"') and line.count('"') == 4] == (
        exported
    )
    assert '"winner" = "default"' not in text


def test_an_export_says_what_it_has(folder, tmp_path):
    """Templates have one name each; what is none, and what another machine decided too, is counted."""
    eager = replace(SECOND, winner="eager", options={})
    tvm = replace(THIRD, winner="tmpl-tvm", compiler="tmpl-tvm", options={})
    rest = "(2 chose eager or another compiler, which has no template)"
    assert run("export", tmp_path / "d.toml", "--store", folder(FIRST, ELSEWHERE, eager, tvm)) == [
        f"3 written to {tmp_path / 'd.toml'}, 1 as templates: auto-abababababab {rest}.",
        "1 of other machines left out: of each key a file has the latest; sync copies all.",
    ]


def test_keys_that_end_alike(folder, tmp_path):
    """A template's name has a key's last digits: it is written once, and the file can be read."""
    store = folder(FIRST, replace(FIRST, key=f"cd{'ab' * 31}"))
    (said,) = run("export", tmp_path / "d.toml", "--store", store)
    assert said == f"2 written to {tmp_path / 'd.toml'}, 1 as templates: auto-abababababab."
    assert run("import", tmp_path / "d.toml", "--store", tmp_path) == [f"2 added to '{tmp_path}'."]


def test_nothing_to_export(tmp_path):
    """An empty store is an error, and no file is written."""
    (tmp_path / "none").mkdir()
    with pytest.raises(BackendKwargsError) as raised:
        run("export", tmp_path / "d.toml", "--store", tmp_path / "none")
    assert str(raised.value) == f"No decisions in '{tmp_path / 'none'}'; compile with tmpl-inductor:auto first."
    assert not (tmp_path / "d.toml").exists()


def test_an_import_is_signed(key, folder, tmp_path):
    """With a key what is written is signed, so that who checks signatures uses it."""
    private, public = key
    write_decisions([FIRST], tmp_path / "d.toml")
    store = tmp_path / "store"
    mine = store_file(tmp_path / "mine.toml", str(store), signing_key=private.name)
    assert run("import", tmp_path / "d.toml", "--store", mine) == [f"1 added to '{store}'."]
    assert [each.winner for each in Catalogue(Store(store, trusted_keys=[public_key(public)])).all()] == ["cudagraphs"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("url", "Cannot read a store from '{}': TOMLDecodeError: ", id="no TOML"),
        pytest.param('ur = "decisions"', "Unknown argument of Store: 'ur'. Did you mean 'url'?", id="a field"),
        pytest.param('signing_key = "none.pem"', "Cannot read a private key from ", id="no key"),
        pytest.param('url = "redis://me:s3cret@h"', "Store 'redis://h' must not contain a password: ", id="a password"),
    ],
)
def test_a_file_that_names_no_store(tmp_path, text, message):
    """It is an error before anything is read or written, which shows no password."""
    file = tmp_path / "team.toml"
    file.write_text(text)
    with pytest.raises(BackendKwargsError) as raised:
        run("list", "--store", file)
    assert str(raised.value).startswith(message.format(file))
    assert "s3cret" not in str(raised.value)


def test_nothing_adds_a_provisional_decision_to_a_shared_store():
    """Neither does an audit, which stores what it has measured."""
    shared = Documents()
    Catalogue(shared).add(FIRST, replace(SECOND, cut_s=5.0))
    assert winners(shared) == {"ab": "cudagraphs"}


# ---- forget


@pytest.mark.parametrize(
    ("arguments", "left", "said"),
    [
        pytest.param(["ab"], {"cd", "ef"}, "1 forgotten.", id="one"),
        pytest.param(["ab", "cd"], {"ef"}, "2 forgotten.", id="two"),
        pytest.param(["--all"], set(), "3 forgotten.", id="all"),
    ],
)
def test_what_is_forgotten(folder, arguments, left, said):
    """Those whose keys are given, or all, are counted together."""
    store = folder(FIRST, SECOND, THIRD)
    assert run("forget", *arguments, "--store", store) == [said]
    assert winners(store).keys() == left


def test_nothing_is_forgotten_in_an_empty_store(tmp_path):
    """With --all it is no error that there is nothing."""
    (tmp_path / "none").mkdir()
    assert run("forget", "--all", "--store", tmp_path / "none") == ["0 forgotten."]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param([], "Name the decisions to forget, or give --all.", id="nothing named"),
        pytest.param([""], "A key to forget is empty; give --all to forget every decision.", id="an empty key"),
        pytest.param(
            ["", "--all"], "A key to forget is empty; give --all to forget every decision.", id="an empty key and all"
        ),
        pytest.param(["12"], "No decision's key begins with '12'; `decisions list` shows all.", id="unknown"),
    ],
)
def test_what_cannot_be_forgotten(folder, arguments, message):
    """A mistake forgets nothing."""
    store = folder(FIRST, SECOND)
    with pytest.raises(BackendKwargsError) as raised:
        run("forget", *arguments, "--store", store)
    assert str(raised.value) == message
    assert winners(store).keys() == {"ab", "cd"}


def test_what_is_forgotten_is_signed(key, folder):
    """With a key the note in place of a decision is signed, and without one a signed decision stays."""
    private, _ = key
    store = folder(FIRST, signing_key=str(private))
    store.chmod(0o777)
    with pytest.raises(BackendKwargsError, match="is signed there, so its place is for signed ones"):
        run("forget", "ab", "--store", store)
    mine = store_file(private.with_name("mine.toml"), str(store), signing_key=str(private))
    assert run("forget", "ab", "--store", mine) == ["1 forgotten."]
    content = opened(str(store)).store.get(name_of(FIRST))
    assert (heading(content).is_signed, heading(content).body) == (True, None)


# ---- sync


def test_what_is_synced(folder, tmp_path):
    """What is new or newer is copied and counted, what is the same or older is not; a dry run only names it."""
    newer = folder(FIRST, SECOND, THIRD, name="here")
    Catalogue(newer).add(replace(SECOND, winner="default", options={}))
    there = folder(SECOND, THIRD, name="there")
    Catalogue(there).add(THIRD, THIRD)
    assert run("sync", newer, there, "--dry-run") == [
        f"new: {name_of(FIRST)}",
        f"newer: {name_of(SECOND)}",
        f"2 would be copied to '{there}'; 0 the same, 1 older than there.",
    ]
    assert winners(there) == {"cd": "cudagraphs", "ef": "cudagraphs"}
    assert run("sync", newer, there)[0] == f"2 copied to '{there}'; 0 the same, 1 older than there."
    assert winners(there) == {"ab": "cudagraphs", "cd": "default", "ef": "cudagraphs"}
    assert run("sync", newer, there)[0] == f"0 copied to '{there}'; 2 the same, 1 older than there."


@pytest.mark.parametrize(("count", "named"), [(3, 3), (4, 3)])
def test_what_is_refused_is_named(tmp_path, count, named):
    """Three names are enough; a sign says that there are more."""
    source = opened(str(tmp_path / "here")).store
    names = [f"units/{at}.json" for at in range(count)]
    for name in names:
        source.put(name, written(document_of(Unit("m", "cpu"), Result(seconds=1.0))))
    (said, *_) = run("sync", tmp_path / "here", tmp_path / "there")
    why, _, listed = said.rpartition("': ")
    assert why.startswith(f"{count} refused: it is 'units/")
    assert listed == ", ".join(names[:named]) + (", ..." if count > named else "")


@pytest.mark.parametrize(
    ("here", "there", "again", "warns"),
    [
        pytest.param(0o777, 0o700, False, True, id="of others, to one's own"),
        pytest.param(0o700, 0o700, False, False, id="one's own"),
        pytest.param(0o777, 0o777, False, False, id="to others"),
        pytest.param(0o777, 0o700, True, False, id="nothing copied"),
    ],
)
def test_when_unchecked_signatures_are_told(folder, tmp_path, here, there, again, warns):
    """Only where something of others was copied to one's own folder, which is trusted."""
    source, target = folder(FIRST, name="here"), folder(*([FIRST] if again else [SECOND]), name="there")
    source.chmod(here)
    target.chmod(there)
    said = run("sync", source, target)
    assert any(line.startswith("Nobody's signature was checked") for line in said) is warns

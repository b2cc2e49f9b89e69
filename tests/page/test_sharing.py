"""What a page does not tell."""

import getpass
import os
from pathlib import Path

import pytest

from backend_kwargs.page import Document, to_html, to_json
from backend_kwargs.page.document import Cause, Code, Graph, Option, Row, Source, Speedups, Verdict, Warned
from backend_kwargs.page.markdown import to_markdown
from backend_kwargs.page.sharing import LEFT_OUT, here, shareable, shared
from backend_kwargs.page.values import file_of

JANE = frozenset(["/home/jane", "C:\\Users\\jane", "jane", "gpu7.corp.example", "gpu7"])


TELLING = {
    "home": "/home/jane/m.py:12",
    "home alone": "/home/jane",
    "Windows in a repr": "'c:\\\\Users\\\\bob\\\\m.py'",
    "root": "/root/.cache/torch",
    "tilde": "~bob/m.py",
    "relative home": "../../home/bob/m.py",
    "encoded": "x%2Fhome%2Fbob%2Fm.py",
    "Windows share": "\\\\server\\secret\\m.py",
    "cache of Inductor": "torchinductor_bob/ab/x.py",
    "store": "s3://acme/store?key=1",
    "store with a password": "redis://jane:secret@gpu7:6379/0",
    "SQLite URL": "sqlite:////srv/x",
    "not PyTorch's": "https://pytorch.org.evil.example/x",
    "nor this": "https://evil.example/pytorch.org/",
    "beside PyTorch's": "see https://pytorch.org/x and https://acme.example",
    "ssh": "bob@gpu7.corp.example:/data",
    "in words": "run of jane on gpu7",
}


@pytest.mark.parametrize("text", TELLING.values(), ids=TELLING)
def test_what_tells_a_place_or_a_name_is_left_out(text):
    """All of the text is, since what stands beside a place may tell it too."""
    assert shared(text, JANE) == LEFT_OUT


TELLING_NOTHING = {
    "PyTorch's": "https://docs.pytorch.org/a/b/c/d.html",
    "hint of dynamo": "https://meta-pytorch.github.io/compile-graph-break-site/gb/gb0025.html",
    "other names": "janet and gpu70",
    "no paths": "aten/native/x, 1/2/3/4, and/or",
    "a file's name": "m.py:build batch=1",
    "code": "torch.compile(model, backend='tmpl-inductor:auto')",
    "HTML": "</script></style>",
    "a rewrite's place": "rewrites=['linear_activation@1']",
}


@pytest.mark.parametrize("text", TELLING_NOTHING.values(), ids=TELLING_NOTHING)
def test_what_tells_neither_stays(text):
    """It is shared as it is."""
    assert shared(text, JANE) == text


@pytest.mark.parametrize(
    ("text", "told"),
    [
        pytest.param("ZeroDivisionError: my password is x", "ZeroDivisionError", id="alone"),
        pytest.param(
            "fail_to_compile: CppCompileError: /tmp/a/b.cpp\nline 2", "fail_to_compile: CppCompileError", id="status"
        ),
        pytest.param(
            "in eager: aten.x, because RuntimeError: acme's data", "in eager: aten.x, because RuntimeError", id="note"
        ),
        pytest.param("RMSE 0.41, at most 0.01 allowed", "RMSE 0.41, at most 0.01 allowed", id="no exception"),
    ],
)
def test_of_an_exception_only_its_class_is_told(text, told):
    """Its text is other code's: it may have anything in it."""
    assert shared(text, JANE) == told


@pytest.mark.parametrize(
    ("place", "file"),
    [
        ("m.py:build", "m.py:build"),
        ("/home/jane/acme/m.py:12", "m.py:12"),
        ("C:\\Users\\jane\\m.py", "m.py"),
        ("/srv/decisions/", "decisions"),
        ("redis://jane:secret@gpu7/0", "redis"),
        ("timm:resnet18", "timm:resnet18"),
    ],
)
def test_of_a_place_its_last_part_is_told(place, file):
    """That of a URL is its scheme."""
    assert file_of(place) == file


@pytest.mark.parametrize(
    "unit",
    ["/a", "a.", "\\", "~a", "a:/", "/home", "c:\\", "%2Fhome", "a@", "\\\\a", "/ ", "aError", "_", "https://a."],
)
def test_hostile_texts_take_little_time(unit):
    """A text made to be slow is not: with quadratic patterns one of these takes minutes."""
    assert shared(unit * 200_000, JANE)


def leaky(text):
    """A document with this in each place where text may be."""
    return Document(
        text,
        subtitle=text,
        environment={text: text},
        verdict=Verdict(text, text, provisional=text, paste=text),
        warnings=(Warned(text, "shared device", text),),
        speedups=(Speedups(text, text, rows=(Row(text, text, text, text),)),),
        graphs=(
            Graph(
                text,
                options=(Option("a", text, text, text),),
                causes=(Cause("break", text, text, Source(text, lines=(text,))),),
                codes=(Code.of(text, f"import torch\n# {text}\n"),),
            ),
        ),
        notes=(text,),
    )


SECRETS = {
    "home": "{home}/x",
    "user": "by {user}",
    "path": "/srv/acme/x",
    "store": "s3://acme/x",
    "password": "redis://u:acme@h/0",
    "host": "on gpu7",
    "exception": "OSError: the weights of acme",
    "user of the environment": "by jane",
}


@pytest.mark.parametrize("text", SECRETS.values(), ids=SECRETS)
def test_a_whole_page_tells_nothing(monkeypatch, text):
    """Neither the page nor its data or summary name a home, a user, a host or a store; nor does the code in it."""
    document = leaky(text.format(home=Path.home(), user=getpass.getuser()))
    monkeypatch.setenv("USER", "jane")
    monkeypatch.setenv("HOSTNAME", "gpu7.corp.example")
    code = shareable(document).graphs[0].codes[0].text
    told = to_html(document, with_code=True) + to_json(document).decode() + to_markdown(document) + code
    assert not [secret for secret in ("jane", "gpu7", "acme", str(Path.home())) if secret in told.replace("/root/", "")]
    assert code.startswith("import torch\n")


def test_lines_of_the_users_code_are_shown_with_generated_code_alone():
    """They are other code's text too; the place stays."""
    cause = Cause("break", "print", source=Source("m.py:3", 3, 3, ("print(password)",)))
    document = Document("x", graphs=(Graph("g", causes=(cause,)),))
    assert "password" not in to_html(document) + to_json(document).decode()
    assert "m.py:3" in to_html(document)
    assert "print(password)" in to_html(document, with_code=True)


def test_a_user_whose_name_is_an_option():
    """A user called "max" changes no candidate's name; one called "time" no kind of a span."""
    document = Document(
        "x", warnings=(Warned("by max", "noise"),), speedups=(Speedups(rows=(Row("tmpl:max_autotune"),)),)
    )
    private = frozenset(["max", "noise"])
    made = shareable(document, private)
    assert made.speedups[0].rows[0].name == "tmpl:max_autotune"
    assert made.warnings[0].kind == "noise"
    assert shared("/home/max/x", private) == LEFT_OUT


def test_here_has_this_machine(monkeypatch):
    """This process's home, user and host are known, also where the environment alone has them."""
    monkeypatch.setenv("LOGNAME", "jane")
    monkeypatch.setenv("HOSTNAME", "gpu7.corp.example")
    assert {os.path.expanduser("~"), "jane", "gpu7", "gpu7.corp.example"} <= here()  # noqa: PTH111 - what others print


def test_marks_that_turn_text_round_are_shown():
    """Control characters and marks of direction are escaped, since they make a name look like another."""
    assert shareable(Document("a\u202eb\x00\ud800")).title == "a\\u202eb\\x00\\ud800"

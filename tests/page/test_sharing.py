"""What a page does not tell."""

import getpass
from pathlib import Path

import pytest

from backend_kwargs.page import Document, to_html, to_json
from backend_kwargs.page.document import Cause, Graph, Lane, Option, Race, Row, Source, Speedups, Verdict, Warned
from backend_kwargs.page.figures import file_of
from backend_kwargs.page.markdown import to_markdown
from backend_kwargs.page.writing import LEFT_OUT, shareable, shared

JANE = frozenset(["/home/jane", "C:\\Users\\jane", "jane", "gpu7.corp.example", "gpu7"])


TOLD = {
    "/home/jane/m.py:12": LEFT_OUT,
    "'c:\\\\Users\\\\bob\\\\m.py'": LEFT_OUT,
    "~bob/m.py": LEFT_OUT,
    "x%2Fhome%2Fbob%2Fm.py": LEFT_OUT,
    "\\\\server\\secret\\m.py": LEFT_OUT,
    "torchinductor_bob/ab/x.py": LEFT_OUT,
    "s3://acme/store?key=1": LEFT_OUT,
    "redis://jane:secret@gpu7:6379/0": LEFT_OUT,
    "sqlite:////srv/x": LEFT_OUT,
    "https://pytorch.org.evil.example/x": LEFT_OUT,
    "https://evil.example/pytorch.org/": LEFT_OUT,
    "see https://pytorch.org/x and https://acme.example": LEFT_OUT,
    "bob@gpu7.corp.example:/data": LEFT_OUT,
    "run of jane on gpu7": LEFT_OUT,
    "https://docs.pytorch.org/a/b/c/d.html": ...,
    "https://meta-pytorch.github.io/compile-graph-break-site/gb/gb0025.html": ...,
    "janet and gpu70": ...,
    "aten/native/x, 1/2/3/4, and/or": ...,
    "m.py:build batch=1": ...,
    "torch.compile(model, backend='tmpl-inductor:auto')": ...,
    "</script></style>": ...,
    "rewrites=['linear_activation@1']": ...,
    "RMSE 0.41, at most 0.01 allowed": ...,
    "ZeroDivisionError: my password is x": "ZeroDivisionError",
    "in eager: aten.x, because CppCompileError: /tmp/a/b.cpp\nx": "in eager: aten.x, because CppCompileError",
}


@pytest.mark.parametrize(("text", "told"), TOLD.items())
def test_what_is_told_of_a_text(text, told):
    """Nothing where it tells a place or a name, of an exception only its class; else all (...)."""
    assert shared(text, JANE) == (text if told is ... else told)


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
        speedups=(Speedups(text, text, rows=(Row(text, text, text, note=text),)),),
        graphs=(
            Graph(
                text,
                options=(Option("a", text, text, text),),
                causes=(Cause("break", text, text, Source(text)),),
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
    "host of the environment": "at gpu7.corp.example",
}


@pytest.mark.parametrize("text", SECRETS.values(), ids=SECRETS)
def test_a_whole_page_tells_nothing(monkeypatch, text):
    """Neither the page nor its data or summary name a home, a user, a host or a store."""
    document = leaky(text.format(home=Path.home(), user=getpass.getuser()))
    monkeypatch.setenv("USER", "jane")
    monkeypatch.setenv("HOSTNAME", "gpu7.corp.example")
    told = to_html(document) + to_json(document).decode() + to_markdown(document)
    assert not [secret for secret in ("jane", "gpu7", "acme", f"{Path.home()}/") if secret in told]


@pytest.mark.parametrize("status", ["fail_to_run", "oom", "failed", "fails"])
def test_of_what_failed_the_class_is_told_whatever_its_name(status):
    """An error of the user's own class need not end in "Error"."""
    row, lane = (part("a", status, "AcmeDown: hunter2: x") for part in (Row, Lane))
    assert "hunter2" not in repr(
        shareable(Document("x", speedups=(Speedups(rows=(row,)),), races=(Race(lanes=(lane,)),)))
    )


def test_a_user_whose_name_is_an_option():
    """A user called "max" changes no candidate's name; one called "time" no kind of a span."""
    document = Document("tmpl:max_autotune", warnings=(Warned("by max", "noise"),))
    assert shareable(document, frozenset(["max", "noise"])) == document


def test_marks_that_turn_text_round_are_shown():
    """Control characters and marks of direction are escaped, since they make a name look like another."""
    assert shareable(Document("a\u202eb\x00\ud800")).title == "a\\u202eb\\x00\\ud800"

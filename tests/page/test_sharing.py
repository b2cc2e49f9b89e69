"""What a page does not tell."""

import getpass
import os
from pathlib import Path

import pytest

from backend_kwargs.page import Document, to_html, to_json
from backend_kwargs.page.document import Cause, Code, Graph, Option, Row, Source, Speedups, Warned
from backend_kwargs.page.sharing import Private, anonymous, here, shareable

JANE = Private(
    ("/home/jane", "C:\\Users\\jane"), (("jane", "<user>"), ("gpu7.corp.example", "<host>"), ("gpu7", "<host>"))
)


@pytest.mark.parametrize(
    ("text", "shared"),
    [
        pytest.param("/home/jane/m.py:12", "~/m.py:12", id="home"),
        pytest.param("/home/jane", "~", id="home alone"),
        pytest.param("/home/jane/clients/acme/m.py", "…/acme/m.py", id="deep in a home"),
        pytest.param("/home/bob/m.py", "~/m.py", id="home of another"),
        pytest.param("/home/jane2/m.py", "~/m.py", id="home of one with a longer name"),
        pytest.param("/Users/bob/m.py", "~/m.py", id="macOS"),
        pytest.param("C:\\Users\\bob\\m.py", "~\\m.py", id="Windows"),
        pytest.param("'c:\\\\Users\\\\bob\\\\m.py'", "'~\\\\m.py'", id="Windows in a repr"),
        pytest.param("/root/.cache/torch", "~/.cache/torch", id="root"),
        pytest.param("~bob/m.py", "~/m.py", id="tilde"),
        pytest.param("/mnt/ssd/home/bob/m.py", "~/m.py", id="home on a disk"),
        pytest.param("../../home/bob/m.py", "~/m.py", id="relative home"),
        pytest.param("dir=/home/bob,/home/eve", "dir=~,~", id="two homes"),
        pytest.param("x%2Fhome%2Fbob%2Fm.py", "x~%2Fm.py", id="encoded"),
        pytest.param("\\\\server\\secret\\m.py", "<share>", id="Windows share"),
        pytest.param("/tmp/torchinductor_jane/ab/x.py", "/tmp/torchinductor_<user>/ab/x.py", id="cache of Inductor"),
        pytest.param("/srv/acme/secret/lib/m.py", "…/lib/m.py", id="any path"),
        pytest.param("s3://acme/store?key=1", "<url>", id="store"),
        pytest.param("redis://jane:secret@gpu7:6379/0", "<url>", id="store with a password"),
        pytest.param("file:///home/bob/x", "<url>", id="file URL"),
        pytest.param("sqlite:////home/jane/x", "<url>", id="SQLite URL"),
        pytest.param("https://pytorch.org.evil.example/x", "<url>", id="not PyTorch's"),
        pytest.param("https://evil.example/pytorch.org/", "<url>", id="nor this"),
        pytest.param("https://docs.pytorch.org/a/b/c/d.html", "https://docs.pytorch.org/a/b/c/d.html", id="PyTorch's"),
        pytest.param("jane@gpu7.corp.example:/data", "<user>@<host>:/data", id="ssh"),
        pytest.param("run of jane on gpu7", "run of <user> on <host>", id="in words"),
        pytest.param("janet and gpu70", "janet and gpu70", id="other names"),
        pytest.param("aten/native/x, 1/2/3/4", "aten/native/x, 1/2/3/4", id="no paths"),
    ],
)
def test_anonymous(text, shared):
    """Homes, names, stores and where things lie are replaced; nothing else."""
    assert anonymous(text, JANE) == shared


@pytest.mark.parametrize("unit", ["/a", "a.", "\\", "~a", "a:/", "/home", "c:\\", "%2Fhome", "a@", "\\\\a", "/ "])
def test_hostile_texts_take_little_time(unit):
    """A text made to be slow is not: with quadratic patterns one of these takes minutes."""
    assert anonymous(unit * 200_000, JANE)


def leaky():
    """A document that tells everything, in each place where text may be."""
    text = f"{Path.home()}/x of {getpass.getuser()} /home/jane/x s3://acme/x gpu7"
    return Document(
        text,
        subtitle=text,
        environment={text: text},
        warnings=(Warned(text, "shared device", text),),
        speedups=(Speedups(text, text, rows=(Row(text, text, text),)),),
        graphs=(
            Graph(
                text,
                options=(Option("a", text, text, text),),
                causes=(Cause("break", text, text, Source(text, lines=(text,))),),
                codes=(Code.of(text, text),),
            ),
        ),
        notes=(text,),
    )


def test_a_whole_page_tells_nothing(monkeypatch):
    """Neither the page nor its data name a home, a user, a host or a store; nor does the code in it."""
    monkeypatch.setenv("HOME", "/home/jane")
    monkeypatch.setenv("USER", "jane")
    monkeypatch.setenv("HOSTNAME", "gpu7")
    shared = shareable(leaky())
    told = to_html(leaky()) + to_json(leaky()).decode() + shared.graphs[0].codes[0].text
    assert not [secret for secret in ("jane", "gpu7", "acme") if secret in told]
    assert shared.title.startswith("~/x of ")


def test_a_user_whose_name_is_an_option(monkeypatch):
    """A user called "max" changes no candidate's name; one called "time" no kind of a span."""
    document = Document(
        "x", warnings=(Warned("by max", "noise"),), speedups=(Speedups(rows=(Row("tmpl:max_autotune"),)),)
    )
    private = Private((), (("max", "<user>"), ("noise", "<user>")))
    shared = shareable(document, private)
    assert shared.speedups[0].rows[0].name == "tmpl:max_autotune"
    assert shared.warnings[0].kind == "noise"
    assert "~" in anonymous("/home/max/x", private)


def test_here_has_this_machine():
    """This process's home, user and host are known."""
    private = here()
    assert os.path.expanduser("~") in private.homes  # noqa: PTH111 - what others print
    assert (getpass.getuser(), "<user>") in private.names


def test_marks_that_turn_text_round_are_shown():
    """Control characters and marks of direction are escaped, since they make a name look like another."""
    assert shareable(Document("a\u202eb\x00\ud800")).title == "a\\u202eb\\x00\\ud800"

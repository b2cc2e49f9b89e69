"""The HTML: what names may do, what absent parts leave, the policy, the size."""

import base64
import hashlib
import re
from html.parser import HTMLParser
from importlib.resources import files

import msgspec
import pytest

from backend_kwargs.page import Document, fragment, to_html
from backend_kwargs.page.document import Part
from backend_kwargs.page.writing import policy
from tests.page import examples

HOSTILE = "</script></style><img src=x onerror=alert(1)>'\"{{7*7}}${1}\u2028]]><!--"


class Tags(HTMLParser):
    """Collects the tags with their attributes, and the text."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.text = [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text.append(data)


def hostile(value):
    """Return a part of a document with a hostile text in place of each text that is free."""
    if isinstance(value, Part):
        kept = ("kind", "packed", "direction")
        changed = {name: hostile(getattr(value, name)) for name in value.__struct_fields__ if name not in kept}
        return msgspec.structs.replace(value, **changed)
    if isinstance(value, tuple):
        return tuple(map(hostile, value))
    if isinstance(value, dict):
        return {f"{name}{HOSTILE}": hostile(each) for name, each in value.items()}
    return HOSTILE if isinstance(value, str) else value


@pytest.mark.parametrize("written", [to_html, fragment])
def test_hostile_names_are_text(written):
    """A hostile text in every place adds no element, no attribute and no request, and is shown as it is."""
    plain, attacked = Tags(written(examples.document())), Tags(written(hostile(examples.document())))
    assert {tag for tag, _ in attacked.tags} <= {tag for tag, _ in plain.tags}
    names = {name for _, attributes in attacked.tags for name in attributes}
    assert names <= {name for _, attributes in plain.tags for name in attributes}
    assert HOSTILE.replace("\u2028", "\\u2028") in attacked.text


def test_no_page_has_what_the_policy_forbids():
    """Neither style= nor on...= is in a page: hashes do not cover them; and nothing is loaded."""
    names = {name for _, attributes in Tags(to_html(examples.document())).tags for name in attributes}
    assert not [name for name in names if name.startswith("on") or name in ("style", "src", "srcset", "data", "action")]


def test_embedded_data_cannot_end_their_element():
    """The JSON in a page contains no "<", ">" or "&", nor separators of lines."""
    page = to_html(hostile(examples.document()))
    data = page.partition('id="report-data">')[2].partition("</script>")[0]
    assert not re.search("[<>&\u2028\u2029]", data)


def test_the_policy_has_the_hashes_of_what_is_inlined():
    """Exactly the style and the script of the page may act."""
    page = to_html(examples.document())
    found = [re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL) for tag in ("script", "style")]
    hashes = [base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for (each,) in found]
    expected = (
        f"default-src 'none'; script-src 'sha256-{hashes[0]}'; style-src 'sha256-{hashes[1]}'; "
        "base-uri 'none'; form-action 'none'"
    )
    assert policy() == expected
    assert ("meta", {"http-equiv": "Content-Security-Policy", "content": expected}) in Tags(page).tags


def test_templates_trust_nothing():
    """No template marks a text as safe."""
    folder = files("backend_kwargs.page") / "templates"
    assert not [each.name for each in folder.iterdir() if re.search(r"\|\s*safe|autoescape", each.read_text())]


def test_fifty_graphs_fit_into_a_megabyte():
    """A page of fifty graphs, each with its race and kernels, is smaller than 1 MB."""
    assert len(to_html(examples.document(50)).encode()) < 1_000_000


def test_absent_parts_leave_no_trace():
    """A page of a title alone has no section."""
    page = Tags(to_html(Document("Only a title")))
    assert not [tag for tag, _ in page.tags if tag in ("section", "nav", "table", "svg", "h2")]


@pytest.mark.parametrize(
    "part", ["verdict", "warnings", "speedups", "races", "tradeoffs", "graphs", "accuracy", "changes", "environment"]
)
def test_each_part_stands_alone(part):
    """A page of one part has that section and no other."""
    document = Document("x", **{part: getattr(examples.document(), part)})
    sections = [attributes["id"] for tag, attributes in Tags(to_html(document)).tags if tag == "section"]
    assert sections == [{"environment": "measured"}.get(part, part)]


def test_the_order_is_that_of_a_reader():
    """Verdict, warnings, speedups, the race, trade-offs, graphs, accuracy, the older report."""
    sections = [attributes["id"] for tag, attributes in Tags(to_html(examples.document())).tags if tag == "section"]
    wanted = "verdict warnings speedups races tradeoffs graphs accuracy changes measured"
    assert sections == wanted.split()


def test_the_verdict_is_one_sentence():
    """The first line says what to use, and how fast it is."""
    (sentence,) = re.findall(r'<p class="sentence">(.*?)</p>', to_html(examples.document()))
    assert re.sub("<.*?>", "", sentence) == (
        "Use tmpl-inductor:max_autotune+freezing: 1.19\N{MULTIPLICATION SIGN} as fast as the best torch mode "
        "(inductor, mode max-autotune) and 2.31\N{MULTIPLICATION SIGN} as fast as eager."
    )


def test_a_fragment_is_scoped():
    """A notebook gets no script, no ids, and styles that act only inside it."""
    text = fragment(examples.document())
    tags = Tags(text).tags
    assert "script" not in {tag for tag, _ in tags}
    assert not [attributes for _, attributes in tags if "id" in attributes]
    style = text.partition("<style>")[2].partition("</style>")[0]
    outside = re.sub(r"\{(?:[^{}]|\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\})*\}", "", style)
    assert all(".bk" in each for each in outside.split("\n") if each.strip() and not each.startswith("@media"))

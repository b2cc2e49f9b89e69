import pytest

from backend_kwargs.errors import BackendKwargsError
from backend_kwargs.options.option import (
    LONGEST,
    check_name,
    join_spec,
    split_assignment,
    split_candidates,
    split_outside,
    split_templates,
)

FORM = "letters, digits and '_', '-', '.', a letter first"


def wanted(name, what="A template"):
    rule = "must be letters, digits and '_', '-', '.', a letter first"
    return f"{what}'s name {rule}, got {name!r} ({type(name).__name__})."


@pytest.mark.parametrize(
    ("templates", "spec"),
    [
        pytest.param((), "tmpl-inductor", id="none"),
        pytest.param(("a",), "tmpl-inductor:a", id="one"),
        pytest.param(("a", "b"), "tmpl-inductor:a+b", id="two"),
    ],
)
def test_join_spec(templates, spec):
    """Templates follow a colon, joined by plus signs."""
    assert join_spec("tmpl-inductor", templates) == spec


def test_split_templates():
    """Templates joined by plus signs are split in order."""
    assert split_templates("b+a.x+c-d") == ("b", "a.x", "c-d")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        pytest.param("", "", id="nothing"),
        pytest.param("a+", "", id="nothing-after-plus"),
        pytest.param("a++b", "", id="nothing-between"),
        pytest.param("a:b", "a:b", id="colon"),
        pytest.param("a b", "a b", id="space"),
        pytest.param("a\n", "a\n", id="newline"),
        pytest.param("1a", "1a", id="digit-first"),
        pytest.param(3, 3, id="number"),
        pytest.param(["a"], ["a"], id="list"),
    ],
)
def test_split_templates_refuses(text, name):
    """The error for an invalid part of a spec says which names are valid."""
    with pytest.raises(BackendKwargsError) as e:
        split_templates(text)
    assert str(e.value) == wanted(name)


def test_check_name_says_whose():
    """The message says what is named."""
    with pytest.raises(BackendKwargsError) as e:
        check_name("A backend", "a+b")
    assert str(e.value) == wanted("a+b", "A backend")


@pytest.mark.parametrize(
    ("text", "candidates"),
    [
        pytest.param("eager", [("eager", {})], id="one"),
        pytest.param("a, b:c+d ,e", [("a", {}), ("b:c+d", {}), ("e", {})], id="several"),
        pytest.param("a,b,", [("a", {}), ("b", {})], id="comma-at-the-end"),
        pytest.param(
            "a[x=1,y.z=2],b[x=3]", [("a", {"x": "1", "y.z": "2"}), ("b", {"x": "3"})], id="options-of-their-own"
        ),
        pytest.param("a[of=ATEN,TRITON,y=2]", [("a", {"of": "ATEN,TRITON", "y": "2"})], id="comma-in-value"),
        pytest.param("a[x=[1,2],y=3],b", [("a", {"x": "[1,2]", "y": "3"}), ("b", {})], id="brackets-in-value"),
        pytest.param("a[x=1,max-size=2]", [("a", {"x": "1", "max-size": "2"})], id="hyphen-in-name"),
        pytest.param("a[x=b=c]", [("a", {"x": "b=c"})], id="equals-in-value"),
        pytest.param(" a [ x = 1 , y= 2 ] , b ", [("a", {"x": "1", "y": "2"}), ("b", {})], id="blanks"),
        pytest.param("a\n,\tb\n", [("a", {}), ("b", {})], id="lines-and-tabs"),
        pytest.param("a,b , ,\n", [("a", {}), ("b", {})], id="commas-and-blanks-at-the-end"),
        pytest.param("a[x=1],a[x=2]", [("a", {"x": "1"}), ("a", {"x": "2"})], id="one-name-twice"),
        pytest.param("a[x=1,x=2]", [("a", {"x": "2"})], id="one-option-twice"),
        pytest.param("A,a", [("A", {}), ("a", {})], id="another-case"),
        pytest.param("a[x=1, 2, y=3]", [("a", {"x": "1, 2", "y": "3"})], id="blanks-in-value"),
        pytest.param("a[x=]", [("a", {"x": ""})], id="no-value"),
        pytest.param("a[x=[1],y=[2]]", [("a", {"x": "[1]", "y": "[2]"})], id="two-lists"),
        pytest.param("a[x=1]\n", [("a", {"x": "1"})], id="line-end-after-options"),
    ],
)
def test_split_candidates(text, candidates):
    """Commas outside brackets separate candidates; commas inside separate options."""
    assert split_candidates(text) == candidates


@pytest.mark.parametrize(
    ("split", "text"),
    [
        pytest.param(split_candidates, "", id="nothing"),
        pytest.param(split_candidates, ",a", id="comma-first"),
        pytest.param(split_candidates, "a,,b", id="nothing-between"),
        pytest.param(split_candidates, "a[x=1", id="open-bracket"),
        pytest.param(split_candidates, "a[]", id="no-options"),
        pytest.param(split_candidates, "a]x=1[", id="brackets-turned"),
        pytest.param(split_candidates, "a[x=1]b", id="text-after-options"),
        pytest.param(split_candidates, "a, ,b", id="a-blank-between"),
        pytest.param(split_candidates, " ", id="a-blank"),
        pytest.param(split_candidates, "[x=1]", id="options-of-nothing"),
        pytest.param(split_candidates, " [x=1]", id="options-of-a-blank"),
        pytest.param(split_candidates, "a[x=[[1]]]", id="lists-in-lists"),
        pytest.param(split_candidates, "a[x=1][y=2]", id="options-twice"),
        pytest.param(split_assignment, "a", id="no-equals"),
        pytest.param(split_assignment, " =1", id="no-name"),
    ],
)
def test_what_cannot_be_split(split, text):
    """The error for a list or an option that cannot be parsed shows the right form."""
    form = {
        split_candidates: f"backends {text!r}; write them 'a,b:template,c[option=value]'.",
        split_assignment: f"option {text!r}; write it 'name=value'.",
    }
    with pytest.raises(BackendKwargsError) as e:
        split(text)
    assert str(e.value) == f"Cannot read {form[split]}"


@pytest.mark.parametrize(
    ("name", "valid"),
    [
        pytest.param("a", True, id="a-letter"),
        pytest.param("_", True, id="an-underscore"),
        pytest.param("a-", True, id="a-hyphen-last"),
        pytest.param("-a", False, id="a-hyphen-first"),
        pytest.param(".a", False, id="a-dot-first"),
        pytest.param(" a", False, id="a-blank-first"),
        pytest.param("a ", False, id="a-blank-last"),
        pytest.param("\u00e4", False, id="a-letter-of-another-alphabet-first"),
        pytest.param(b"a", False, id="bytes"),
    ],
)
def test_what_is_a_name(name, valid):
    """A letter or an underscore first, then letters, digits, '_', '-' and '.'."""
    if valid:
        check_name("A template", name)
        return
    with pytest.raises(BackendKwargsError) as e:
        check_name("A template", name)
    assert str(e.value) == wanted(name)


@pytest.mark.parametrize(("length", "taken"), [(LONGEST, True), (LONGEST + 1, False)], ids=["at", "above"])
def test_the_longest_spec(length, taken):
    """10000 characters are looked up, more are not."""
    if taken:
        assert split_templates("a" * length) == ("a" * length,)
        return
    with pytest.raises(BackendKwargsError, match="Template names must be at most 10000 characters long, got 'aaa"):
        split_templates("a" * length)


def test_split_outside():
    """Commas within brackets separate nothing; blanks and empty parts are left out."""
    assert split_outside(" a , b[x=1, y=2] ,, c") == ["a", "b[x=1, y=2]", "c"]


def test_split_assignment():
    """The first equals sign separates name and value; spaces around them are removed."""
    assert split_assignment(" a.b = c=d ") == ("a.b", "c=d")

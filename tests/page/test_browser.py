"""Pages in a real browser: Debian's chromium under playwright; skipped where there is none."""

import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

from backend_kwargs.page import Document, fragment, to_html
from tests.page import examples
from tests.page.test_writing import HOSTILE, hostile

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
MISSING = "no chromium" if not BROWSER else "no playwright" if not find_spec("playwright") else ""
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"{MISSING}: apt-get install chromium, pip install playwright")
WIDTHS = (1280, 768, 380)


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield started
        started.close()


class Opened:
    """A page from a file, with what it logged and requested."""

    def __init__(self, context, path):
        self.page, self.said, self.requests = context.new_page(), [], []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.set_default_timeout(15_000)
        self.page.goto(path.as_uri())
        self.uri = path.as_uri()

    def check_quiet(self):
        """Fail if anything was logged, or requested besides the file."""
        assert (self.said, self.requests) == ([], [self.uri])


@pytest.fixture
def opened(browser, tmp_path):
    """A function that opens HTML, by default the page with all parts, in a context with these settings."""
    contexts = []

    def opens(text=None, **settings):
        path = tmp_path / "page.html"
        path.write_text(text or to_html(examples.document()), encoding="utf-8")
        contexts.append(browser.new_context(offline=True, **settings))
        return Opened(contexts[-1], path)

    yield opens
    for context in contexts:
        context.close()


def names(page, selector="#speedups tbody tr"):
    """Return the first column of the rows that are visible."""
    rows = page.locator(f"{selector}:visible")
    return rows.evaluate_all("rows => rows.map(row => row.querySelector('th').firstChild.data.trim())")


def test_rows_are_sorted_by_a_column(opened):
    """A click on a heading sorts by its figures, a second one the other way; what has none stays last."""
    page = opened().page
    compile_s = page.get_by_role("button", name="Compile", exact=True).first
    compile_s.click()
    assert names(page)[0] == "tmpl-inductor[precision=bf16]"
    assert page.locator("#speedups th[aria-sort]").get_attribute("aria-sort") == "ascending"
    compile_s.click()
    assert names(page)[0] == "tmpl-tvm"
    assert set(names(page)[-2:]) == {"eager", "tmpl-inductor:cutlass"}
    page.get_by_role("button", name="Candidate", exact=True).first.press("Enter")
    assert names(page) == sorted(names(page))


def test_rows_are_searched(opened):
    """Typing leaves the rows that contain the text, and says how many there are."""
    page = opened().page
    page.get_by_role("searchbox").fill("Unavailable")
    assert names(page) == ["tmpl-inductor:cutlass"]
    assert page.locator("#speedups output").inner_text() == "1 of 9 rows"


def test_a_search_opens_what_is_folded(opened):
    """Of many groups all but the first are folded; a search opens those that contain it, and hides the others."""
    cases = tuple(examples.speedups(f"case {n}") for n in range(5))
    page = opened(to_html(Document("x", speedups=cases))).page
    assert len(names(page)) == 9
    page.get_by_role("searchbox").fill("case 3")
    assert page.locator("details:visible h3").all_inner_texts() == ["case 3"]
    assert len(names(page)) == 9


def test_absolute_times_on_demand(opened):
    """A box shows the column of times, also without a script."""
    page = opened(java_script_enabled=False).page
    heading = page.locator("#speedups th.abs")
    assert not heading.is_visible()
    page.get_by_label("Absolute times").check()
    assert heading.is_visible()


def test_the_line_to_paste_is_copied(opened):
    """The button copies the code."""
    page = opened(permissions=["clipboard-read", "clipboard-write"]).page
    page.get_by_role("button", name="Copy").click()
    page.get_by_role("button", name="Copied").wait_for()
    pasted = page.evaluate("navigator.clipboard.readText()")
    assert pasted == 'torch.compile(model, backend="tmpl-inductor:max_autotune+freezing")'


def test_without_a_script(opened):
    """Every table and plot is there; no control is that would do nothing."""
    page = opened(java_script_enabled=False).page
    assert len(names(page)) == 9
    assert page.locator("#speedups svg circle").count() == 7
    assert not page.get_by_role("searchbox").is_visible()
    assert page.locator("button:visible").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_layout(opened, width, scheme):
    """At three widths, light and dark: nothing is wider than the page, plots are filled, and there is contrast."""
    found = opened(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = found.page
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert 2000 < page.evaluate("document.documentElement.scrollHeight") < 14_000
    outside = """() => [...document.querySelectorAll("td.plot > svg")].filter(svg => {
        const box = svg.getBoundingClientRect(), marks = [...svg.querySelectorAll("circle, rect:not(.g)")];
        return box.width > 0 && (box.width < 100 || box.height < 15 || !marks.length || marks.some(mark => {
            const at = mark.getBoundingClientRect();
            return at.left < box.left - 3 || at.right > box.right + 3 || at.width <= 0;
        }));
    }).length"""
    assert page.evaluate(outside) == 0
    check_ink(page.screenshot(full_page=True), dark=scheme == "dark")


def check_ink(png, *, dark):
    """Fail if a picture is not mostly ground with some ink on it, in each of its tenths but the last."""
    import io

    from matplotlib.image import imread

    grey = imread(io.BytesIO(png), format="png")[..., :3].mean(axis=2)
    ground = grey[5, 5]
    assert (ground < 0.2) if dark else (ground > 0.9)
    inked = abs(grey - ground) > 0.3
    height = len(grey) // 10
    shares = [float(inked[n * height : (n + 1) * height].mean()) for n in range(9)]
    assert all(0.002 < share < 0.4 for share in shares), shares


@pytest.mark.parametrize(
    ("text", "schemes"),
    [
        pytest.param(lambda: to_html(examples.document(2)), ("light", "dark"), id="all parts"),
        pytest.param(lambda: to_html(examples.compared()), ("dark",), id="a real compare"),
        pytest.param(lambda: to_html(Document("A title alone")), ("light",), id="a title alone"),
    ],
)
def test_accessible(opened, text, schemes):
    """axe-core finds no violation of any severity, with all that opens opened: wide, and narrow."""
    axe = pytest.importorskip("axe_playwright_python", reason="pip install axe-playwright-python")
    found = opened(text(), viewport={"width": 1280, "height": 900})
    found.page.evaluate((Path(axe.__file__).parent / "axe.min.js").read_text(encoding="utf-8"))
    found.page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    found.page.evaluate("document.querySelectorAll('button.unpack').forEach(each => each.click())")
    for scheme in schemes:
        found.page.emulate_media(color_scheme=scheme)
        assert violations(found.page) == []
    found.page.set_viewport_size({"width": 380, "height": 900})
    assert violations(found.page) == []
    found.check_quiet()


def violations(page):
    """Return what axe-core finds: the rule, and the first element that breaks it."""
    found = page.evaluate("axe.run({ resultTypes: ['violations'] })")["violations"]
    return [(each["id"], each["nodes"][0]["html"][:200]) for each in found]


def test_keyboard(opened):
    """Tab reaches the links, the code, the button, the search and the headings, in the order of the page."""
    page = opened(java_script_enabled=True).page
    reached = []
    for _ in range(18):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.tagName"))
    assert reached[:9] == ["A"] * 9
    assert reached[9:13] == ["PRE", "BUTTON", "INPUT", "INPUT"]
    assert reached[13:] == ["BUTTON"] * 5


def test_print(opened):
    """On paper all that is folded is open, and there are no controls."""
    page = opened(to_html(examples.document(3)), color_scheme="dark").page
    page.emulate_media(media="print")
    assert not page.locator("nav").is_visible()
    assert not page.locator(".controls").is_visible()
    assert page.evaluate("[...document.querySelectorAll('#graphs details > h3')].every(each => each.checkVisibility())")
    assert page.evaluate("getComputedStyle(document.body).color") == "rgb(0, 0, 0)"


def test_hostile_names_are_inert(opened):
    """A page of hostile names runs nothing, loads nothing, logs nothing, and stays within its width."""
    found = opened(to_html(hostile(examples.document())), viewport={"width": 380, "height": 900})
    found.page.get_by_role("searchbox").fill("x")
    for button in found.page.locator("th.sort button:visible").all()[:8]:
        button.click()
    assert HOSTILE[:20] in found.page.title()
    assert found.page.locator("img").count() == 0
    assert found.page.evaluate("document.documentElement.scrollWidth") <= 380
    found.check_quiet()


def test_fragments_in_a_notebook(opened):
    """Two fragments in a page change nothing outside them, and log nothing."""
    outside = "<!doctype html><html lang=en><title>n</title><h1>Notebook</h1><table><tr><td>a</table>"
    plain, found = opened(outside), opened(outside + fragment(examples.document()) * 2)
    styles = """() => ["body", "h1", "td"].map(each => {
        const style = getComputedStyle(document.querySelector(each));
        return [style.font, style.margin, style.padding, style.color, style.display];
    })"""
    assert found.page.evaluate(styles) == plain.page.evaluate(styles)
    assert found.page.locator(".bk section").count() == 18
    found.check_quiet()

"""Reports looked at in a real browser."""

import pytest

from browser import Browser, find_browser
from journals import Journal, write_failed, write_recovered, write_sweep
from robust_train.cli.main import main
from robust_train.folder.memory_samples import Sample, encode
from robust_train.readable import GIB

pytestmark = pytest.mark.slow

WIDTHS = {"desktop": 1280, "tablet": 800, "phone": 360}


@pytest.fixture(scope="module")
def browser():
    program = find_browser()
    if program is None:
        pytest.skip("no browser: `just browser` installs one, ROBUST_TRAIN_BROWSER names one")
    with Browser(program) as browser:
        yield browser


def write_died(journal):
    write_recovered(journal)
    lines = (journal.folder / "journal.jsonl").read_text().splitlines()
    (journal.folder / "journal.jsonl").write_text("\n".join(lines[:12]) + '\n{"time": 17')


def write_long(journal):
    """Samples of a GPU: saw teeth of eight micro-batches a step."""
    write_recovered(journal)
    with (journal.folder / "memory.jsonl").open("w") as file:
        for i in range(3000):
            device, sizes = (2, "cuda:0", i // 8), (4 + i % 8, 12, 14, 16, 1)
            at = journal.at - 13 + 12 * i / 3000
            print(encode(Sample(at, *device, *(GIB * size for size in sizes))), file=file)


REPORTS = {
    "recovered": write_recovered,
    "failed": write_failed,
    "died": write_died,
    "long_run": write_long,
    "sweep": lambda journal: write_sweep(journal.folder),
}

OVERLAPS = """
[...document.querySelectorAll("figure")].flatMap(figure => {
  const texts = [...figure.querySelectorAll(".tick, .row, .legend, h3, .plot, .quiet")]
    .map(text => [text, text.getBoundingClientRect()])
    .filter(([, frame]) => frame.width);
  return texts.flatMap(([first, a], i) => texts.slice(i + 1)
    .filter(([, b]) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
      && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 3)
    .map(([second]) => [figure.textContent.slice(0, 40), first.textContent, second.textContent]));
})
"""
SMALLEST_TEXT = """
Math.min(...[...document.querySelectorAll("figure span, figure li")]
  .map(text => text.getBoundingClientRect().height).filter(height => height))
"""


@pytest.fixture
def shown(browser, tmp_path):
    pages = []

    def show(name, width=1280, **how):
        REPORTS[name](Journal(tmp_path))
        assert main(["report", str(tmp_path)]) == 0
        pages.append(browser.open(tmp_path / "report.html", width=width, **how))
        return pages[-1]

    yield show
    for page in pages:
        page.close()


@pytest.mark.parametrize("name", REPORTS)
@pytest.mark.parametrize("device", WIDTHS)
def test_a_browser_shows_the_report(shown, name, device):
    page = shown(name, WIDTHS[device])
    assert page.complaints == []
    assert page.requests == []
    assert page.evaluate("document.documentElement.scrollWidth") <= WIDTHS[device]
    assert page.evaluate(OVERLAPS) == []
    assert page.evaluate(SMALLEST_TEXT) > 9
    picture = page.screenshot()
    assert picture.width == WIDTHS[device]
    assert len(picture.convert("RGB").getcolors(1 << 24)) > 50, "more than a blank page"


@pytest.mark.parametrize("dark", [False, True])
def test_a_dark_page_prints_on_white_paper(shown, dark):
    """The browser prefers dark."""
    page = shown("recovered", dark=dark)
    pixels = page.screenshot().convert("L").resize((1, 1)).getpixel((0, 0))
    assert pixels < 60 if dark else pixels > 200
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    ink = "getComputedStyle(document.documentElement).getPropertyValue('--ink')"
    assert page.evaluate(ink) == "#1c2127"


WHERE = """(() => { const plot = document.querySelector("figure.chart .u-over");
plot.scrollIntoView({block: "center"});
const frame = plot.getBoundingClientRect();
return [frame.left, frame.top, frame.width, frame.height]; })()"""
READOUT = 'document.querySelector("#readout")'


def test_the_pointer_reads_values_out(shown):
    page = shown("long_run")
    left, top, width, height = page.evaluate(WHERE)
    page.point_at(left + 0.7 * width, top + 0.4 * height)
    told = page.until(f"!{READOUT}.hidden && {READOUT}.textContent")
    assert "allocated: " in told
    assert "GiB" in told
    page.point_at(1, 1)
    assert page.until(f"{READOUT}.hidden")
    assert page.complaints == []


def test_a_drag_zooms_in(shown):
    """A double click zooms out."""
    page = shown("long_run")
    left, top, width, height = page.evaluate(WHERE)
    marks = """[...document.querySelectorAll("figure.chart .mark")].filter(mark => !mark.hidden)"""
    before = page.evaluate(f"{marks}.length")
    x, y = left + 0.7 * width, top + 0.4 * height
    page.press("mousePressed", x, y)
    page.point_at(x + 40, y, button="left")
    page.press("mouseReleased", x + 40, y)
    assert page.until(f"{marks}.length < {before}"), "the marks go with the axis"
    for clicks in (1, 2):
        page.press("mousePressed", x, y, clicks)
        page.press("mouseReleased", x, y, clicks)
    assert page.until(f"{marks}.length === {before}")
    assert page.complaints == []


def test_pages_are_readable_without_scripts(shown):
    """Words, tables and marks are all there."""
    page = shown("recovered", script=False)
    text = page.evaluate("document.body.innerText")
    for words in ("Completed in", "half the micro-batch", "Timeline", "Loss over", "JavaScript"):
        assert words in text

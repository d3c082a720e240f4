"""The page as a file: whole, self-contained, readable in both schemes; looked at in a browser in test_report_browser."""

import csv
import io
import itertools
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

import fedmutual.report
from fedmutual.errors import RunError
from fedmutual.report.html import write_report
from run_folders import SERVES, Made, write, write_all

VOID = {"meta", "link", "br", "hr", "img", "input"}
CSS = (Path(fedmutual.report.__file__).parent / "templates" / "style.css").read_text()


class Page(HTMLParser):
    """The elements of a page in their order; fails where one is closed that is not open."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.texts, self._open = [], [], []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self.texts.append("")
        if tag not in VOID:
            self._open.append((tag, len(self.elements) - 1))

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag):
        opened, _ = self._open.pop()
        assert opened == tag

    def handle_data(self, data):
        for _, number in self._open:
            self.texts[number] += data

    def all(self, tag):
        return [(marks, text) for (name, marks), text in zip(self.elements, self.texts, strict=True) if name == tag]


def methods(**fields):
    def rising(last, seed):
        return lambda s, r, c="0": min(1.0, last - 0.4 / r + 0.01 * int(c) + seed * s)

    return [
        Made("fml", rising(0.9, 0.01), rising(0.85, 0.02), shared_own=rising(0.87, 0.01), **fields),
        Made("fedavg", rising(0.8, 0.02), rising(0.86, 0.01), **fields),
        Made("fedprox", rising(0.78, -0.02), rising(0.84, -0.01), **fields),
        Made("independent", rising(0.88, 0.005), **fields),
    ]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """As large as the demo's comparison: four methods, three seeds, five clients, ten classes, twenty rounds."""
    folder = tmp_path_factory.mktemp("page")
    made = methods(rounds=20, clients=tuple("01234"), classes=tuple("0123456789"))
    write_report(write_all(folder / "out", made, [0, 1, 2]), folder / "report.html")
    return (folder / "report.html").read_text()


def test_the_page_is_well_formed_and_its_ids_are_unique(page):
    ids = [marks["id"] for _, marks in Page(page).elements if "id" in marks]
    assert len(ids) == len(set(ids)) > 20


def test_every_reference_within_the_page_is_there(page):
    elements = Page(page).elements
    ids = {marks["id"] for _, marks in elements if "id" in marks}
    named = {marks["href"][1:] for _, marks in elements if marks.get("href", "").startswith("#")}
    named |= {marks["aria-labelledby"] for _, marks in elements if "aria-labelledby" in marks}
    assert named <= ids


def test_nothing_is_loaded_from_anywhere(page):
    for tag, marks in Page(page).elements:
        for name in ("src", "href", "srcset", "action"):
            assert marks.get(name, "#").startswith(("#", "data:")), (tag, marks)
    assert "http:" not in page
    assert "https:" not in page
    assert "@import" not in page
    assert "url(" not in page
    assert "default-src 'none'" in page


def test_its_size(page):
    assert len(page.encode()) < 150_000


def test_headings_go_down_one_level_at_a_time(page):
    levels = [int(tag[1]) for tag, _ in Page(page).elements if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(b <= a + 1 for a, b in itertools.pairwise(levels))


def test_tables_and_pictures_say_what_they_are(page):
    parsed = Page(page)
    assert len(parsed.all("table")) == len(parsed.all("caption")) > 10
    assert all(text.strip() for _, text in parsed.all("caption"))
    assert all("scope" in marks for marks, _ in parsed.all("th"))
    pictures = parsed.all("svg")
    assert len(pictures) == 5  # the gains, four of curves
    assert all(marks["role"] == "img" and marks["aria-label"] for marks, _ in pictures)


def test_pictures_have_real_text_and_the_page_s_colours(page):
    svg = "".join(re.findall(r"<svg.*?</svg>", page, re.S))
    assert "<text" in svg
    assert ">round</text>" in svg
    assert "FedAvg</text>" in svg
    assert "#fe01" not in page  # a stand-in that was not replaced
    styles = re.findall(r"^\.p\d+ \{(.*)\}$", page, re.M)
    assert any("stroke: var(--s1)" in s for s in styles)
    for style in styles:
        assert re.findall(r"(?:fill|stroke): ((?!none|var).*?)[;}]", style) == []


def test_the_csv_under_a_picture_holds_its_numbers(page):
    links = {m["download"]: m["href"] for m, _ in Page(page).all("a") if "download" in m}
    assert links["c1-global-data.csv"].startswith("data:text/csv;charset=utf-8,")
    rows = list(csv.DictReader(io.StringIO(unquote(links["c1-global-data.csv"].partition(",")[2]))))
    assert len(rows) == 20
    assert rows[19]["FML, seed 2"] == "0.8700"  # 0.85 - 0.4 / 20 + 0.02 * 2
    brief = [marks["id"] for marks, _ in Page(page).all("table") if f"{marks['id']}.csv" not in links]
    assert brief == ["c1-headline-brief"]  # whose numbers are in the CSV of c1-headline


def test_names_are_text_and_never_markup(tmp_path):
    nasty = "<script>alert(1)</script>`<b>`&\"'"
    made = Made("fml", lambda s, r, c: 0.5, clients=(nasty, "b", "c"), classes=(nasty, "1", "2"), name=nasty)
    alone = Made("independent", lambda s, r, c: 0.5, clients=(nasty, "b", "c"), classes=(nasty, "1", "2"), name=nasty)
    write_report(write_all(tmp_path / "out", [made, alone], [0]), tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert "<script>alert" not in text
    assert "<b>" not in text
    assert any(about.startswith(f"{nasty} · ") for _, about in Page(text).all("p"))


def test_comparisons_on_different_data_have_distinct_titles(tmp_path):
    a = write_all(tmp_path / "a", methods(name="first"), [0])
    b = write_all(tmp_path / "b", methods(name="second", config={"partition": {"kind": "iid", "clients": 3}}), [0])
    write_report([*a, *b], tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert [t for _, t in Page(text).all("h2")][:2] == ["first", "second"]
    assert "do not compare numbers of different comparisons" in text
    ids = [marks["id"] for _, marks in Page(text).elements if "id" in marks]
    assert len(ids) == len(set(ids))
    assert "partition.kind" in [t for _, t in Page(text).all("th")]
    levels = [int(tag[1]) for tag, _ in Page(text).elements if re.fullmatch("h[1-6]", tag)]
    assert all(b <= a + 1 for a, b in itertools.pairwise(levels))


def test_the_page_is_replaced_in_one_step(tmp_path, monkeypatch):
    run = write(tmp_path / "run", methods()[0])
    out = tmp_path / "deep" / "report.html"
    write_report([run], out)
    before = out.read_text()

    def fail(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(RunError, match=r"report\.html: cannot be written \(No space left on device\)"):
        write_report([run], out)
    assert out.read_text() == before
    assert [p.name for p in out.parent.iterdir()] == ["report.html"]


def test_a_link_in_the_way_of_the_part_is_not_followed(tmp_path, monkeypatch):
    """Somebody who shares the folder would have the page written into another file of the user's."""
    monkeypatch.setattr("fedmutual.files.token_hex", lambda size: "0" * 2 * size)
    out, victim = tmp_path / "report.html", tmp_path / "victim"
    (tmp_path / f".report.html.{os.getpid()}-{'0' * 16}.part").symlink_to(victim)
    with pytest.raises(RunError, match="cannot be written"):
        write_report([write(tmp_path / "run", methods()[0])], out)
    assert not victim.exists()
    assert not out.exists()


def test_the_same_runs_make_the_same_page(tmp_path):
    runs = write_all(tmp_path / "out", methods(), [0, 1])
    write_report(runs, tmp_path / "a.html")
    write_report(runs, tmp_path / "b.html")
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


def _scheme(dark):
    """The CSS variables of a scheme: name -> (r, g, b)."""
    head, _, rest = CSS.partition("@media screen and (prefers-color-scheme: dark)")
    text = rest[: rest.index("}\n}")] if dark else head
    colours = {k: tuple(int(v[i : i + 2], 16) for i in (0, 2, 4)) for k, v in re.findall(r"--(\w+): #(\w{6});", text)}
    heat = re.search(r"--heat: (\d+) (\d+) (\d+);", text)
    return colours | {"heat": tuple(map(int, heat.groups()))}


def _contrast(first, second):
    """WCAG 2.2's contrast ratio of two sRGB colours."""

    def luminance(rgb):
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (v / 255 for v in rgb)]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(first), luminance(second)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_contrast_is_measured_as_wcag_does():
    assert _contrast((0, 0, 0), (255, 255, 255)) == pytest.approx(21)
    assert _contrast((119, 119, 119), (255, 255, 255)) == pytest.approx(4.48, abs=0.005)  # #777, the known near miss


@pytest.mark.parametrize("dark", [False, True])
def test_text_has_enough_contrast_in_both_schemes(dark):
    colours = _scheme(dark)
    assert len(colours) == 17
    for name in ("ink", "muted", "link", "gain", "harm", *(f"s{k}" for k in range(1, 9))):
        for ground in ("paper", "raised"):
            assert _contrast(colours[name], colours[ground]) >= 4.5, (name, ground)


@pytest.mark.parametrize("dark", [False, True])
def test_numbers_in_the_fullest_shade_have_enough_contrast(dark):
    colours = _scheme(dark)
    most = float(re.search(r"calc\(var\(--p\) \* (\.\d+)\)", CSS)[1])
    full = tuple(most * h + (1 - most) * p for h, p in zip(colours["heat"], colours["paper"], strict=True))
    assert _contrast(colours["ink"], full) >= 4.5
    assert _contrast(colours["muted"], colours["paper"]) >= 4.5


@pytest.mark.parametrize(
    ("name", "domains", "sends"),
    [
        *((name, domains, "in rounds") for name in SERVES for domains in (False, True)),
        *((name, False, sends) for name in ("fml", "fedavg", "fedh2l") for sends in ("at the start", "nothing")),
    ],
)
def test_a_single_run_that_was_scored_once_has_a_page(name, domains, sends, tmp_path):
    """The least there can be: one method, one seed, one evaluation."""
    bytes_of = {
        "in rounds": lambda r, c: [("any", 10, 10)],
        "at the start": lambda r, c: [] if r else [("seed", 0, 10)],
        "nothing": lambda r, c: [],
    }
    reach = (lambda s, r, c: (0.7, 0.8, 0.6)) if domains else None
    shared = (lambda s, r: 0.7) if SERVES[name] == "global" and not domains else (lambda s, r: None)
    run = Made(name, lambda s, r, c: 0.8, shared, rounds=1, reach=reach, sent=bytes_of[sends])
    write_report([write(tmp_path / "run", run)], tmp_path / "report.html")
    assert "</html>" in (tmp_path / "report.html").read_text(encoding="utf-8")

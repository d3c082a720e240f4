"""The page in a browser: both schemes, a phone's width, print; nothing leaves the page."""

import csv
import io
from dataclasses import replace
from urllib.parse import unquote

import pytest
from matplotlib.image import imread

from fedmutual.report.html import write_report
from run_folders import Made, write, write_all

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    folder = tmp_path_factory.mktemp("browser")
    methods = [
        Made("fml", lambda s, r, c: 0.8 - 0.3 / r, lambda s, r: 0.7 - 0.2 / r, rounds=5),
        Made("fedavg", lambda s, r, c: 0.7 - 0.3 / r, lambda s, r: 0.75 - 0.2 / r, rounds=5),
        Made("independent", lambda s, r, c: 0.75 - 0.3 / r, rounds=5),
    ]
    write_report(write_all(folder / "out", methods, [0, 1]), folder / "report.html")
    return (folder / "report.html").as_uri()


@pytest.fixture
def visit(new_page, address):
    """Open the page in a context of its own -> (page, what the console said, what was asked of the network)."""

    def open_page(**options):
        (page, console_messages), requested_urls = new_page(**options), []

        def record(route):
            if route.request.url == address:
                route.continue_()
            else:
                requested_urls.append(route.request.url)
                route.abort()

        page.route("**/*", record)
        page.goto(address)
        return page, console_messages, requested_urls

    return open_page


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1280])
def test_it_opens_quietly_and_fits(visit, scheme, width):
    page, console_messages, requested_urls = visit(color_scheme=scheme, viewport={"width": width, "height": 900})
    page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.evaluate("document.body.scrollWidth") <= width
    outside = """[...document.querySelectorAll('h1, h2, h3, p, li, svg, dd, summary, .verdict, .scroll')]
        .filter(e => e.checkVisibility() && !e.closest('.scroll :scope') && e.getBoundingClientRect().right > innerWidth + 1)
        .map(e => e.outerHTML.slice(0, 80))"""
    assert page.evaluate(outside) == []
    assert (console_messages, requested_urls) == ([], [])


def test_the_schemes_differ_in_page_and_picture(visit):
    def colours(scheme):
        page, _, _ = visit(color_scheme=scheme)
        return page.evaluate(
            """() => [getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color,
                getComputedStyle(document.querySelector('#c1-curves ~ .pictures svg text')).fill]"""
        )

    light, dark = colours("light"), colours("dark")
    assert light == ["rgb(252, 252, 250)", "rgb(27, 30, 34)", "rgb(85, 91, 99)"]
    assert dark == ["rgb(21, 24, 28)", "rgb(230, 230, 226)", "rgb(164, 170, 178)"]


def test_the_text_of_pictures_is_in_the_page_s_font_and_legible_on_a_phone(visit):
    page, _, _ = visit(viewport={"width": 400, "height": 900})
    fonts = page.evaluate(
        """() => [getComputedStyle(document.body).fontFamily, ...[...document.querySelectorAll('svg text')]
            .map(t => getComputedStyle(t).fontFamily)]"""
    )
    assert len(set(fonts)) == 1
    page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    heights = page.evaluate(
        """() => [...document.querySelectorAll('svg')]
            .map(s => 11 * s.getBoundingClientRect().width / s.viewBox.baseVal.width)"""
    )
    assert min(heights) >= 9  # pixels of the letters' nominal size of 11


def test_details_open_to_the_numbers_and_their_csv(visit):
    page, console_messages, requested_urls = visit()
    table = page.locator("#c1-global-data")
    assert not table.is_visible()
    page.locator("details", has=table).locator("summary").click()
    assert table.is_visible()
    assert table.locator("tbody tr").last.inner_text().split() == ["5", "66.0", "71.0"]  # 0.7 - 0.2 / 5, 0.75 - 0.2 / 5
    link = page.locator("details", has=table).get_by_role("link", name="CSV")
    rows = list(csv.DictReader(io.StringIO(unquote(link.get_attribute("href").partition(",")[2]))))
    assert rows[4]["FedAvg, seed 1"] == "0.7100"
    with page.expect_download() as download:
        link.click()
    assert download.value.suggested_filename == "c1-global-data.csv"
    assert console_messages == []
    assert [a for a in requested_urls if not a.startswith("data:")] == []


def test_pointing_at_a_round_says_its_numbers(visit):
    page, console_messages, _ = visit()
    tip = page.locator("#tip")
    assert tip.is_hidden()
    page.locator("#c1-curves ~ .pictures svg").first.locator("rect").last.hover()
    assert tip.inner_text().splitlines() == ["Round 5", "FML 66.0", "FedAvg 71.0"]
    page.locator(".answer svg").locator("rect").nth(1).hover()  # below the mean
    client = "client 0: +5.00 points, 95 % interval +5.00 to +5.00"
    assert tip.inner_text().splitlines() == [client, "seed 0: +5.00 points", "seed 1: +5.00 points"]
    page.locator("h1").hover()
    assert tip.is_hidden()
    assert console_messages == []


def test_without_script_titles_stay(new_page, address):
    page, _ = new_page(java_script_enabled=False)
    page.goto(address)
    assert page.locator("svg title").count() > 0


def test_the_headline_is_cards_on_a_phone_and_stays_a_table_to_a_reader(visit):
    page, _, _ = visit(viewport={"width": 400, "height": 900})
    table = page.get_by_role("table", name="Last round")
    assert table.get_by_role("row").count() >= 3
    assert table.get_by_role("rowheader", name="FML").is_visible()
    box = table.bounding_box()
    assert box["x"] + box["width"] <= 400


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_table_that_is_wider_than_a_phone_fades_where_it_goes_on(visit, scheme):
    page, _, _ = visit(color_scheme=scheme, viewport={"width": 400, "height": 900})
    page.locator("#c1-beyond").click()
    scroll = page.locator(".scroll", has=page.locator("#c1-beyond-table"))
    wide = scroll.evaluate("e => [e.scrollWidth, e.clientWidth]")
    assert wide[0] > wide[1] + 100

    def shade():
        """How far the right edge is from the page's own colour, of 255, above the caption, where nothing is written."""
        picture = imread(io.BytesIO(scroll.screenshot()))[:, :, :3].mean(2) * 255
        return abs(float(picture[1, -2] - picture[1, 100]))

    assert shade() > 12
    scroll.evaluate("e => { e.scrollLeft = e.scrollWidth; }")
    assert shade() < 2


def test_a_key_stays_on_one_line_on_a_phone(browser, tmp_path):
    runs = [
        write(tmp_path / name, Made("fml", lambda s, r, c: 0.5, name=name, config={"model": model}))
        for name, model in (("a", {"shared": "mlp"}), ("b", {"shared": "cnn1", "a_long_name_of_a_key": ["mlp", "cnn1"] * 9}))
    ]
    runs.append(write(tmp_path / "c", Made("fml", lambda s, r, c: 0.5, name="c", config={"data": {"name": "mnist"}})))
    write_report(runs, tmp_path / "report.html")
    context = browser.new_context(viewport={"width": 400, "height": 900})
    page = context.new_page()
    page.goto((tmp_path / "report.html").as_uri())
    lines = """[...document.querySelectorAll('.keys tbody th')].map(th => {
        const range = document.createRange(); range.selectNodeContents(th); return range.getClientRects().length; })"""
    line_counts = page.evaluate(lines)
    assert len(line_counts) >= 2
    assert set(line_counts) == {1}
    context.close()


def test_print_is_light_and_whole(visit):
    page, _, _ = visit(color_scheme="dark", viewport={"width": 720, "height": 1000})
    page.emulate_media(media="print", color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.evaluate("getComputedStyle(document.body).color") == "rgb(27, 30, 34)"
    assert not page.locator(".csv").first.is_visible()
    assert page.evaluate("getComputedStyle(document.querySelector('.scroll')).overflowX") == "visible"
    assert page.locator("#c1-headline-brief").is_visible()
    assert page.evaluate("document.documentElement.scrollWidth") == 720  # of about A4's width nothing is cut off
    assert page.pdf(format="A4")[:4] == b"%PDF"


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """Address of a page as large as the demo's: two comparisons, of three and of four methods, five clients, five seeds."""
    folder = tmp_path_factory.mktemp("demo")
    runs = []
    for name, step, algorithms in (("first", -0.02, ["fml", "fedavg"]), ("second", 0.02, ["fml", "fedavg", "fedprox"])):
        methods = [
            Made(
                algorithm,
                lambda s, r, c, k=k, step=step: 0.8 + step * k + (-1) ** (k + s) * 0.01 * int(c),
                lambda s, r: 0.9,
                shared_own=(lambda s, r, c: 0.7 + 0.01 * s) if algorithm == "fml" else None,
            )
            for k, algorithm in enumerate([*algorithms, "independent"])
        ]
        partition = {"kind": "iid" if name == "first" else "shards", "classes_per_client": 4}
        fields = {"name": name, "rounds": 20, "clients": tuple("01234"), "classes": tuple("0123456789")}
        methods = [replace(m, **fields, config={"partition": partition}) for m in methods]
        runs += write_all(folder / name, methods, range(5))
    write_report(runs, folder / "report.html")
    return (folder / "report.html").as_uri()


def open_demo(browser, demo, width, scheme="light"):
    page = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme).new_page()
    page.goto(demo)
    return page


@pytest.mark.parametrize("width", [400, 1280])
def test_the_demo_s_first_screen_holds_the_whole_picture_and_the_answer(browser, demo, width):
    page = open_demo(browser, demo, width)
    picture, answer = (page.locator(selector).first.bounding_box() for selector in (".answer svg", ".lead"))
    assert picture["y"] + picture["height"] <= 800
    assert answer["y"] + answer["height"] <= 800
    assert page.locator("h1").inner_text().replace("\n", " ") == "Does federating help these 5 clients?"
    assert page.evaluate("document.documentElement.scrollHeight") < 8000
    page.context.close()


@pytest.mark.parametrize("width", [400, 1280])
def test_the_demo_s_page_has_at_most_700_words_unfolded(browser, demo, width):
    page = open_demo(browser, demo, width)
    assert page.locator("details[open]").count() == 0
    assert len(page.locator("body").inner_text().split()) <= 700
    assert all(page.locator(".answer").nth(k).locator("li").count() <= 3 for k in range(2))
    page.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_gain_and_harm_differ_in_shape_and_in_colour(browser, demo, scheme):
    page = open_demo(browser, demo, 1280, scheme)
    shapes = page.evaluate(
        """() => { const svg = document.querySelector('.answer svg'), shapes = {};
            for (const use of svg.querySelectorAll('use')) {
                const stroke = getComputedStyle(use).stroke, mark = svg.querySelector(use.getAttribute('href'));
                (shapes[stroke] ??= new Set()).add(mark.getAttribute('d')); }
            return Object.fromEntries(Object.entries(shapes).map(([colour, marks]) => [colour, [...marks]])); }"""
    )
    gain, harm = (
        ("rgb(11, 110, 79)", "rgb(168, 58, 18)") if scheme == "light" else ("rgb(88, 201, 155)", "rgb(240, 149, 106)")
    )
    assert {gain, harm} <= set(shapes)
    assert not set(shapes[gain]) & set(shapes[harm])
    page.context.close()


@pytest.fixture(scope="module")
def domains(tmp_path_factory):
    """Return the address of the widest page: eight methods with long names, numbers with the widest intervals."""
    folder = tmp_path_factory.mktemp("domains")

    def messages(round, node):
        return [("local", 0, 1412)] if round else [("seed", 0, 78_400)]

    def variant(k):
        algorithm = {"name": "fedh2l", "local_data": f"private+own-public-{k}", "labels": True}
        return Made(
            "fedh2l",
            lambda s, r, c: 0.5,
            reach=lambda s, r, c: (float(s), 0.5, 0.5),
            rounds=5,
            sent=messages,
            projected=0.5,
            config={"algorithm": algorithm, "training": {"local_steps": 5}},
        )

    runs = [path for k in range(8) for path in write_all(folder / str(k), [variant(k)], [0, 1])]
    write_report(runs, folder / "report.html")
    return (folder / "report.html").as_uri()


@pytest.mark.parametrize(("scheme", "width"), [("dark", 400), ("light", 1280)])
def test_a_page_of_domains_fits_and_its_points_can_be_pointed_at(browser, domains, scheme, width):
    context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 900})
    page, console_messages = context.new_page(), []
    page.on("console", lambda message: console_messages.append(message.text))
    page.on("pageerror", lambda problem: console_messages.append(str(problem)))
    page.goto(domains)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    beyond = "[...document.querySelectorAll('svg text')].filter(t => t.getBoundingClientRect().right > innerWidth).length"
    assert page.evaluate(beyond) == 0
    page.locator("#c1-crossed").click()
    page.locator(".part:has(#c1-crossed) .pictures svg").locator("rect").last.hover()
    sent, *_, last = page.locator("#tip").inner_text().splitlines()
    assert sent == "Bytes sent 85460"  # 78,400 + 5 * 1,412
    assert last.endswith("own-public-7) 50.0")
    assert console_messages == []
    context.close()

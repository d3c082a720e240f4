"""An experiment's page in a browser: both schemes, a phone's width; nothing leaves the page, nothing is cut off."""

import shutil

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="the python package playwright is not installed")
CHROME = next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)
pytestmark = pytest.mark.skipif(CHROME is None, reason="no chromium, chromium-browser or google-chrome on the PATH")


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as p:
        found = p.chromium.launch(executable_path=CHROME, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1280])
def test_it_opens_quietly_and_fits(browser, made, scheme, width):
    context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 900})
    page, said, asked = context.new_page(), [], []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda problem: said.append(str(problem)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto((made / "looker.html").as_uri())
    page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert (said, asked) == ([], [(made / "looker.html").as_uri()])
    page.locator(".plot rect").first.scroll_into_view_if_needed()
    page.locator(".plot rect").first.hover()
    assert "Round 1" in page.locator("#tip").inner_text()
    context.close()

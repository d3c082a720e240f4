"""An experiment's page in a browser: both schemes, a phone's width; nothing leaves the page, nothing is cut off."""

import pytest

pytestmark = pytest.mark.long


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1280])
def test_it_opens_quietly_and_fits(browser, pages_folder, scheme, width):
    context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 900})
    page, console_messages, requested_urls = context.new_page(), [], []
    page.on("console", lambda message: console_messages.append(message.text))
    page.on("pageerror", lambda problem: console_messages.append(str(problem)))
    page.on("request", lambda request: requested_urls.append(request.url))
    page.goto((pages_folder / "looker.html").as_uri())
    page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert (console_messages, requested_urls) == ([], [(pages_folder / "looker.html").as_uri()])
    page.locator(".plot rect").first.scroll_into_view_if_needed()
    page.locator(".plot rect").first.hover()
    assert "Round 1" in page.locator("#tip").inner_text()
    context.close()

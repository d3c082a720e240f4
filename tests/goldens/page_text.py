"""A page of HTML as text that a diff can be read in: its sentences, its tables, what its pictures say, and its CSV files."""

from html.parser import HTMLParser
from urllib.parse import unquote

_HIDDEN = ("style", "script", "text", "desc")  # a picture's own texts are its axes; its titles say its numbers
_LINES = ("h1", "h2", "h3", "h4", "p", "li", "tr", "caption", "figcaption", "summary", "dt", "dd", "pre", "title", "footer")
_CELLS = ("th", "td")


def read_page(html: str) -> tuple[str, str]:
    """Return the text of a page, a line for a sentence or a row of a table; and its CSV files, each below its name."""
    page = _Page()
    page.feed(html)
    page.close()
    lines = (" ".join(line.split()) for line in "".join(page.parts).split("\n"))
    return "\n".join(line for line in lines if line) + "\n", "\n".join(page.files)


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self.files: list[str] = []
        self._hidden = 0
        self._verbatim = False

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        about = dict(attributes)
        self._hidden += tag in _HIDDEN
        self._verbatim |= tag == "pre"
        if tag in _LINES:
            self.parts.append("\n")
        elif tag in _CELLS:
            tone = about.get("class") if tag == "td" else None  # the colour of a gain or a harm
            self.parts.append(f" | {f'({tone}) ' if tone not in (None, 'text', 'shade') else ''}")
        elif tag in ("small", "sup"):
            self.parts.append(" [")
        link = about.get("href") or ""
        if link.startswith("data:text/csv"):
            self.files.append(f"{about.get('download')}\n{unquote(link.partition(',')[2])}")

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag in _HIDDEN
        self._verbatim &= tag != "pre"
        if tag in _LINES:
            self.parts.append("\n")
        elif tag in ("small", "sup"):
            self.parts.append("]")

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.parts.append(data if self._verbatim else data.replace("\n", " "))

"""One way to render all Jinja templates: an unknown name is an error, and lines that hold a tag only leave no blank line."""

import re
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import BaseLoader, ChoiceLoader, Environment, FileSystemLoader, PackageLoader, StrictUndefined, Template
from markupsafe import Markup, escape

from fedmutual.errors import format_count, join_words
from fedmutual.results.scale import MetricScale


def make_environment(*sources: str | Path, html: bool, keep_trailing_newline: bool = False) -> Environment:
    """Return a Jinja environment that looks a template up in each source in turn.

    sources: a package by its dotted name, whose templates lie in its folder `templates`, or a folder of templates.
    html: whether values are escaped for HTML, and the filter `prose` (`mark_prose`) exists; else the text is plain.
    """
    loaders: list[BaseLoader] = [FileSystemLoader(s) if isinstance(s, Path) else PackageLoader(s) for s in sources]
    environment = Environment(
        loader=ChoiceLoader(loaders),
        autoescape=html,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=keep_trailing_newline,
    )
    if html:
        environment.filters["prose"] = mark_prose
    return environment


def mark_prose(text: str) -> Markup:
    """Return a sentence as HTML: text in backquotes as code, and no line break between a number and its unit."""
    for unit in ("%", "points"):
        text = text.replace(f" {unit}", f"\N{NO-BREAK SPACE}{unit}")
    return Markup(re.sub(r"`([^`]*)`", r"<code>\1</code>", str(escape(text))))


@cache
def load_page_template(template: str) -> Template:
    """Return a template of this package for a page of HTML."""
    return make_environment("fedmutual.report", html=True).get_template(template)


@cache
def _load_macros(template: str) -> Any:
    environment = make_environment("fedmutual.report", html=False)
    environment.filters |= {"count": format_count, "listed": join_words, "value": _format_value, "gain": _format_gain}
    environment.filters |= {
        "one": _remove_plural,
        "number": "{:,}".format,
        "quoted": repr,
        "span": _format_span,
    }
    return environment.get_template(template).module


def render_macro(template: str, macro: str, *values: object, **named: object) -> str:
    """Return the text of a macro of a plain template of this package, its white space folded to single spaces.

    Names are plain text here; a page of HTML escapes the text.
    """
    return " ".join(str(getattr(_load_macros(template), macro)(*values, **named)).split())


def _remove_plural(unit: str) -> str:
    return unit.removesuffix("s")


def _format_value(value: float, scale: MetricScale) -> str:
    return scale.format_value(value)


def _format_gain(value: float, scale: MetricScale) -> str:
    return scale.format_gain(value)


def _format_span(ends: tuple[int, int]) -> str:
    """Return two numbers as a range, "36 to 40"; two equal numbers as one, "40"."""
    low, high = ends
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"

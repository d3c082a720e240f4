"""One way to render all Jinja templates, and to write pages: an unknown name is an error; a page is whole, or as before."""

import codecs
import os
import re
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from jinja2 import BaseLoader, ChoiceLoader, Environment, FileSystemLoader, PackageLoader, StrictUndefined, Template
from markupsafe import Markup, escape

from fedmutual.errors import RunError, format_count, join_words
from fedmutual.files import replace_file
from fedmutual.results.scale import MetricScale


def make_environment(*sources: str | Path, html: bool, keep_trailing_newline: bool = False) -> Environment:
    """Return a Jinja environment that looks a template up in each source in turn.

    sources: a package by its dotted name, whose templates lie in its folder `templates`, or a folder of templates.
    html: whether values are escaped for HTML, and the filter `prose` (`mark_prose`) exists; else the text is plain, and the
        filters of words and numbers exist.
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
    environment.filters |= {"prose": mark_prose} if html else _FILTERS
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
    return make_environment("fedmutual.report", html=False).get_template(template).module


def render_macro(template: str, macro: str, *values: object) -> str:
    """Return the text of a macro of a plain template of this package, its white space folded to single spaces.

    Names are plain text here; a page of HTML escapes the text.
    """
    return " ".join(str(getattr(_load_macros(template), macro)(*values)).split())


def render_facts(template: str, scale: MetricScale, macro: str, **facts: object) -> str:
    """Return the text of a macro that takes facts by name, and the scale of the main metric."""
    return render_macro(template, macro, SimpleNamespace(**facts), scale)


def _format_span(ends: tuple[int, int]) -> str:
    """Return two numbers as a range, "36 to 40"; two equal numbers as one, "40"."""
    low, high = ends
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


_FILTERS = {
    "count": format_count,
    "listed": join_words,
    "value": lambda value, scale: scale.format_value(value),
    "gain": lambda value, scale: scale.format_gain(value),
    "one": lambda unit: unit.removesuffix("s"),
    "number": "{:,}".format,
    "quoted": repr,
    "span": _format_span,
}


def check_page(out: Path) -> None:
    """Raise RunError if `out` is a folder, or a file of another kind than a page."""
    if os.path.isdir(out):  # `Path.is_dir` raises PermissionError in a folder that may not be entered
        raise RunError(f"{out}: is a folder; name a file with -o")
    try:
        start = out.read_bytes()[:64].removeprefix(codecs.BOM_UTF8) if out.is_file() else b""
    except OSError:
        return
    if start and not start.lstrip().lower().startswith((b"<!doctype html", b"<html")):  # for example a file of a run
        raise RunError(f"{out}: is there and no page of HTML; name another file with -o")


def write_text(page: str, out: Path) -> None:
    """Write a page in one step.

    Raises:
        RunError: as `check_page`, or `out` cannot be written.
    """
    check_page(out)
    with replace_file(out, sync=False, fix="name another file with -o") as file:  # follows no link that lies there
        file.write(page.encode())

"""The front page of a folder of pages: written by hand, but for the tables between marks."""

from collections.abc import Mapping
from pathlib import Path

from fedmutual.files import write_bytes

FRONT = "README.md"


def marks(name: str) -> tuple[str, str]:
    """The lines before and after a table that is made, as "printed numbers"."""
    made = f"<!-- {name}: made by `fedmutual reproduce --pages FOLDER` from the results; not to be edited -->"
    return made, f"<!-- end of {name} -->"


def write_front(folder: Path, made: Mapping[str, str]) -> list[Path]:
    """Put each table, in Markdown by its name, between its marks of the folder's front page -> the path of the page.

    A table whose marks the page lacks is left out; a page without any is left alone.

    Raises:
        RunError: the page cannot be written.
    """
    path = folder / FRONT
    text = before = path.read_text(encoding="utf-8") if path.exists() else ""
    has_marks = False
    for name, table in made.items():
        begin, end = marks(name)
        head, begun, rest = text.partition(begin)
        _, ended, tail = rest.partition(end)
        if begun and ended:
            text, has_marks = f"{head}{begin}\n\n{table}\n\n{end}{tail}", True
    if text != before:
        write_bytes(path, text.encode())
    return [path] if has_marks else []

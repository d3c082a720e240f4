"""Update the generated tables in the front page of a folder of pages; the rest of the front page is written by hand."""

from collections.abc import Mapping
from pathlib import Path

from fedmutual.files import write_bytes

FRONT = "README.md"


def make_marks(name: str) -> tuple[str, str]:
    """Return the comment lines before and after a generated table. name: such as "printed numbers"."""
    made = f"<!-- {name}: made by `fedmutual reproduce --pages FOLDER` from the results; not to be edited -->"
    return made, f"<!-- end of {name} -->"


def write_front(folder: Path, sections: Mapping[str, str]) -> list[Path]:
    """Write each table between its marks in the front page and return the page's path; [] for a page without marks.

    sections: table name -> Markdown. A table without marks in the page is left out.

    Raises:
        RunError: the page cannot be written.
    """
    path = folder / FRONT
    text = before = path.read_text(encoding="utf-8") if path.exists() else ""
    has_marks = False
    for name, table in sections.items():
        begin, end = make_marks(name)
        head, begun, rest = text.partition(begin)
        _, ended, tail = rest.partition(end)
        if begun and ended:
            text, has_marks = f"{head}{begin}\n\n{table}\n\n{end}{tail}", True
    if text != before:
        write_bytes(path, text.encode())
    return [path] if has_marks else []

"""Count the words that people wrote in the documentation, and the lines of each folder of the source.

`python docs/count.py words` prints the words of each page; `python docs/count.py lines` updates the numbers in the table of
docs/architecture.md.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GENERATED = ("configuration.md", "methods.md", "benchmark.md", "findings.md")
EXAMPLE = re.compile(r"^```.*?^```$", re.M | re.S)
TABLES = re.compile(r"<!-- [\w ]+: made by .*?<!-- end of [\w ]+ -->|<!-- tables: .*?<!-- end of tables -->", re.S)
ROW = re.compile(r"^\| `([\w.*]+)` \|(.*)\| \d+ \| [\d,]+ \|$", re.M)


def count_pages() -> dict[str, int]:
    """Return the number of words of each page that people write, without the changelog."""
    names = ("README", "CONTRIBUTING", "CODE_OF_CONDUCT", "SECURITY", "papers/README", "examples/sites/README")
    docs = [path for path in sorted((ROOT / "docs").glob("*.md")) if path.name not in GENERATED]
    docs += [ROOT / "docs" / "reproduction" / name for name in ("README.md", "protocol.md")]
    pages = [*(ROOT / f"{name}.md" for name in names), *docs]
    return {page.relative_to(ROOT).as_posix(): count_words(page.read_text(encoding="utf-8")) for page in pages}


def count_words(text: str) -> int:
    """Return the number of words of a page, of its tables too; what an example holds is code."""
    words = TABLES.sub("", EXAMPLE.sub("", text)).split()
    return sum(bool(re.search(r"\w", word)) for word in words)


def count_lines(folder: str) -> tuple[int, int]:
    """Return the number of Python files and of their lines; `*.py` is the files of no folder, `papers` the distribution."""
    source = ROOT / "src" / "fedmutual"
    places = {"*.py": source.glob("*.py"), "papers": (ROOT / "papers" / "src").rglob("*.py")}
    files = [*places.get(folder, (source / folder).rglob("*.py"))]
    return len(files), sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)


def renew_row(row: re.Match[str]) -> str:
    """Return a row of the table of folders with today's numbers."""
    files, lines = count_lines(row[1])
    return f"| `{row[1]}` |{row[2]}| {files} | {lines:,} |"


if __name__ == "__main__":
    if sys.argv[1:] == ["lines"]:
        page = ROOT / "docs" / "architecture.md"
        page.write_text(ROW.sub(renew_row, page.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        counts = count_pages()
        print(*(f"{count:6,} {page}" for page, count in counts.items()), f"{sum(counts.values()):6,} words", sep="\n")

"""Count the lines of code of each method's file."""

import ast
import inspect
import io
import tokenize
from pathlib import Path

from fedmutual.algorithms import ALGORITHMS
from fedmutual.algorithms.presets import PRESETS
from fedmutual.report.cells import Column, PageTable, TableCell

_NO_CODE = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
)
_SOURCES = "../src/fedmutual/algorithms"  # relative to the documentation


def count_code_lines(source: str) -> int:
    """Return the number of lines of a Python source without blank lines, comments and docstrings."""
    tokens = [t for t in tokenize.generate_tokens(io.StringIO(source).readline) if t.type not in _NO_CODE]
    lines = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    texts = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Expr) and _is_text(node.value)]
    return len(lines - {line for node in texts for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)})


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def tabulate_code_lines() -> PageTable:
    """Return a table with a row for each method: its file and its lines of code; a preset's keys in the place of lines."""
    rows = []
    for name, kind in ALGORITHMS.items():
        path, preset = Path(inspect.getsourcefile(kind) or ""), PRESETS.get(name)
        is_other = preset is not None and preset.title is not None  # another method's class with keys of its own
        keys = ", ".join(f"`model.{key}`" for key in preset.model) if preset else ""
        file = f"[{path.name}]({_SOURCES}/{path.name})"
        if is_other:
            cells = (f"{file}, with {keys}" if keys else f"{file}, on pooled data", "none of its own")
        else:
            cells = (f"{file}, with {keys}" if keys else file, str(count_code_lines(path.read_text(encoding="utf-8"))))
        rows.append((TableCell(f"`{name}`"), *map(TableCell, cells)))
    heads = (Column("Method", numeric=False), Column("File", numeric=False), Column("Lines of code"))
    return PageTable("code-lines", "", heads, tuple(rows), "")

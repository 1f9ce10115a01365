"""Collect docstrings, comments, and the messages that users see.

`python tests/wording.py [FOLDER]` prints every message, with its file and line.
"""

from __future__ import annotations

import ast
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("sweeps", "train", "evaluate", "fit", "bench")
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Text(NamedTuple):
    line: int
    kind: str  # "function" (its docstring), "property", "docstring" (a module's or a class's), "message", or "comment"
    text: str


def texts(path: Path) -> Iterator[Text]:
    """Yield the docstrings of a Python file, its strings of four words or more, and its comments."""
    with path.open("rb") as file:
        comments = [token for token in tokenize.tokenize(file.readline) if token.type == tokenize.COMMENT]
    yield from (Text(comment.start[0], "comment", comment.string.lstrip("# ")) for comment in comments)
    docstrings, parts = set(), set()
    nodes = list(ast.walk(ast.parse(path.read_text())))
    for node in nodes:
        if isinstance(node, Documented) and (docstring := ast.get_docstring(node)):
            docstrings.add(node.body[0].value)  # type: ignore[attr-defined]
            yield Text(node.body[0].lineno, _kind(node), docstring)
        elif isinstance(node, ast.JoinedStr):
            parts |= set(node.values)
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            text = ast.unparse(node)[2:-1]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings | parts:
            text = node.value
        else:
            continue
        if len(text.split()) >= 4:
            yield Text(node.lineno, "message", text)


def _kind(node: Documented) -> str:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return "docstring"
    return "property" if any("property" in ast.unparse(decorator) for decorator in node.decorator_list) else "function"


if __name__ == "__main__":
    for room in sys.argv[1:] or ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            for text in texts(path):
                if text.kind == "message":
                    words = " ".join(text.text.encode(errors="replace").decode().split())
                    print(f"{path.relative_to(ROOT)}:{text.line}: {words}")

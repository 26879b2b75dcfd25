"""Counts lines of Python and JavaScript by room: without blank lines, comments and docstrings.

python experiments/benchmarks/code_lines.py [FOLDER]
"""

from __future__ import annotations

import ast
import re
import sys
import tokenize
from collections import Counter
from pathlib import Path

NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING}


def code_lines(path: Path) -> int:
    """Returns the number of lines with a token of code, or, of JavaScript, that are neither blank nor a comment."""
    if path.suffix == ".js":
        text = re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)
        return sum(bool(line.strip()) and not line.strip().startswith("//") for line in text.splitlines())
    lines: set[int] = set()
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type not in NO_CODE and token.type != tokenize.ENDMARKER:
                lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            assert node.end_lineno is not None
            lines -= set(range(node.lineno, node.end_lineno + 1))  # a string that stands alone is a docstring
    return len(lines)


def count(folder: Path) -> tuple[Counter[str], Counter[str]]:
    """Returns lines of code and files by room."""
    rooms: Counter[str] = Counter()
    files: Counter[str] = Counter()
    for path in sorted([*folder.rglob("*.py"), *folder.rglob("*.js")]):
        parts = path.relative_to(folder).parts
        room = parts[0] if len(parts) > 1 else "(root)"
        rooms[room] += code_lines(path)
        files[room] += 1
    return rooms, files


def main(folder: Path) -> None:
    rooms, files = count(folder)
    for room, lines in sorted(rooms.items()):
        print(f"{room:<10} {files[room]:>3} files {lines:>6,} lines of code")
    print(f"{'all':<10} {files.total():>3} files {rooms.total():>6,} lines of code")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "vit_lightning"))

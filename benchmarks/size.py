"""Lines of code by room: without blank lines, comments and docstrings.

In: nothing, or a folder. Out: a table: room, files, lines, the longest file; without a folder the core by room, then
each distribution of the repository. `make size` runs it; CI shows it.
Example: python benchmarks/size.py src/lockstep
"""

from __future__ import annotations

import ast
import io
import statistics
import sys
import tokenize
from collections import defaultdict
from pathlib import Path

LAYOUT = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.COMMENT, tokenize.ENDMARKER}


def code_lines(text: str) -> int:
    """Number of lines with code."""
    documented = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                documented |= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in LAYOUT:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - documented)


def table(root: Path) -> None:
    """Table by room, with a total."""
    rooms: dict[str, dict[str, int]] = defaultdict(dict)
    for path in sorted(root.rglob("*.py")):
        place = path.relative_to(root)
        rooms[place.parts[0] if len(place.parts) > 1 else "(top)"][str(place)] = code_lines(path.read_text())
    print(f"{'room':<14}{'files':>6}{'lines':>8}{'median':>8}  longest")
    for room, files in sorted(rooms.items()):
        longest = max(files, key=lambda name: files[name])
        middle = statistics.median(files.values())
        print(f"{room:<14}{len(files):>6}{sum(files.values()):>8,}{middle:>8.0f}  {longest} ({files[longest]})")
    every = {name: count for files in rooms.values() for name, count in files.items()}
    short = sum(count < 60 for count in every.values())
    middle = statistics.median(every.values())
    print(f"{'all':<14}{len(every):>6}{sum(every.values()):>8,}{middle:>8.0f}  {short} files under 60")


def main() -> None:
    table(Path(sys.argv[1] if len(sys.argv) > 1 else "src/lockstep"))
    if len(sys.argv) > 1:
        return
    print()
    for source in [Path("src"), *sorted(Path("packages").glob("*/src"))]:
        counts = [code_lines(path.read_text()) for path in source.rglob("*.py")]
        name = "lockstep-train" if source == Path("src") else source.parent.name
        print(f"{name:<16}{len(counts):>4}{sum(counts):>8,}")


if __name__ == "__main__":
    main()

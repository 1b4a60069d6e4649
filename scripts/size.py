"""Print how large the code is against its budgets. It informs and never fails.

    python scripts/size.py [ROOT]

Lines are physical lines. The core is what every user of a plan runs through, whatever the format or
the backend.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

FILE_LINES, FUNCTION_LINES, POSITIONAL = 600, 60, 5
CORE = ("graph", "op", "pointwise", "registry", "sequential", "compiler", "runtime")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.AST) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def lines_of(node: Function) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def positional(node: Function) -> int:
    names = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args)]
    return len(names) - (bool(names) and names[0] in ("self", "cls"))


def over_budget(where: str, text: str) -> Iterator[tuple[str, str, int, int]]:
    """(place, what, size, budget) for each budget that one file exceeds."""
    if (count := text.count("\n")) > FILE_LINES:
        yield where, "file", count, FILE_LINES
    for node in functions(ast.parse(text)):
        place = f"{where}:{node.lineno} {node.name}"
        if (count := lines_of(node)) > FUNCTION_LINES:
            yield place, "function", count, FUNCTION_LINES
        if (count := positional(node)) > POSITIONAL:
            yield place, "positional", count, POSITIONAL


def table(rows: list[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    )


def main(root: Path) -> None:
    package = root / "te_ops"
    texts = {path.relative_to(package): path.read_text() for path in package.rglob("*.py")}
    parts: dict[str, list[str]] = {}
    for path, text in texts.items():
        parts.setdefault(path.parts[0], []).append(text)
    rows: list[tuple[str, ...]] = [("te_ops/", "files", "lines", "functions", "longest")]
    for part, sources in sorted(parts.items()):
        sizes = [lines_of(node) for text in sources for node in functions(ast.parse(text))]
        lines = sum(text.count("\n") for text in sources)
        rows.append((part, *map(str, (len(sources), lines, len(sizes), max(sizes, default=0)))))
    print(table(rows))
    total = sum(text.count("\n") for text in texts.values())
    core = sum(
        text.count("\n")
        for path, text in texts.items()
        if path.parts[0].removesuffix(".py") in CORE
    )
    print(f"\nall {total} lines, of which the core ({', '.join(CORE)}) {core}")
    found = [row for path, text in sorted(texts.items()) for row in over_budget(str(path), text)]
    print("\nevery file and function is within its budget" if not found else "\nover budget")
    if found:
        print(table([("", "", "size", "budget"), *(tuple(map(str, row)) for row in found)]))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1])

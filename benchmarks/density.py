"""`python -m benchmarks.density [folder …]`: how dense the code is, beside the figures of curvlinops."""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

LONGEST_FILE = 250
LONGEST_FUNCTION = 40
CURVLINOPS = {
    "comprehensions": 3.4,
    "conditional expressions": 1.3,
    "comments": 7.5,
    "characters": 40.0,
}
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclass
class Density:
    """Counts over a folder; code lines are neither blank, nor comments, nor part of a docstring."""

    lines: int = 0
    code_lines: int = 0
    characters: int = 0
    comments: int = 0
    comprehensions: int = 0
    conditional_expressions: int = 0
    too_long: list[str] = field(default_factory=list)

    def per_hundred(self, count: int) -> float:
        return 100 * count / max(self.code_lines, 1)


def measure(folder: Path) -> Density:
    """The counts over all Python files of a folder."""
    density = Density()
    for path in sorted(folder.rglob("*.py")):
        _add_file(density, path)
    return density


def _add_file(density: Density, path: Path) -> None:
    text = path.read_text()
    tree = ast.parse(text)
    lines = text.splitlines()
    documentation = _docstring_lines(tree)
    density.lines += len(lines)
    if len(lines) > LONGEST_FILE:
        density.too_long.append(f"{path}: {len(lines)} lines")
    for number, line in enumerate(lines, start=1):
        if line.strip().startswith("#"):
            density.comments += 1
        elif line.strip() and number not in documentation:
            density.code_lines += 1
            density.characters += len(line)
    for node in ast.walk(tree):
        density.comprehensions += isinstance(node, COMPREHENSIONS)
        density.conditional_expressions += isinstance(node, ast.IfExp)
        if isinstance(node, ast.FunctionDef):
            length = (node.end_lineno or 0) - node.lineno + 1
            if length > LONGEST_FUNCTION:
                density.too_long.append(f"{path}, {node.name}: {length} lines")


def _docstring_lines(tree: ast.Module) -> set[int]:
    """The numbers of the lines of all strings that stand alone."""
    numbers: set[int] = set()
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            numbers.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return numbers


def main() -> None:
    table = Table("folder", "lines", "code lines", *CURVLINOPS)
    table.add_row("curvlinops", "", "", *map(str, CURVLINOPS.values()))
    too_long = []
    for folder in sys.argv[1:] or ["src/lipcert"]:
        density = measure(Path(folder))
        table.add_row(
            folder,
            str(density.lines),
            str(density.code_lines),
            f"{density.per_hundred(density.comprehensions):.1f}",
            f"{density.per_hundred(density.conditional_expressions):.1f}",
            f"{density.per_hundred(density.comments):.1f}",
            f"{density.characters / max(density.code_lines, 1):.1f}",
        )
        too_long.extend(density.too_long)
    console = Console(width=130)
    console.print(table)
    for line in too_long:
        console.print(line)


if __name__ == "__main__":
    main()

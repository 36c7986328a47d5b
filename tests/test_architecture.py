"""Imports go downwards only, and the package does not know where it is developed."""

import ast
from pathlib import Path

import pytest

import lipcert
import lipcert_experiments

SOURCE = Path(lipcert.__file__).parent
EXPERIMENTS = Path(lipcert_experiments.__file__).parent
ORDER = [
    "errors", "files", "figures", "network", "norms", "bounds", "certificate", "losses", "layers", "data", "attacks",
    "zoo", "loading", "training", "report", "commands", "cli",
]  # fmt: skip
FILES = sorted(SOURCE.rglob("*.py"))
LAZY = SOURCE / "commands" / "reproduce.py"


def name_of(path: Path) -> str:
    return str(path.relative_to(SOURCE))


def part_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported_parts(path: Path) -> set[str]:
    """The parts of lipcert that a file imports, anywhere in it."""
    parts = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} has a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        parts |= {name.split(".")[1] for name in names if name.startswith("lipcert.")}
    return parts


@pytest.mark.parametrize(
    "path", [p for p in FILES if part_of(p) != "__init__"], ids=lambda p: str(p.relative_to(SOURCE))
)
def test_imports_go_downwards_only(path):
    part = part_of(path)
    known = [name for name in imported_parts(path) if name in ORDER]
    if part in ORDER:
        assert all(ORDER.index(name) <= ORDER.index(part) for name in known), f"{part} imports {known}"


def test_the_order_covers_the_package():
    parts = {part_of(path) for path in FILES} - {"__init__"}
    assert {"errors", "network", "norms", "bounds"} <= parts


def test_a_file_that_imports_upwards_would_be_found(tmp_path):
    file = tmp_path / "example.py"
    file.write_text("def f():\n    from lipcert.zoo import build\n    import lipcert.bounds.targets\n")
    assert imported_parts(file) == {"zoo", "bounds"}


def experiments_imports(text: str) -> list[bool]:
    """Of every import of lipcert_experiments that is executed: whether it is inside a function."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = [ast.Pass()]
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    inside = {inner for function in functions for inner in ast.walk(function)}
    found = []
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        found += [node in inside for name in names if name.split(".")[0] == "lipcert_experiments"]
    return found


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_only_its_command_imports_the_experiments_and_only_when_it_runs(path):
    found = experiments_imports(path.read_text(encoding="utf-8"))
    assert all(found)
    assert bool(found) == (path == LAZY)


def test_an_import_of_the_experiments_would_be_found():
    assert experiments_imports("import lipcert_experiments.plan\n") == [False]
    assert experiments_imports("if x:\n    from lipcert_experiments import Plan\n") == [False]
    assert experiments_imports("def f():\n    from lipcert_experiments import Plan\n") == [True]
    assert experiments_imports("if TYPE_CHECKING:\n    from lipcert_experiments import Plan\n") == []


@pytest.mark.parametrize(
    "path", [*FILES, *sorted(EXPERIMENTS.rglob("*.py"))], ids=lambda p: f"{p.parent.name}/{p.name}"
)
def test_no_file_refers_to_the_development_folder(path):
    folder = "derahs"[::-1]  # this file must not name it either
    assert f"/{folder}" not in path.read_text(encoding="utf-8")
    assert f"{folder}/" not in path.read_text(encoding="utf-8")

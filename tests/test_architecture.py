"""The order of the house: what may import what, and why.

A model goes through the rooms from the bottom up: it is captured (network), its norms and bounds are computed (norms,
bounds), inputs are certified (certificate), a folder is written (runs), and shown (display, report). A room that knew
one above it could not be used, tested or understood without it.
"""

import ast
from functools import cache
from pathlib import Path

import pytest

import lipcert
import lipcert_experiments

SOURCE = Path(lipcert.__file__).parent
EXPERIMENTS = Path(lipcert_experiments.__file__).parent
ORDER = [
    "version", "errors", "layout", "files", "progress", "resources", "processes", "threads", "shown", "rounding",
    "option_values",
    "network", "own_code", "onnx_graphs", "norms", "bounds", "certificate", "local", "losses", "layers", "data",
    "attacks", "models", "runs", "display", "training", "report", "web", "commands", "cli", "__main__",
]  # fmt: skip
"""From the bottom up; a room imports itself and what is before it."""
FORBIDDEN = {
    "report": {"training"},  # models that were never trained have reports too
    "training": {"display"},
}
"""What a room may not import although it is further up."""
INSIDE = {
    "bounds": ["methods", "compute"],  # methods do not know who calls them
    "network": [
        "program",
        "capture",
        "build",
    ],  # programs do not know how they are captured
    "runs": ["summary", "evidence", "finishing", "folder"],
}
"""Inside a room: a later file or folder may import an earlier one, not the other way round."""
DRAWING = {"rich", "matplotlib", "pandas", "jinja2", "PIL"}
FIRST_THAT_DRAWS = "data"
"""Data sets are read with PIL; everything below computes, and knows no terminal, no figure and no data frame."""
FILES = sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")
LAZY = SOURCE / "commands" / "reproduce_command.py"


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


@cache
def imports(text: str) -> set[str]:
    """All modules that a file imports, anywhere in it, except for type checking."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = [ast.Pass()]
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where things are"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def rooms(text: str) -> set[str]:
    """The rooms of lipcert that a file imports; "lipcert" itself for the whole package."""
    result = set()
    for name in imports(text):
        if name.split(".")[0] == "lipcert":
            result.add(name.split(".")[1] if "." in name else name)
    return result


def test_imports_go_downwards_only():
    assert FILES
    wrong = {}
    for path in FILES:
        room = room_of(path)
        assert room in ORDER, f"{room} has no place in the order yet; give it one"
        below = set(ORDER[: ORDER.index(room) + 1]) - FORBIDDEN.get(room, set())
        wrong[path] = rooms(path.read_text("utf-8")) - below
    assert {path: found for path, found in wrong.items() if found} == {}


def test_what_computes_does_not_draw():
    drawing = {}
    for path in FILES:
        if ORDER.index(room_of(path)) < ORDER.index(FIRST_THAT_DRAWS):
            names = imports(path.read_text("utf-8"))
            drawing[path] = {name.split(".")[0] for name in names} & DRAWING
    assert drawing
    assert {path: found for path, found in drawing.items() if found} == {}


@pytest.mark.parametrize("room", INSIDE)
def test_imports_inside_a_room_go_downwards_too(room):
    for place, name in enumerate(INSIDE[room]):
        above = {f"lipcert.{room}.{other}" for other in INSIDE[room][place + 1 :]}
        base = SOURCE / room / name
        paths = base.rglob("*.py") if base.is_dir() else [base.with_suffix(".py")]
        for path in paths:
            for module in imports(path.read_text("utf-8")):
                assert not any(
                    module == other or module.startswith(f"{other}.") for other in above
                ), path


def test_no_two_modules_have_the_same_name():
    names = [path.stem for path in FILES if path.name != "__init__.py"]
    assert len(names) == len(set(names)), sorted(
        {name for name in names if names.count(name) > 1}
    )


def test_wrong_imports_would_be_found():
    assert rooms(
        "def f():\n    from lipcert.models import zoo\n    import lipcert.bounds.targets\n"
    ) == {
        "models",
        "bounds",
    }
    assert rooms("import lipcert\n") == {"lipcert"}
    assert imports("if TYPE_CHECKING:\n    import pandas\n") == set()
    assert imports("def f():\n    from rich.table import Table\n") == {
        "rich.table.Table"
    }


def experiments_imports(text: str) -> list[bool]:
    """Of every import of lipcert_experiments: whether it is inside a function."""
    tree = ast.parse(text)
    inside = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            inside.update(ast.walk(node))
    places = []
    for node in ast.walk(tree):
        if isinstance(
            node, ast.Import | ast.ImportFrom
        ) and "lipcert_experiments" in ast.unparse(node):
            places.append(node in inside)
    return places


def test_only_its_command_imports_the_experiments_and_only_when_it_runs():
    places = {path: experiments_imports(path.read_text("utf-8")) for path in FILES}
    assert [path for path, inside in places.items() if not all(inside)] == []
    assert [path for path, inside in places.items() if inside] == [LAZY]


def test_an_import_of_the_experiments_would_be_found():
    assert experiments_imports("import lipcert_experiments.plan\n") == [False]
    assert experiments_imports("if x:\n    from lipcert_experiments import Plan\n") == [
        False
    ]
    assert experiments_imports(
        "def f():\n    from lipcert_experiments import Plan\n"
    ) == [True]


def test_no_file_refers_to_a_folder_outside_of_the_project():
    files = [*FILES, *sorted(EXPERIMENTS.rglob("*.py"))]
    assert [path for path in files if "../" in path.read_text("utf-8")] == []

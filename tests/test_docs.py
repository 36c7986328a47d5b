"""Nothing in the README and the documentation rots: code and commands run, other commands parse, names and links exist.

Blocks run page by page, in order, in an empty folder:

    ```python            is executed
    ```python name.py    is written to that file; so is ```toml name.toml
    ```sh run            every command in it is executed

All other commands, in code blocks of any kind and in the text, need real data or long times. They have to parse: the
command and its options exist, and so do the presets, networks, targets of make and extras that they name.
"""

from __future__ import annotations

import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pytest
import typer
from benchmarks.__main__ import PARTS
from typer.testing import CliRunner

from lipcert.cli import app
from lipcert.models import zoo
from lipcert.report import drawing
from lipcert.training import TrainConfig
from lipcert_experiments import EXPERIMENTS

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
DRAWN = "start.md"  # the figures of reports are drawn for one page
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
BLOCK = re.compile(r"^```(\w+)(?: +(\S+))?\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"(lipcert|make|pip|python|torchrun) \S")
PLACEHOLDER = re.compile(r"[A-Z_]+$")

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, what stands beside it, and its lines."""

    language: str
    note: str
    text: str


def blocks(page: Path) -> list[Block]:
    return [
        Block(*(part or "" for part in match))
        for match in BLOCK.findall(page.read_text("utf-8"))
    ]


def lines_of_commands(text: str) -> Iterator[str]:
    """The commands in fenced and indented blocks, without their comments."""
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        if COMMAND.match(line.strip().removeprefix("$ ")):
            yield re.split(r"\s+#", line.strip().removeprefix("$ "))[0]


def commands(page: Path) -> list[str]:
    text = page.read_text("utf-8")
    fenced = "\n".join(
        match[3] for match in re.finditer(BLOCK, text) if match[1] != "python"
    )
    indented = "\n".join(
        line for line in BLOCK.sub("", text).splitlines() if line.startswith("    ")
    )
    return [*lines_of_commands(fenced), *lines_of_commands(indented)]


def mentions(page: Path) -> list[str]:
    """Commands in the text, in backticks; they may be incomplete."""
    found = re.findall(r"(?<!`)`([^`]+)`(?!`)", BLOCK.sub("", page.read_text("utf-8")))
    return [" ".join(text.split()) for text in found if COMMAND.match(text)]


@pages
def test_blocks_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    if page.name != DRAWN:
        monkeypatch.setattr(drawing, "save_figure", lambda figure, path: [])
        monkeypatch.setattr(drawing, "inline_svg", lambda figure, label: "<svg></svg>")
    names: dict[str, object] = {"__name__": page.stem}
    for block in blocks(page):
        if "." in block.note:
            (tmp_path / block.note).write_text(block.text)
            monkeypatch.delitem(
                sys.modules, block.note.removesuffix(".py"), raising=False
            )
        elif block.language == "python":
            exec(compile(block.text, page.name, "exec"), names)
        elif block.note == "run":
            for command in lines_of_commands(block.text):
                result = CliRunner().invoke(app, shlex.split(command)[1:])
                assert result.exit_code == 0, (
                    f"{command}: {result.output} {result.exception!r}"
                )


@pages
def test_commands_parse(page: Path) -> None:
    written = {block.note for block in blocks(page)}
    for command in commands(page):
        check_command(shlex.split(command), complete=True, written=written)
    for command in mentions(page):
        check_command(
            shlex.split(command.rstrip("… ")), complete=False, written=written
        )


def check_command(words: list[str], *, complete: bool, written: set[str]) -> None:
    """Fail if a command would not be understood; incomplete ones may lack arguments."""
    if words[0] == "torchrun":
        words = words[words.index("-m") + 1 :]
    if words[0] == "lipcert":
        check_lipcert(words[1:], complete=complete, written=written)
    elif words[0] == "make":
        assert re.search(
            rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE
        ), f"no target {words[1]}"
    elif words[:3] == ["python", "-m", "benchmarks"]:
        assert {word for word in words[3:4] if not word.startswith("-")} <= set(
            PARTS
        ), f"no benchmark {words[3]}"
    elif words[0] == "python":
        assert (ROOT / words[1]).is_file(), f"there is no {words[1]}"
    elif words[:2] == ["pip", "install"]:
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
            "optional-dependencies"
        ]
        for named in re.findall(r"\[([\w,]+)\]", " ".join(words)):
            assert set(named.split(",")) <= set(extras), f"no extra {named}"
    else:
        pytest.fail(f"a command that is not checked: {words}")


def check_lipcert(words: list[str], *, complete: bool, written: set[str]) -> None:
    name, arguments = words[0], words[1:]
    if name.startswith("-"):
        return
    assert name in COMMANDS, f"there is no command lipcert {name}"
    command = COMMANDS[name]
    options = {option for parameter in command.params for option in parameter.opts} | {
        "--help"
    }
    for word in arguments:
        assert not word.startswith("--") or word in options, (
            f"lipcert {name} has no option {word}"
        )
    if not complete:
        return
    values = command.make_context(name, list(arguments)).params
    if (
        name == "train"
        and values["config"] not in written | {None}
        and not PLACEHOLDER.match(values["config"])
    ):
        TrainConfig.named(values["config"]).with_overrides(values["set_"] or [])
    model = str(values.get("model", ""))
    is_file = (
        Path(model).suffix in (".safetensors", ".onnx") or "/" in model or ":" in model
    )
    assert not model or is_file or PLACEHOLDER.match(model) or model in zoo.ZOO, (
        f"there is no network {model}"
    )


ROTTEN = {
    "lipcert fly": "no command lipcert fly",
    "lipcert bound 4C3F --speed 3": "no option --speed",
    "lipcert bound 5C3F": "no network 5C3F",
    "lipcert bound": "Missing parameter: model",
    "lipcert certify 4C3F --data mnist --eps much": "expected a number",
    "lipcert train mnist-4c4f": "did you mean 'mnist-4c3f'",
    "lipcert train digits --set loss.tt=3": "loss.tt",
    "make coffee": "no target coffee",
    "python -m benchmarks sleep": "no benchmark sleep",
    "python docs/no.py": "no docs/no.py",
    "pip install '.[tea]'": "no extra tea",
}


@pytest.mark.parametrize("command", ROTTEN)
def test_rotten_commands_are_found(command: str) -> None:
    with pytest.raises(Exception, match=re.escape(ROTTEN[command])):
        check_command(shlex.split(command), complete=True, written=set())


def test_rotten_mentions_are_found() -> None:
    check_command(["lipcert", "bound", "--method"], complete=False, written=set())
    with pytest.raises(AssertionError, match="no option --speed"):
        check_command(["lipcert", "bound", "--speed"], complete=False, written=set())


def test_commands_are_found_wherever_they_stand(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "Text with `lipcert presets` and `make demo`.\n\n    lipcert bound 4C3F   # fast\n\n"
        "```sh\nlipcert train \\\n  digits\n```\n\n```sh run\nlipcert presets\n```\n"
    )
    assert commands(page) == [
        "lipcert train digits",
        "lipcert presets",
        "lipcert bound 4C3F",
    ]
    assert mentions(page) == ["lipcert presets", "make demo"]
    assert [block.note for block in blocks(page)] == ["", "run"]


@pages
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)", page.read_text("utf-8")):
        if not link.startswith(("http", "generated/")):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"


def test_names_in_the_map_of_the_paper_exist() -> None:
    text = (ROOT / "docs" / "paper.md").read_text("utf-8")
    for name in re.findall(r"`(lipcert(?:\.\w+)+)`", text):
        assert resolve(name) is not None
    for path in re.findall(r"`((?:tests|benchmarks)/[\w/]+\.py)`", text):
        assert (ROOT / path).is_file(), f"there is no {path}"
    named = set(re.findall(r"`((?:table|fig)-[\w-]+)`", text))
    assert named == set(EXPERIMENTS)


def resolve(name: str) -> object:
    """The module, class or function of that dotted name."""
    module, rest = name, []
    while True:
        try:
            thing: object = import_module(module)
            break
        except ModuleNotFoundError:
            module, _, last = module.rpartition(".")
            rest.insert(0, last)
    for part in rest:
        thing = getattr(thing, part)
    return thing

"""The references of the command line, the presets, the networks and the API, written from the source."""

from __future__ import annotations

import inspect
from importlib.resources import files
from pathlib import Path

import typer
from typer.cli import get_docs_for_click

import lipcert
from lipcert.cli import app
from lipcert.files import replace_file
from lipcert.models import zoo
from lipcert.training import TrainConfig, presets


def write(folder: Path) -> None:
    """All of them, as pages in `folder`."""
    pages = {"cli.md": command_line(), "presets.md": preset_page(), "api.rst": api()}
    for name, text in pages.items():
        with replace_file(folder / name) as temporary:
            temporary.write_text(text, encoding="utf-8")


def command_line() -> str:
    """Every command with its options."""
    command = typer.main.get_command(app)
    context = typer.Context(command, info_name="lipcert", obj={})
    return get_docs_for_click(
        obj=command, ctx=context, name="lipcert", title="The command line"
    )


def preset_page() -> str:
    """Every preset with its note and its TOML file, and the networks they can name."""
    lines = [
        "# Presets and networks", "",
        "A preset is a configuration that comes with lipcert: `lipcert train NAME` trains it. Any value can be",
        "replaced on the command line (`--set loss.t=4`) or in a TOML file of your own.", "",
        "| preset | network | data | loss | epochs | ε (l2, pixels in [0, 1]) |", "|---|---|---|---|---:|---|",
    ]  # fmt: skip
    configs = {name: TrainConfig.preset(name) for name in presets()}
    for name, config in configs.items():
        epsilons = ", ".join(f"{epsilon:.4g}" for epsilon in config.epsilons)
        lines.append(
            f"| `{name}` | {config.model} | {config.data} | {config.loss.type} | {config.epochs} | {epsilons} |"
        )
    for name, config in configs.items():
        text = (files("lipcert") / "presets" / f"{name}.toml").read_text("utf-8")
        lines += [
            "",
            f"## {name}",
            "",
            config.note,
            "",
            "```toml",
            text.split("\n", 1)[1].strip(),
            "```",
        ]
    lines += [
        "",
        "## Networks of the zoo",
        "",
        "| name | input | classes | parameters |",
        "|---|---|---:|---:|",
    ]
    for name in zoo.names():
        architecture = zoo.ZOO[name]
        count = sum(
            parameter.numel() for parameter in zoo.build(name, seed=0).parameters()
        )
        shape = " × ".join(map(str, architecture.input_shape))
        lines.append(f"| `{name}` | {shape} | {architecture.classes} | {count:,} |")
    return "\n".join(lines) + "\n"


def api() -> str:
    """Everything in `lipcert.__all__`, by autodoc."""
    kinds: dict[str, list[str]] = {"Functions": [], "Classes": [], "Modules": []}
    for name in lipcert.__all__:
        thing = getattr(lipcert, name)
        kind = (
            "Modules"
            if inspect.ismodule(thing)
            else "Classes"
            if inspect.isclass(thing)
            else "Functions"
        )
        kinds[kind].append(name)
    lines = [
        "The Python API",
        "==============",
        "",
        "Everything here is in the module ``lipcert``.",
        "",
    ]
    for kind, names in kinds.items():
        lines += [kind, "-" * len(kind), ""]
        for name in names:
            path = f"lipcert.{name}"
            if kind == "Modules":
                lines += [
                    path,
                    "^" * len(path),
                    "",
                    f".. automodule:: {path}",
                    "   :members:",
                    "",
                ]
                if hasattr(getattr(lipcert, name), "__path__"):
                    lines.insert(-1, "   :imported-members:")
            elif kind == "Classes":
                lines += [
                    f".. autoclass:: {path}",
                    "   :members:",
                    *_not_inherited(name),
                    "",
                ]
            else:
                lines += [f".. autofunction:: {path}", ""]
    return "\n".join(lines)


def _not_inherited(name: str) -> list[str]:
    """Pydantic's own attributes are not part of a configuration."""
    return (
        ["   :exclude-members: model_config, model_post_init"]
        if name == "TrainConfig"
        else []
    )

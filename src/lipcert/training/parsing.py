"""TOML in and out, overrides, and validation errors as sentences."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from lipcert.errors import ConfigError, nearest


def read_toml(text: str, source: str) -> dict[str, Any]:
    """The values of a TOML text."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source} is not valid TOML: {error}") from None


def toml_text(values: Mapping[str, Any]) -> str:
    """TOML of plain values and one level of tables."""
    plain = {
        key: value for key, value in values.items() if not isinstance(value, Mapping)
    }
    # Plain keys come first: behind [table] every key belongs to the table.
    lines = [f"{key} = {_literal(value)}" for key, value in plain.items()]
    for key, table in values.items():
        if isinstance(table, Mapping):
            lines += [
                "",
                f"[{key}]",
                *(f"{name} = {_literal(value)}" for name, value in table.items()),
            ]
    return "\n".join(lines) + "\n"


def _literal(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(_literal(item) for item in value)}]"
    if isinstance(value, float):
        # repr reads back as the same number; 1e-05 and inf are TOML, too.
        return repr(value)
    return json.dumps(value, ensure_ascii=False)


def apply_overrides(values: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """The values with every "key=value" put in; the value is TOML, or else a plain string."""
    pairs = []
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator or not key.strip():
            raise ConfigError(
                f"override {override!r}: expected key=value, such as loss.t=4"
            )
        pairs.append((key.strip(), _value(text.strip())))
    for key, value in sorted(
        pairs, key=lambda pair: pair[0] != "loss.type"
    ):  # the type decides which keys there are
        *tables, last = key.split(".")
        table = values
        for name in tables:
            table = table.setdefault(name, {})
            if not isinstance(table, dict):
                raise ConfigError(
                    f"override: {key} does not exist, because {name} is a single value"
                )
        if key == "loss.type" and value != table.get("type"):
            # Options of the other loss, such as λ, are unknown keys of this one.
            table.clear()
        if key == "epochs":
            # Before the new value is put in: the old one is needed for the proportion.
            _follow_epochs(values, value, {name for name, _ in pairs})
        table[last] = value
    return values


def _follow_epochs(values: dict[str, Any], epochs: Any, given: set[str]) -> None:
    """Stretch the schedule to other epochs and shorten the warm-up to fewer, unless they are given too."""
    before, schedule = values.get("epochs"), values.get("schedule", {})
    if not isinstance(epochs, int) or not isinstance(before, int) or epochs < 1:
        return
    decay = schedule.get("decay_epoch")
    if decay and "schedule.decay_epoch" not in given:
        # 30 of 100 epochs become 15 of 50.
        schedule["decay_epoch"] = decay * epochs // before
    if "warmup_epochs" not in given:
        values["warmup_epochs"] = min(values.get("warmup_epochs", 0), epochs - 1)


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        # loss.type=crm needs no quotes: what is no TOML is a string.
        return text


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """All errors of a validation as one sentence each, with the nearest valid key for an unknown one."""
    return "; ".join(_sentence(dict(entry), model) for entry in error.errors())


def _sentence(entry: Mapping[str, Any], model: type[BaseModel]) -> str:
    path, fields = _locate(entry["loc"], model)
    kind, context = entry["type"], entry.get("ctx", {})
    if kind == "extra_forbidden":
        table, _, name = path.rpartition(".")
        hint = nearest(name, fields) or ";"
        return (
            f"unknown key {path!r}{hint} Valid "
            f"keys{f' of {table}' if table else ''}: {', '.join(fields)}"
        )
    if kind == "missing":
        return f"the key {path!r} is missing"
    if kind == "union_tag_not_found":
        return (
            f"the key '{path}.type' is missing, expected one of "
            f"{context.get('expected_tags', 'the losses')}"
        )
    if kind == "union_tag_invalid":
        tags = [tag.strip(" '") for tag in context["expected_tags"].split(",")]
        return (
            f"{path}.type is {context['tag']!r}, expected one of "
            f"{', '.join(tags)}{nearest(context['tag'], tags)}"
        )
    message: str = (
        entry["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    )
    if not path:
        return message
    prefix = "" if message.startswith("expected") else "expected "
    hint = nearest(
        entry["input"],
        str(context.get("expected", ""))
        .replace("'", "")
        .replace(" or ", ", ")
        .split(", "),
    )
    return (
        f"{path} is {entry['input']!r}, "
        f"{prefix}{message}{hint if kind == 'literal_error' else ''}"
    )


def _locate(
    location: Sequence[int | str], model: type[BaseModel]
) -> tuple[str, list[str]]:
    """The dotted key without the tags of unions, and the keys that are valid beside it."""
    path: list[str] = []
    fields: Mapping[str, Any] = model.model_fields
    members: tuple[Any, ...] = ()
    for depth, part in enumerate(location):
        # pydantic's location of loss.t is ("loss", "crm", "t"): the tag of the union is
        # no key.
        tagged = [
            m for m in members if part in get_args(m.model_fields["type"].annotation)
        ]
        if tagged:
            fields, members = tagged[0].model_fields, ()
            continue
        path.append(str(part))
        if depth == len(location) - 1 or part not in fields:
            break
        annotation = fields[str(part)].annotation
        members = get_args(annotation) if hasattr(annotation, "__args__") else ()
        members = tuple(
            m for m in members if isinstance(m, type) and issubclass(m, BaseModel)
        )
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            fields = annotation.model_fields
    return ".".join(path), list(fields)

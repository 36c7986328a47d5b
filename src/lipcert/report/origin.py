"""Everything needed to repeat a run, as far as its folder tells."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from lipcert.display import NOTHING
from lipcert.layout import CONFIG
from lipcert.report.side_by_side import duration
from lipcert.runs import RunFolder

Origin = dict[str, str]


def origins(runs: Sequence[RunFolder]) -> list[tuple[RunFolder, Origin]]:
    """The origin of every run; of a twin, only where it differs from the run that it was made with."""
    result: list[tuple[RunFolder, Origin]] = []
    shared: Origin = {}
    for run in runs:
        origin = _origin(run)
        # A twin follows its run, so that `shared` is that of the run.
        if run.twin:
            origin = _differences(origin, shared)
        else:
            shared = origin
        result.append((run, origin))
    return result


def _differences(twin: Origin, shared: Origin) -> Origin:
    """What a twin does not have in common with its run; both were made by one command."""
    differing = {}
    for name, value in twin.items():
        if name != "command" and value != shared.get(name):
            differing[name] = value
    return differing


def _origin(run: RunFolder) -> Origin:
    summary, environment = run.summary, run.environment or {}
    data = environment.get("data", {})
    rows = {
        "command": _command(run),
        "note": summary.note,
        "guarantee": f"{summary.guarantee or NOTHING}; executed in "
        f"{summary.execution}, rounding included",
        "method": f"{summary.method or NOTHING}, {summary.target or NOTHING}",
        "units": summary.units,
        "data": _joined(run.data, summary.data_note or data.get("note")),
        "data (SHA-256)": data.get("checksum"),
        "model (SHA-256)": summary.fingerprint,
        "seed": environment.get("seed"),
        "time": _times(run),
        "hardware": _hardware(run),
        "versions": _versions(run),
    }
    known = {}
    for name, value in rows.items():
        # A row without a value says nothing; the section names what is missing as a
        # whole.
        if value not in (None, ""):
            known[name] = str(value)
    return known


def _times(run: RunFolder) -> str:
    summary = run.summary
    times = {
        "training": summary.training_seconds,
        "certifying": summary.certifying_seconds,
        "attacking": summary.attacking_seconds,
        "in all": summary.seconds,
    }
    words = []
    for word, seconds in times.items():
        if seconds is not None:
            words.append(f"{word} {duration(seconds)}")
    return _joined(*words)


def _hardware(run: RunFolder) -> str:
    environment = run.environment or {}
    words = [environment.get(key) for key in ("processor", "gpu", "machine")]
    for key in ("cores", "threads", "processes"):
        if environment.get(key):
            words.append(f"{key}: {environment[key]}")
    return _joined(*words)


def _versions(run: RunFolder) -> str:
    environment = run.environment or {}
    versions = {"Python": environment.get("python"), **environment.get("versions", {})}
    words = []
    for name, version in versions.items():
        if version:
            words.append(f"{name} {version}")
    return _joined(*words)


def _joined(*words: str | None) -> str:
    return ", ".join(str(word) for word in words if word)


def _command(run: RunFolder) -> str | None:
    """The command that made the folder; for a run started from Python, the one that does the same."""
    program, *arguments = (run.environment or {}).get("command") or [""]
    # __main__.py is `python -m lipcert`.
    if Path(program).name in ("lipcert", "__main__.py"):
        return shlex.join(["lipcert", *arguments])
    if run.config is None:
        return None
    return f"lipcert train {shlex.quote(str(run.folder / CONFIG))}"

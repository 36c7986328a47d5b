"""`python -m benchmarks.runs NAME RUN [CERTIFIED…] [ATTACK.json]`: what a run reached, as results/run-NAME.json.

RUN is the folder of `lipcert train`, CERTIFIED that of a later `lipcert certify`, ATTACK.json what
`lipcert attack --json` printed; the last two if there are any.
"""

from __future__ import annotations

import csv
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from benchmarks.measure import RESULTS

_POINTS = 40


def collect(run: Path, later: list[Path]) -> dict[str, Any]:
    """The run's command and facts, its curve over the epochs (estimates) and over ε (guaranteed)."""
    judged = next((path for path in later if path.is_dir()), run)
    attacks = [json.loads(path.read_text()) for path in later if path.is_file()]
    summary = json.loads((judged / "summary.json").read_text())
    trained = json.loads((run / "summary.json").read_text())
    facts = json.loads((run / "environment.json").read_text())
    records = [
        json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()
    ]
    arguments = facts["command"][1:]
    for option in ("--run-dir", "--data-dir"):  # where they were is nobody's business
        if option in arguments:
            del arguments[(at := arguments.index(option)) : at + 2]
    return {
        "command": shlex.join(["lipcert", *arguments]),
        "environment": {key: facts[key] for key in ("versions", "python", "machine", "threads", "processes", "seed")},
        "data": facts["data"]["title"],
        "training_seconds": trained["training_seconds"],
        "summary": summary,
        "attacks": [{key: value for key, value in attack.items() if key != "model"} for attack in attacks],
        "by_epoch": [
            {key: record[key] for key in ("epoch", "clean", "estimated_certified", "estimated_mean_naive",
                                          "estimated_mean_liplt")}
            for record in records
            if "clean" in record
        ],
        "certified_accuracy": _curve(judged / "certificates.csv"),
    }  # fmt: skip


def _curve(path: Path) -> list[dict[str, float]]:
    """Guaranteed certified accuracy over ε, from 0 to where it vanishes."""
    with path.open() as file:
        rows = [
            (row["label"] == row["prediction"], float(row["radius"]))
            for row in csv.DictReader(file)
        ]
    radii = sorted(radius for correct, radius in rows if correct)
    step = radii[-1] / _POINTS if radii else 1.0
    return [
        {
            "epsilon": k * step,
            "accuracy": sum(radius >= k * step for radius in radii) / len(rows),
        }
        for k in range(_POINTS + 1)
    ]


if __name__ == "__main__":
    name, folder, *others = sys.argv[1:]
    target = RESULTS / f"run-{name}.json"
    target.write_text(
        json.dumps(collect(Path(folder), [Path(other) for other in others]), indent=1)
        + "\n"
    )
    print(target)

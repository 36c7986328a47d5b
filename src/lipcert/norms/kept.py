"""Norms that are done, in files: a bound that is interrupted continues with them."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lipcert.files import replace_file
from lipcert.network.sweep import Pair
from lipcert.processes import process_rank

_SEED = "seed"
_LOG = logging.getLogger(__name__)
Record = dict[str, Any]
"""What is known of a norm, by the names of its figures."""


class KeptNorms:
    """Records by pairs in a folder that belongs to one network and one way to bound it.

    Every process writes a file of its own and reads all. The checksum finds damage, and
    files of another folder, whose name is in it, but stops nobody who computes it anew;
    such files count as missing.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._own: dict[str, Record] = {}
        self._all: dict[str, Record] = {}
        # Files of other processes, and of runs with more of them, too: a norm is the
        # same whoever has bounded it.
        for file in sorted(folder.glob("norms-*.json")):
            self._all |= _read(file)

    def find(self, pair: Pair) -> Record | None:
        """What is known of a pair, or None."""
        return self._all.get(_key(pair))

    def seed(self, fresh: int) -> int:
        """The seed of everything in this folder: the same start for a pair, however often a bound is begun anew.

        A norm that is drawn again with another start, because the first did not suit,
        would fail twice as often.
        """
        if _SEED not in self._all:
            self._all[_SEED] = self._own[_SEED] = {"seed": fresh}
            # Before the first step, or an interruption in the first round would redraw.
            self.add({})
        return int(self._all[_SEED]["seed"])

    def add(self, records: Mapping[Pair, Record]) -> None:
        """Keep these, too. A folder that cannot be written is no failure, only slow after an interruption."""
        for pair, record in records.items():
            self._own[_key(pair)] = record
        # JSON has as many digits as a float needs to be read back as it was: no bound
        # becomes smaller in a file.
        kept = {**self._all, **self._own}
        content = {"records": kept, "sha256": _checksum(kept, self._folder)}
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            # One file per process: two that write the same one would lose each other's
            # records.
            with replace_file(
                self._folder / f"norms-{process_rank()}.json"
            ) as temporary:
                temporary.write_text(json.dumps(content) + "\n")
        except OSError as error:
            _LOG.warning("finished norms cannot be kept in %s: %s", self._folder, error)


def _key(pair: Pair) -> str:
    j, i = pair
    return f"{j},{i}"


def _checksum(records: Mapping[str, Record], folder: Path) -> str:
    # The name of the folder is a hash of the network: norms of another one, copied
    # here, are not taken for those of this.
    content = json.dumps([folder.name, records], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def _read(file: Path) -> dict[str, Record]:
    try:
        content = json.loads(file.read_text())
        records: dict[str, Record] = content["records"]
        whole = content["sha256"] == _checksum(records, file.parent)
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return records if whole else {}

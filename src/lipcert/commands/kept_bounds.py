"""What an interrupted `lipcert bound` has finished, kept in the cache until the command ends."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from shutil import rmtree

from lipcert.bounds.bound import Bound
from lipcert.bounds.fingerprint import fingerprint
from lipcert.data.decoded import cache_dir
from lipcert.network.normal_form import Network
from lipcert.processes import is_first_process, of_first
from lipcert.version import VERSION

_LOG = logging.getLogger(__name__)


class KeptBounds:
    """Finished bounds and norms of a network, in a folder with its fingerprint."""

    def __init__(self, network: Network) -> None:
        # By the fingerprint: other weights, another program or other rules have another
        # folder.
        self.folder = cache_dir() / "bounds" / fingerprint(network)[:32]
        self._network = network

    def find(self, method: str, targets: Sequence[str]) -> dict[str, Bound]:
        """Bounds by the names of their targets, as far as they are kept."""
        found = {}
        for target in targets:
            known = Bound.find(self._path(method, target))
            # The folder has half of the fingerprint in its name; the bound has all of
            # it.
            if known is not None and known.belongs_to(self._network):
                found[target] = known
        # Processes that found different files would wait for each other in different
        # places.
        return of_first(found)

    def add(self, method: str, bounds: Mapping[str, Bound]) -> None:
        """Keep these, too. A folder that cannot be written is no failure, only slow after an interruption."""
        if not is_first_process():
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for target, bound in bounds.items():
                bound.save(self._path(method, target))
        except OSError as error:
            _LOG.warning("finished bounds cannot be kept in %s: %s", self.folder, error)

    def forget(self) -> None:
        """The command has ended: the next one computes anew."""
        if is_first_process():
            rmtree(self.folder, ignore_errors=True)

    def _path(self, method: str, target: str) -> Path:
        # Another version may have another method under the same name.
        return self.folder / f"{VERSION}-{method}-{target}"

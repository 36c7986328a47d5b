"""What a method of bounding is: the interface, the names, and the work that methods share."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from lipcert.bounds.ellipsoids import Ellipsoids
from lipcert.bounds.fit import FitOptions, fitted_ellipsoids, fitted_scales
from lipcert.bounds.forms import Form, make_form
from lipcert.bounds.refine import refine
from lipcert.bounds.register import Register
from lipcert.bounds.targets import Target
from lipcert.files import tensors_digest
from lipcert.network.build import normal_form
from lipcert.network.normal_form import Network
from lipcert.network.program import Program
from lipcert.norms.kept import KeptNorms
from lipcert.norms.norm_options import NormOptions
from lipcert.processes import of_first
from lipcert.progress import Progress
from lipcert.version import VERSION

T = TypeVar("T")
_MOST_FORMS = 6
"""Every form has this part of the failure probability, so that its norms are the same in every method."""


@dataclass
class MethodTask:
    """A program to be bounded, for some targets: what methods have in common is computed once.

    promised: the same model with layers that are Lipschitz by construction as single
    sites, if it has any.
    digest: the fingerprint of the program, under which finished norms are kept.
    """

    program: Program
    promised: Program | None
    whole_output: bool
    options: NormOptions
    fit: FitOptions
    progress: Progress
    digest: str = ""
    _kept: dict[Any, Any] = field(default_factory=dict)

    def keep(self, key: Any, make: Callable[[], T]) -> T:
        """What `make` returns, computed once for each key."""
        # Norms of a form may be randomised: asked for twice, they would differ and
        # spend the failure probability twice.
        if key not in self._kept:
            self._kept[key] = make()
        kept: T = self._kept[key]
        return kept

    @cached_property
    def network(self) -> Network:
        """The float64 network, with the weights as executed."""
        return self._networks(self.program)[0]

    @cached_property
    def apart(self) -> Network:
        """The same with sorted pairs as means, which pass linearly, and absolute values of differences."""
        return normal_form(self.program, exact=True, apart=True)

    def ellipsoids(self, target: Target) -> tuple[Ellipsoids, dict[str, Tensor]]:
        """Ellipsoids that are fitted to the weights, and the diagonals behind them."""
        # Processes may round differently: with diagonals of the first one, all of them
        # prove the same bound.
        return self.keep(
            ("ellipsoids", target.name), lambda: of_first(self._fit_ellipsoids(target))
        )

    @torch.enable_grad()
    def _fit_ellipsoids(self, target: Target) -> tuple[Ellipsoids, dict[str, Tensor]]:
        return fitted_ellipsoids(
            self.network, target.name, self.fit, partial(self.progress, "multipliers")
        )

    def neurons(self) -> int:
        """The number of entries of all nonlinearities."""
        # Sites 1..n: the input and the output are none.
        return sum(self.network.out_size(k) for k in range(1, self.network.depth + 1))

    def form(self, method: str) -> Form:
        """The network by "naive" or "liplt"."""
        return self.keep(method, lambda: self._make(method, self.program))

    def promised_form(self, method: str) -> Form | None:
        """The same for the network of layers that are Lipschitz by construction, if there are any."""
        if self.promised is None:
            return None
        program = self.promised
        return self.keep(("promised", method), lambda: self._make(method, program))

    def rescaled_form(self, target: Target) -> Form:
        """LipLT in coordinates that are fitted to the target."""
        key = ("rescaled", target.name)
        return self.keep(
            key, lambda: self._make("rescaled", self.program, self.scales(target))
        )

    def refined_form(self) -> Form:
        """LipLT, refined by diagonal multipliers."""
        return self.keep(
            "lt-sdp",
            lambda: refine(self.form("liplt"), self.options, progress=self.progress),
        )

    def scales(self, target: Target) -> dict[str, Tensor]:
        """Diagonals by the names of their sites, fitted to the weights."""
        return self.keep(("scales", target.name), lambda: of_first(self._fit(target)))

    @torch.enable_grad()
    def _fit(self, target: Target) -> dict[str, Tensor]:
        # In the model's own precision, which is faster: any positive diagonals are
        # valid, however they were found.
        network = normal_form(self.program)
        return fitted_scales(
            network, target.name, self.fit, partial(self.progress, "coordinates")
        )

    def _make(
        self, method: str, program: Program, scales: Mapping[str, Tensor] | None = None
    ) -> Form:
        network, rough = self._networks(program)
        # Norms up to site n, and up to the output, n + 1, if a target needs those.
        last = network.depth + self.whole_output
        options = replace(
            self.options,
            failure_probability=self.options.failure_probability / _MOST_FORMS,
        )
        name = method if program is self.program else f"promised {method}"
        kept = self._kept_norms(name, last, scales or {})
        return make_form(
            method, network, last, options, self.progress, scales, rough, kept
        )

    def _kept_norms(
        self, name: str, last: int, scales: Mapping[str, Tensor]
    ) -> KeptNorms | None:
        """Where finished norms of a form are kept: a folder for everything that they depend on."""
        options = self.options
        if options.keep is None:
            return None
        # A norm that was kept for other options, weights or versions of torch would be
        # a stale one.
        numbers = [
            options.dense_limit,
            options.inflation,
            options.failure_probability,
            options.seed,
        ]
        key = json.dumps(
            [
                self.digest,
                name,
                last,
                tensors_digest(scales),
                numbers,
                VERSION,
                torch.__version__,
            ]
        )
        folder = sha256(key.encode()).hexdigest()[:32]
        return KeptNorms(Path(options.keep) / folder)

    def _networks(self, program: Program) -> tuple[Network, Network]:
        """The network in float64, and in the program's own precision."""

        def make() -> tuple[Network, Network]:
            # Rules are tried out once, in float64; the second network is only for
            # estimates.
            return normal_form(program, exact=True), normal_form(program, check=False)

        return self.keep(("networks", program is self.promised), make)


class Method(ABC):
    """A way to bound: forms of the network for the recursion, and values found by other means.

    Adding one is a subclass in a file of its own with `@register_method`.
    """

    name: ClassVar[str]
    rank: ClassVar[int] = 10
    """Where it stands in tables: from the coarsest to the tightest."""

    @abstractmethod
    def forms(self, task: MethodTask, target: Target) -> list[Form]:
        """Forms that take turns in the recursion; the first one's constants between sites are those of the bound."""

    def values(self, task: MethodTask, target: Target) -> Mapping[str, Tensor]:
        """Other upper bounds on the target's values, by the names of what found them."""
        return {}

    def scales(self, task: MethodTask, target: Target) -> Mapping[str, Tensor]:
        """Diagonals that were fitted, by the names of their sites."""
        return {}


# Filled by the decorators when the modules of this folder are imported.
METHODS: Register[Method] = Register("method")
register_method = METHODS.add
find_method = METHODS.find

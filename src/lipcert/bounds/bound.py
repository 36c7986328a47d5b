"""Lipschitz bounds that hold, and the files they are kept in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path

from torch import Tensor, nn

from lipcert.bounds.bound_files import base_path, read_bound, write_bound
from lipcert.bounds.bound_numbers import check_numbers, pairwise_upper
from lipcert.bounds.fingerprint import fingerprint
from lipcert.bounds.targets import TARGETS, find_target
from lipcert.errors import BoundError, OptionError
from lipcert.files import tensors_digest
from lipcert.network.build import trace
from lipcert.network.normal_form import Network
from lipcert.shown import Shown

_NUMBERS = ("tails", "between", "shares")
_SCALES = "scales of "


@dataclass(frozen=True)
class Facts:
    """What a bound is and what it rests on; everything but the numbers themselves."""

    method: str
    target: str
    guarantee: str
    failure_probability: float
    inflation: float
    seconds: float
    input_shape: tuple[int, ...]
    sites: tuple[str, ...]
    fingerprint: str
    library: str
    winners: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Bound(Shown):
    """Guaranteed upper bounds on l2 Lipschitz constants; the result of `lipcert.bound`.

    value: () for the target network, (K,) per class, (K, K) for last-layer and
    pairwise; float64.
    contributions: share of every site in the (mean) value, by name, from the input on;
    they sum to it.
    prefix: constants of the maps from the input to each nonlinearity.
    tails: (n+1, …), constants from the output of each site 0..n to the target; tails[0]
    is the value.
    between: (n+1, n+1), entry [k, i] bounds the map from the output of site i to the
    input of site k.
    scales: the diagonals of the sites, by name, if coordinates were fitted to the
    weights.
    winners: for the methods that combine several: which of them gave the constant of
    each site and the values.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
        >>> made = lipcert.bound(model, (4,))
        >>> made.value.shape, made.guarantee
        (torch.Size([3, 3]), 'deterministic')
        >>> made.save("bound")
        >>> lipcert.Bound.load("bound").belongs_to(model)
        True
    """

    facts: Facts
    tails: Tensor = field(repr=False)
    between: Tensor = field(repr=False)
    shares: Tensor = field(repr=False)
    scales: Mapping[str, Tensor] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        _check_shapes(self)
        for name in _NUMBERS:
            check_numbers(name, getattr(self, name))
        for name, diagonal in self.scales.items():
            check_numbers(_SCALES + name, diagonal, positive=True)
        # The class is frozen, its tensors are not: `check_belongs` compares them with
        # what they were here.
        _ = self._numbers_digest  # of the numbers as they are now

    @cached_property
    def _numbers_digest(self) -> str:
        return self._digest()

    def _digest(self) -> str:
        return tensors_digest({name: getattr(self, name) for name in _NUMBERS})

    @property
    def value(self) -> Tensor:
        """The constants; a copy."""
        # In-place arithmetic on it would otherwise change what certificates rest on.
        return self.tails[0].clone()

    @property
    def method(self) -> str:
        return self.facts.method

    @property
    def target(self) -> str:
        return self.facts.target

    @property
    def guarantee(self) -> str:
        """ "deterministic", or the probability with which the bound holds."""
        return self.facts.guarantee

    @property
    def inflation(self) -> float:
        """By how much randomised norms were enlarged; 0 if every norm was proved."""
        return self.facts.inflation

    @property
    def seconds(self) -> float:
        return self.facts.seconds

    @property
    def winners(self) -> Mapping[str, str]:
        return self.facts.winners

    @property
    def contributions(self) -> dict[str, float]:
        return dict(zip(self.facts.sites, self.shares.tolist(), strict=True))

    @property
    def prefix(self) -> Tensor:
        # (n,): column 0 begins at the input, row 0 is the input itself.
        return self.between[1:, 0]

    def pairwise(self, classes: int) -> Tensor:
        """(K, K) bounds on the constants of the logit differences, whatever the target."""
        return pairwise_upper(self.value, self.target, classes)

    def belongs_to(self, model: nn.Module | Network) -> bool:
        """Whether the program and the weights of the model are those the bound was made for."""
        network = network_of(model, self.facts.input_shape)
        return fingerprint(network) == self.facts.fingerprint

    def check_belongs(self, model: nn.Module | Network) -> None:
        """Refuse any other model."""
        network = network_of(model, self.facts.input_shape)
        if not self.belongs_to(network):
            raise BoundError(
                "the bound was made for other weights or another program: the model has changed since, or an operator "
                "of your own that it calls, or was in another dtype or mode; compute it again with lipcert.bound"
            )
        # The fingerprint is of the model alone: a number made smaller afterwards would
        # be a false certificate.
        if self._digest() != self._numbers_digest:
            raise BoundError(
                "the numbers of the bound were changed since it was made; compute it again with lipcert.bound"
            )
        self._check_size(network)

    def _check_size(self, network: Network) -> None:
        """Refuse numbers for another number of sites or classes than the network has."""
        classes: list[int] = []
        if self.target != "network":
            classes = [network.classes] * self.value.dim()
        # One tail for each of the sites 0..n.
        expected = (network.depth + 1, *classes)
        if tuple(self.tails.shape) != expected:
            raise BoundError(
                f"the tails of the bound have the shape {tuple(self.tails.shape)}, the model needs {expected}; "
                "compute it again with lipcert.bound"
            )

    def save(self, path: str | Path) -> None:
        """Write `path`.json (facts and the checksum of everything) and `path`.safetensors (numbers)."""
        tensors = {name: getattr(self, name).contiguous().cpu() for name in _NUMBERS}
        for name, diagonal in self.scales.items():
            tensors[_SCALES + name] = diagonal.contiguous().cpu()
        facts = {**asdict(self.facts), "contributions": self.contributions}
        write_bound(path, facts, tensors)

    @classmethod
    def find(cls, path: str | Path) -> Bound | None:
        """What `save` wrote, or None if it is missing or damaged."""
        try:
            return cls.load(path)
        except (BoundError, OSError):
            return None

    @classmethod
    def load(cls, path: str | Path) -> Bound:
        """Read what `save` wrote; edits and damage are refused."""
        stored, tensors = read_bound(path)
        try:
            numbers = {name: tensors.pop(name) for name in _NUMBERS}
            known = {fact.name: stored[fact.name] for fact in fields(Facts)}
            known["input_shape"] = tuple(known["input_shape"])
            known["sites"] = tuple(known["sites"])
        except (TypeError, KeyError) as error:
            problem = f"the bound {base_path(path)} is damaged ({error}); compute it again with lipcert.bound"
            raise BoundError(problem) from error
        # What is left in `tensors` are the diagonals.
        scales = {name.removeprefix(_SCALES): tensors[name] for name in tensors}
        return cls(facts=Facts(**known), scales=scales, **numbers)

    def __repr__(self) -> str:
        shape = f" (mean of {tuple(self.value.shape)})" if self.value.dim() else ""
        return (
            f"Bound({self.mean:.6g}{shape}, method={self.method!r}, target={self.target!r}, {self.guarantee}, "
            f"{self.seconds:.1f} s)"
        )

    def __float__(self) -> float:
        if self.value.dim():
            problem = f"the bound has {self.value.numel()} constants, of shape {tuple(self.value.shape)}"
            raise OptionError(f"{problem}; take one from .value, or their .mean")
        return float(self.value)

    @property
    def mean(self) -> float:
        """The value, averaged over classes or over pairs of different classes."""
        return float(find_target(self.target).mean(self.value))


def network_of(model: nn.Module | Network, input_shape: tuple[int, ...]) -> Network:
    """A model for inputs of this shape, captured if it is not yet."""
    if isinstance(model, Network):
        return model
    return trace(model, input_shape)


def _check_shapes(bound: Bound) -> None:
    """Refuse tensors whose shapes do not fit each other, the sites and the target."""
    sites, target = len(bound.facts.sites), bound.target
    if target not in TARGETS:
        raise BoundError(
            f"the target of the bound is {target!r}, expected one of {', '.join(TARGETS)}"
        )
    # Pairwise with tails of shape (5, 10, 10): (10,)·2 = (10, 10). Network, with tails
    # of shape (5,): ()·0 = ().
    classes = bound.tails.shape[1:2] * len(find_target(target).shape(1))
    expected = [(sites, *classes), (sites, sites), (sites,)]
    for name, shape in zip(_NUMBERS, expected, strict=True):
        found = tuple(getattr(bound, name).shape)
        if found != shape:
            raise BoundError(
                f"the {name} of the bound have the shape {found}, which does not fit "
                f"{sites} sites and the target {target}; compute it again with lipcert.bound"
            )

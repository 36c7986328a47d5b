"""Lipschitz bounds that hold, and the files they are kept in."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from lipcert.bounds.fingerprint import fingerprint
from lipcert.bounds.targets import pairwise_matrix
from lipcert.errors import BoundError, LipcertError, OptionError
from lipcert.figures import TextTable, contributions, data_frame, heat_map
from lipcert.files import replace_file
from lipcert.network.normal_form import Network
from lipcert.network.trace import trace

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure
    from rich.table import Table

_FORMAT = 2
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
class Bound:
    """Guaranteed upper bounds on l2 Lipschitz constants; the result of `lipcert.bound`.

    value: () for the target network, (K,) per class, (K, K) for last-layer and pairwise; float64.
    contributions: share of every site in the (mean) value, by name, from the input on; they sum to it.
    prefix: constants of the maps from the input to each nonlinearity.
    tails: (n+1, …), constants from the output of each site 0..n to the target; tails[0] is the value.
    between: (n+1, n+1), entry [k, i] bounds the map from the output of site i to the input of site k.
    scales: the diagonals of the sites, by name, if coordinates were fitted to the weights.
    winners: for the methods that combine several: which of them gave the constant of each site and the values.
    """

    facts: Facts
    tails: Tensor = field(repr=False)
    between: Tensor = field(repr=False)
    shares: Tensor = field(repr=False)
    scales: Mapping[str, Tensor] = field(default_factory=dict, repr=False)

    @property
    def value(self) -> Tensor:
        return self.tails[0]

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
        return self.between[1:, 0]

    def pairwise(self, classes: int) -> Tensor:
        """(K, K) bounds on the constants of the logit differences, whatever the target."""
        return pairwise_upper(self.value, self.target, classes)

    def belongs_to(self, model: nn.Module, network: Network | None = None) -> bool:
        """Whether the weights and the structure of the model are those the bound was made for."""
        network = network or trace(model, self.facts.input_shape)
        return fingerprint(model, network) == self.facts.fingerprint

    def check_belongs(self, model: nn.Module, network: Network | None = None) -> None:
        """Refuse any other model."""
        if self.belongs_to(model, network):
            return
        reason = "the model has changed since"
        for dtype in (torch.float32, torch.float64):
            with suppress(LipcertError):  # a model may contain tensors that are not converted with it
                if self.belongs_to(copy.deepcopy(model).to(dtype)):
                    reason = f"the model was in {dtype} then, and a change of dtype counts"
        raise BoundError(f"the bound was made for other weights: {reason}; compute it again with lipcert.bound")

    def save(self, path: str | Path) -> None:
        """Write `path`.json (facts) and `path`.safetensors (numbers)."""
        base = _base(path)
        tensors = {name: getattr(self, name).contiguous().cpu() for name in _NUMBERS}
        tensors |= {_SCALES + name: diagonal.contiguous() for name, diagonal in self.scales.items()}
        mark = {"fingerprint": self.facts.fingerprint}
        with replace_file(base.with_name(base.name + ".safetensors")) as temporary:
            save_file(tensors, temporary, metadata=mark)
        facts = {"format": _FORMAT, **asdict(self.facts), "contributions": self.contributions}
        with replace_file(base.with_name(base.name + ".json")) as temporary:
            temporary.write_text(json.dumps(facts, indent=2) + "\n")

    @classmethod
    def find(cls, path: str | Path) -> Bound | None:
        """What `save` wrote, or None if it is missing or damaged."""
        try:
            return cls.load(path)
        except (BoundError, OSError):
            return None

    @classmethod
    def load(cls, path: str | Path) -> Bound:
        """Read what `save` wrote."""
        base = _base(path)
        facts_file, numbers_file = base.with_name(base.name + ".json"), base.with_name(base.name + ".safetensors")
        try:
            stored: dict[str, Any] = json.loads(facts_file.read_text())
            with safe_open(numbers_file, framework="pt") as file:
                mark = (file.metadata() or {}).get("fingerprint")
                tensors = {name: file.get_tensor(name) for name in _NUMBERS}
                names = [name for name in file.keys() if name.startswith(_SCALES)]  # noqa: SIM118
                scales = {name.removeprefix(_SCALES): file.get_tensor(name) for name in names}
            known = {fact.name: stored[fact.name] for fact in fields(Facts)}
            facts = Facts(**{**known, "input_shape": tuple(known["input_shape"]), "sites": tuple(known["sites"])})
        except FileNotFoundError as error:
            missing = numbers_file if facts_file.exists() else facts_file
            raise BoundError(f"{missing} does not exist; a bound is a .json and a .safetensors file") from error
        except (ValueError, TypeError, KeyError, SafetensorError) as error:  # ValueError: neither JSON nor text
            raise BoundError(f"the bound {base} is damaged ({error}); compute it again with lipcert.bound") from error
        if stored.get("format") != _FORMAT or mark != facts.fingerprint:
            raise BoundError(f"{facts_file} and {numbers_file.name} do not belong together; compute the bound again")
        return cls(facts=facts, scales=scales, **tensors)

    def __repr__(self) -> str:
        shape = f" (mean of {tuple(self.value.shape)})" if self.value.dim() else ""
        return (
            f"Bound({self.mean:.6g}{shape}, method={self.method!r}, target={self.target!r}, {self.guarantee}, "
            f"{self.seconds:.1f} s)"
        )

    def __rich__(self) -> Table:
        return self._table().rich()

    def _repr_html_(self) -> str:
        return self._table().html()

    def _table(self) -> TextTable:
        mean = f", mean of {' × '.join(map(str, self.value.shape))}" if self.value.dim() else ""
        rows = [
            (site, f"{constant:.6g}", f"{share:.6g}", f"{share / (self.mean or 1.0):.1%}")
            for site, constant, share in zip(self.facts.sites, self._reached(), self.shares.tolist(), strict=True)
        ]
        return TextTable(
            f"Lipschitz bound {self.mean:.6g} ({self.target}{mean})",
            ("site", "from the input", "contribution", "share"),
            rows,
            f"{self.method}, l2, {self.guarantee}, {self.seconds:.1f} s",
        )

    def _reached(self) -> list[float]:
        """Constants of the maps from the input to each of the sites 0..n."""
        return [1.0, *self.prefix.tolist()]

    def plot(self, classes: Sequence[str] | None = None) -> Figure:
        """A heat map of the constants of all pairs of classes; for other targets, the contributions of the sites."""
        if self.value.dim() < 2:
            return contributions({self.method: self.contributions})
        names = list(classes) if classes is not None else [str(k) for k in range(len(self.value))]
        if len(names) != len(self.value):
            raise OptionError(f"classes has {len(names)} names, the bound is for {len(self.value)} classes")
        return heat_map(self.value.numpy(), names, f"{self.method}, {self.target}: mean {self.mean:.4g}")

    def to_pandas(self) -> pandas.DataFrame:
        """One row per site: the constant of the map from the input to it, and its contribution to the (mean) value."""
        columns = {"site": self.facts.sites, "from_input": self._reached(), "contribution": self.shares.tolist()}
        return data_frame(columns, index="site")

    @property
    def mean(self) -> float:
        """The value, averaged over classes or over pairs of different classes."""
        if self.value.dim() == 2:
            k = self.value.shape[0]
            return float(self.value.sum()) / max(k * (k - 1), 1)
        return float(self.value.mean())


def pairwise_upper(value: Tensor, target: str, classes: int) -> Tensor:
    """`pairwise_matrix`, rounded up."""
    return pairwise_matrix(value, target, classes) * (1 + 2.0**-50)


def site_names(network: Network) -> Sequence[str]:
    """Distinct names of the sites 0..n."""
    names: list[str] = []
    for site in network.sites[:-1]:
        count = sum(name == site.name or name.startswith(f"{site.name}#") for name in names)
        names.append(site.name if count == 0 else f"{site.name}#{count + 1}")
    return names


def _base(path: str | Path) -> Path:
    path = Path(path)
    return path.with_suffix("") if path.suffix in (".json", ".safetensors") else path

"""The recursion that takes the best of several forms of a network.

Any valid constant m_i may enter the recursion of any form. So a form computes its
constants from the smallest ones known, hands them on, and the forms take turns until
nothing improves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from torch import Tensor

from lipcert.bounds.forms import Form

_ROUNDS = 8


@dataclass
class Prefixes:
    """The smallest constants of the maps from the input to each nonlinearity.

    known, winners: those of the first program by the names of its sites, and the
    methods they are due to.
    forms: those of each form, in its coordinates.
    """

    known: dict[str, float] = field(default_factory=dict)
    winners: dict[str, str] = field(default_factory=dict)
    forms: list[Tensor] = field(default_factory=list)


def smallest_prefixes(forms: Sequence[Form]) -> Prefixes:
    """Let the forms of each program take turns until none improves a constant any more.

    A name says which nonlinearity is meant within one program only: relu_1 of a program
    with a layer as a single site may be relu_2 of the program with the operations of
    that layer.
    """
    result = Prefixes()
    known: dict[int, dict[str, float]] = {}
    for form in forms:
        known[id(form.network.program)] = {}
    known[id(forms[0].network.program)] = result.known
    for _ in range(_ROUNDS):
        improved = False
        for form in forms:
            own = known[id(form.network.program)]
            constants = form.prefix(own).tolist()
            for site, name in enumerate(form.names[1:], start=1):
                # Forms meet in the coordinates of the network, the only ones that they
                # have in common.
                value = form.in_network(site, constants[site])
                # A gain of the size of roundings is not worth another round.
                if value < own.get(name, inf) * (1 - 1e-12):
                    own[name] = value
                    improved = True
                    if form.network.program is forms[0].network.program:
                        result.winners[name] = form.method
        if not improved:
            break
    result.forms = [form.prefix(known[id(form.network.program)]) for form in forms]
    return result

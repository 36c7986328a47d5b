"""Networks by name: of the zoo, of the user's code, or given as an object."""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import nn

from lipcert.errors import ModelError
from lipcert.models import zoo
from lipcert.network.program import Shape
from lipcert.own_code import GIVEN, failure, is_own, own_code


def build_network(
    name: str,
    input_shape: Shape,
    classes: int,
    *,
    seed: int,
    input_range: tuple[float, float] = (0.0, 1.0),
    given: nn.Module | None = None,
) -> nn.Module:
    """A network at its initial weights: the given one, that of the factory `module:factory`, or that of the zoo."""
    if given is not None:
        return zoo.ranged(given, input_range)
    if name.endswith(GIVEN):
        kind = name.removesuffix(GIVEN)
        raise ModelError(
            f"the model {kind} was given in Python and is not stored; give "
            "it again as model="
        )
    if is_own(name):
        return zoo.ranged(from_factory(name, seed), input_range)
    return zoo.build(name, input_shape, classes, seed=seed, input_range=input_range)


def from_factory(spec: str, seed: int) -> nn.Module:
    """What the user's function returns, called without arguments with a seed; of a module, a copy."""
    # Seeded inside, and the caller's random numbers afterwards as they were.
    with own_code(spec, ModelError) as factory, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        try:
            # A module at the top level of the user's file is shared by all who import
            # it.
            model = deepcopy(factory) if isinstance(factory, nn.Module) else factory()
        except Exception as error:  # whatever the user's code raises
            raise failure(
                spec, "fails when it is called without arguments", error, ModelError
            ) from error
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"{spec} returns {type(model).__name__}, expected a torch.nn.Module"
        )
    return model

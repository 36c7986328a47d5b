"""The processes of a training."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from lipcert.errors import ConfigError
from lipcert.resources import bfloat16_works
from lipcert.training.config import TrainConfig

if TYPE_CHECKING:
    from lightning_fabric import Fabric


@contextmanager
def launched(config: TrainConfig) -> Iterator[Fabric]:
    """The processes that torchrun has started, or this one; the caller's random state is left alone."""
    from lightning_fabric import Fabric
    from lightning_fabric.strategies.ddp import DDPStrategy

    mixed, gpu = config.precision == "bf16-mixed", torch.cuda.is_available()
    if mixed and not gpu and not bfloat16_works():
        raise ConfigError(
            "precision is bf16-mixed, but this processor cannot multiply bfloat16 "
            "numbers; use 32-true"
        )
    world = int(os.environ.get("WORLD_SIZE", "1"))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    strategy: Any = "auto"
    if world > 1:  # other processes wait for as long as the first one certifies
        strategy = DDPStrategy(timeout=timedelta(days=7))
    fabric = Fabric(
        accelerator="cuda" if gpu else "cpu",
        strategy=strategy,
        devices=local,
        num_nodes=max(world // local, 1),
        precision=config.precision,
    )
    # From here on there are `world` processes, which all have to make the same calls.
    fabric.launch()
    with torch.random.fork_rng():
        yield fabric

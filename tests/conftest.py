"""Settings of all tests: one thread, fixed seeds, hypothesis profiles."""

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "fast", deadline=None, max_examples=25, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("full", parent=settings.get_profile("fast"), max_examples=500, derandomize=False)
settings.load_profile("full" if os.environ.get("LIPCERT_FULL") == "1" else "fast")

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of real data sets need a folder that holds them."""
    if os.environ.get("LIPCERT_DATA_DIR"):
        return
    for item in items:
        if item.get_closest_marker("data"):
            item.add_marker(pytest.mark.skip(reason="needs real data: set LIPCERT_DATA_DIR"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which real-data tests did not run."""
    skipped = [report.nodeid for report in terminalreporter.stats.get("skipped", []) if "data" in report.keywords]
    if skipped:
        terminalreporter.section("real-data tests that did not run (set LIPCERT_DATA_DIR)")
        for name in sorted(set(skipped)):
            terminalreporter.write_line(name)

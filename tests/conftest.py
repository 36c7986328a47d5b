"""Settings of all tests: one thread, fixed seeds, hypothesis profiles."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from lipcert.bounds.methods import METHODS
from lipcert.bounds.targets import TARGETS
from lipcert.data.sources import SOURCES
from lipcert.losses import LOSSES
from lipcert.network.rules.registry import MODULE_RULES, RULES

settings.register_profile(
    "fast",
    deadline=None,
    max_examples=5,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "full", parent=settings.get_profile("fast"), max_examples=500, derandomize=False
)
settings.load_profile("full" if os.environ.get("LIPCERT_FULL") == "1" else "fast")

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _own_registries() -> Iterator[None]:
    """Rules, methods, targets, losses and data sets that a test registers are gone after it."""
    registries = [RULES, *MODULE_RULES.values(), METHODS, TARGETS, LOSSES, SOURCES]
    before = [dict(registry) for registry in registries]
    yield
    for registry, kept in zip(registries, before, strict=True):
        registry.clear()
        registry.update(kept)


NEEDS = {
    "data": (
        "real-data tests",
        "set LIPCERT_DATA_DIR",
        lambda: bool(os.environ.get("LIPCERT_DATA_DIR")),
    ),
    "browser": (
        "browser tests",
        "install chromium and chromium-driver",
        lambda: bool(shutil.which("chromium") and shutil.which("chromedriver")),
    ),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of real data sets need a folder that holds them, tests of pages a browser."""
    missing = {
        mark: remedy for mark, (_, remedy, there) in NEEDS.items() if not there()
    }
    for item in items:
        for mark, remedy in missing.items():
            if item.get_closest_marker(mark):
                item.add_marker(pytest.mark.skip(reason=f"needs {mark}: {remedy}"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which of these tests did not run."""
    for mark, (what, remedy, _) in NEEDS.items():
        skipped = [
            report.nodeid
            for report in terminalreporter.stats.get("skipped", [])
            if mark in report.keywords
        ]
        if skipped:
            terminalreporter.section(f"{what} that did not run ({remedy})")
            for name in sorted(set(skipped)):
                terminalreporter.write_line(name)


FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--hide-scrollbars",
)  # fmt: skip


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium without a window."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    profile = tempfile.mkdtemp()
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability(
        "goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"}
    )
    driver = webdriver.Chrome(
        options=options, service=Service(shutil.which("chromedriver"))
    )
    driver.get("about:blank")  # what the first tab loads by itself is over
    yield driver
    driver.quit()
    shutil.rmtree(profile, ignore_errors=True)

"""Options of the benchmark suites: `pytest benchmarks/` measures, `--smoke` checks counters."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--smoke", action="store_true", help="shortest run of each benchmark: counters, no figures"
    )


@pytest.fixture
def is_smoke(request: pytest.FixtureRequest) -> bool:
    """Whether figures do not matter in this run."""
    smoke: bool = request.config.getoption("--smoke")
    return smoke

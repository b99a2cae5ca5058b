"""Shared by all tests: small configurations, and markers set by folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl import config_file
from asyncrl.config import Config


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for marker in ("gpu", "npu"):
            if marker in item.path.parts:
                item.add_marker(marker)


@pytest.fixture
def tiny_config(tmp_path: Path) -> Callable[..., Config]:
    """The quickstart shrunk to a few groups; overrides as on the command line."""

    def build(*overrides: str) -> Config:
        small = [
            "algorithm.group_size=4",
            "algorithm.mini_batch_groups=4",
            "trainer.total_steps=4",
            "validation.num_prompts=0",
            f"run.dir={tmp_path / 'run'}",
        ]
        path = config_file.resolve_config_path("quickstart")
        return config_file.load(path, [*small, *overrides])

    return build

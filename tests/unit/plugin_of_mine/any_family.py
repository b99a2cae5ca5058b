"""A plug-in that serves as dataset, reward, loss and engine in configuration tests."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field


class Clip(BaseModel, frozen=True, extra="forbid"):
    """A section inside a plug-in's settings."""

    lower: float = 0.2


class Config(BaseModel, frozen=True, extra="forbid"):
    """Settings that the tests set well and badly."""

    type: Literal["plugin_of_mine.any_family"] = "plugin_of_mine.any_family"
    path: Path | None = None
    num_letters: int = Field(default=4, ge=1)
    clip: Clip = Clip()
    max_model_len: int | None = None


def check(settings: Config) -> None:
    """Refuses a path that is not there, as a dataset does."""
    if settings.path is not None and not settings.path.exists():
        raise ValueError(
            f"path={settings.path} does not exist; set it to a folder of parquet files"
        )

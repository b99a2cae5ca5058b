"""metrics.jsonl in the run folder: one JSON object an optimizer step, on disk at once."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict


class Config(BaseModel):
    """No settings."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    type: Literal["jsonl"] = "jsonl"


class Tracker:
    """Appends to `metrics.jsonl`."""

    def __init__(self, config: Config, *, run_dir: Path) -> None:
        del config
        self._file = (run_dir / "metrics.jsonl").open("a")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Writes one line and flushes it; a number that is not finite becomes null."""
        row = {key: _finite_or_none(value) for key, value in metrics.items()}
        self._file.write(json.dumps({"step": step, **row}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _finite_or_none(value: float) -> float | None:
    # JSON has no NaN, and a reader in another language would stop at one.
    return value if math.isfinite(value) else None

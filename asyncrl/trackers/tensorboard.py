"""TensorBoard event files in the run folder's `tensorboard/`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

requires = (("tensorboard", "pip install 'tensorboard>=2.16'"),)


class Config(BaseModel):
    """No settings."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    type: Literal["tensorboard"] = "tensorboard"


class Tracker:
    """Writes each metric as a scalar over optimizer steps."""

    def __init__(self, config: Config, *, run_dir: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        del config
        self._writer = SummaryWriter(run_dir / "tensorboard", flush_secs=10)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Adds one point to each metric's curve."""
        for name, value in metrics.items():
            if name != "step":
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Writes what is left."""
        self._writer.close()

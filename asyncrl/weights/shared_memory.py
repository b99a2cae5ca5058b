"""Weights through shared memory on one node: safetensors files on tmpfs, read by memory map."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

SHARED_MEMORY = Path("/dev/shm")


class Config(BaseModel):
    """No settings. In memory are the version that the engines hold, and those not yet loaded.

    A slot goes back only when the engines hold the version trained on it, so at most
    floor(1 + async.staleness_threshold) versions wait at a time.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    type: Literal["shared_memory"] = "shared_memory"


class Channel:
    """Folders of one run on tmpfs, one a version."""

    def __init__(self, config: Config, *, run_dir: Path) -> None:
        del config
        self._root = Path(
            tempfile.mkdtemp(prefix=f"asyncrl-weights-{run_dir.name}-", dir=SHARED_MEMORY)
        )

    def folder(self, version: int) -> Path:
        """Where version `version` is written and read."""
        return self._root / f"v{version:06d}"

    def discard(self, version: int) -> None:
        """Frees the memory of a version that no engine will read again."""
        shutil.rmtree(self.folder(version), ignore_errors=True)

    def close(self) -> None:
        """Frees everything."""
        shutil.rmtree(self._root, ignore_errors=True)

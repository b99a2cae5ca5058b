"""The folder a run leaves behind: what lies where in it."""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.config import Config, ConfigError
from asyncrl.config_file import to_yaml


@dataclass(frozen=True)
class RunFolder:
    """Paths of one run's outputs."""

    root: Path

    @classmethod
    def create(cls, config: Config) -> RunFolder:
        """The folder `run.dir` (default `runs/<name>-<YYYYmmdd-HHMMSS>`), holding config.yaml.

        Raises ConfigError when `run.dir` already holds a run.
        """
        if config.run.dir is None:
            folder = cls(_new_folder(config.run.name))
        else:
            folder = cls(config.run.dir)
            if folder.holds_run():
                raise ConfigError(
                    f"run.dir={folder.root} already holds a run; set run.dir to a new folder"
                )
        folder.logs.mkdir(parents=True, exist_ok=True)
        folder.config.write_text(to_yaml(config))
        return folder

    @property
    def config(self) -> Path:
        """The resolved configuration; `--config` reads it."""
        return self.root / "config.yaml"

    @property
    def metrics(self) -> Path:
        """One JSON object an optimizer step."""
        return self.root / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        """Folder of TensorBoard event files."""
        return self.root / "tensorboard"

    @property
    def logs(self) -> Path:
        """Folder of log files, one an engine."""
        return self.root / "logs"

    @property
    def completions(self) -> Path:
        """Sample completions, one JSON object a line."""
        return self.root / "completions.jsonl"

    @property
    def model(self) -> Path:
        """Final weights and tokenizer, a Hugging Face folder."""
        return self.root / "model"

    @property
    def summary(self) -> Path:
        """The closing figures, written when the run ends."""
        return self.root / "summary.json"

    def holds_run(self) -> bool:
        """Whether a run has started in this folder."""
        return self.config.exists() or self.metrics.exists()

    def is_finished(self) -> bool:
        """Whether the run in this folder made all its steps."""
        return self.finished_summary() is not None

    def finished_summary(self) -> dict[str, Any] | None:
        """The closing figures of a run that made all its steps; None for any other folder."""
        try:
            values = json.loads(self.summary.read_text())
            is_run = self.config.is_file() and {"machine", "wall_s"} <= values.keys()
            return values if is_run and values["is_complete"] else None
        except (OSError, ValueError, KeyError, AttributeError):
            # Whatever lies in a folder that is none of ours.
            return None


def _new_folder(name: str) -> Path:
    """A folder that was not there before; a number is added when two runs start in one second."""
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    for suffix in itertools.chain([""], (f"-{count}" for count in itertools.count(2))):
        path = Path("runs") / (stem + suffix)
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        return path
    raise AssertionError("unreachable: the suffixes do not end")

"""The CPU as a device: one core stands for one device, ranks talk over gloo."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel

if TYPE_CHECKING:
    import torch


class Config(BaseModel, frozen=True, extra="forbid"):
    """The CPU has no settings; threads belong to the part that uses them."""

    type: Literal["cpu"] = "cpu"


def actor_options() -> dict[str, Any]:
    """One core an actor."""
    return {"num_cpus": 1}


class Device:
    """See the contract in `asyncrl.devices`."""

    type = "cpu"
    backend = "gloo"

    def __init__(self, config: Config) -> None:
        self.config = config

    def select(self, local_rank: int) -> torch.device:
        """The CPU, whichever the rank: the operating system spreads processes over cores."""
        import torch

        if local_rank < 0:
            raise ValueError(f"local_rank={local_rank}: must be >= 0")
        return torch.device(self.type)

    def set_threads(self, num: int) -> None:
        """Lets one operator use `num` threads in this process."""
        import torch

        torch.set_num_threads(num)

    def num_devices(self) -> int:
        """Cores that this process is allowed to run on."""
        return len(os.sched_getaffinity(0))

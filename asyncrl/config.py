"""How a run is described: frozen pydantic models, derived sizes, checks of values on each other.

What can be derived is a property here, never a second setting. Plug-in sections (`data`, `reward`,
`rollout.engine`, `algorithm.loss`, `weights`, `trackers`) keep their own settings; the plug-in's
`Config` checks them when `asyncrl.config_file` loads the configuration. What only the machine can
tell (files, devices, memory) is `asyncrl.preflight`.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from asyncrl import plugins
from asyncrl.correction import Correction, table_of


class ConfigError(ValueError):
    """A configuration that cannot run: what was wrong, what is legal, which setting to change."""


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, values never change after loading."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False
    )


class PluginSection(BaseModel):
    """A section whose settings, besides `type`, belong to the plug-in module that `type` names."""

    model_config = ConfigDict(frozen=True, extra="allow")
    type: str
    """Module in the family's folder, or the dotted name of a module of your own."""

    def settings(self, family: str) -> Any:
        """The plug-in's own `Config`, checked."""
        module = plugins.load(family, self.type)
        if not hasattr(module, "Config"):
            raise ValueError(f"module {self.type} has no class Config, so it is no plug-in")
        return module.Config(**self.model_dump())


def _defaults_to(name: str) -> BeforeValidator:
    """A section that is set in part keeps the plug-in it has by default."""
    return BeforeValidator(
        lambda value: {"type": name, **value} if isinstance(value, dict) else value
    )


_MAX_THREADS = 1024
"""More is a slip of the pen: no machine has as many cores for one process."""


class Run(Section):
    model_config = ConfigDict(coerce_numbers_to_str=True)
    name: str = "run"
    """At most 64 letters, digits, '_', '-' and '.'; part of the run folder's name."""
    dir: Path | None = None
    """Run folder; default `runs/<name>-<time>`."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    compare_to: Path | None = None
    """A finished run's folder; the summary then says how much faster this run was."""

    @field_validator("name")
    @classmethod
    def _names_a_folder(cls, value: str) -> str:
        if not re.fullmatch(r"[\w.-]{1,64}", value) or value in (".", ".."):
            raise ValueError(
                "1 to 64 letters, digits, '_', '-' and '.' are legal, and neither '.' nor '..' "
                "alone; set run.name (the folder is run.dir)"
            )
        return value


class RandomModel(Section):
    """A small transformer from random weights, with a character tokenizer."""

    architecture: Literal["qwen3", "llama"] = "qwen3"
    alphabet: str = "abcdefgh>"
    """Characters of the vocabulary; padding and end of text are added."""
    num_layers: int = Field(default=2, ge=1)
    hidden_size: int = Field(default=64, ge=8)
    num_heads: int = Field(default=4, ge=1)
    head_dim: int = Field(default=32, ge=2, multiple_of=2)
    """Width of an attention head; vLLM serves 32 and above on a CPU."""
    max_positions: int = Field(default=256, ge=8)

    @model_validator(mode="after")
    def _has_an_alphabet(self) -> RandomModel:
        if not self.alphabet or len(set(self.alphabet)) != len(self.alphabet):
            raise ValueError(
                f"model.random.alphabet={self.alphabet!r}: each character must appear once; set "
                "model.random.alphabet to distinct characters"
            )
        return self


class Model(Section):
    path: Path | None = None
    """Hugging Face folder with weights and tokenizer; null = `random`."""
    random: RandomModel | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Model:
        if (self.path is None) == (self.random is None):
            raise ValueError(
                "set exactly one of model.path (a Hugging Face folder) and model.random"
            )
        return self


class Advantage(Section):
    estimator: Literal["grpo", "dr_grpo", "rloo"] = "grpo"


class Kl(Section):
    """Penalty against the initial policy, added to the loss."""

    coefficient: float = Field(default=0.0, ge=0)
    estimator: Literal["k1", "k2", "k3"] = "k3"


class Overlong(Section):
    """Soft length penalty (DAPO, arXiv 2503.14476 §3.4): 0 up to `max_response_tokens -
    buffer_tokens`, then falling linearly to -penalty at `max_response_tokens`."""

    buffer_tokens: int = Field(ge=1)
    penalty: float = Field(default=1.0, gt=0)


class Algorithm(Section):
    group_size: int = Field(default=8, ge=1)
    """n: completions a prompt group."""
    mini_batch_groups: int = Field(default=16, ge=1)
    """Prompt groups in one mini-batch; R = this x async.require_batches."""
    advantage: Advantage = Advantage()
    loss: Annotated[PluginSection, _defaults_to("clipped")] = PluginSection(type="clipped")
    kl: Kl = Kl()
    overlong: Overlong | None = None

    @model_validator(mode="after")
    def _group_has_a_baseline(self) -> Algorithm:
        if self.group_size < 2:
            raise ValueError(
                f"algorithm.group_size={self.group_size}: {self.advantage.estimator} centres "
                "rewards on the group, so a group of 1 has advantage 0; set it to 2 or more"
            )
        return self


class Rollout(Section):
    engine: Annotated[PluginSection, _defaults_to("builtin")] = PluginSection(type="builtin")
    num_devices: int = Field(default=1, ge=1)
    """Rollout workers, each with one engine on one device."""
    num_threads: int = Field(default=1, ge=1, le=_MAX_THREADS)
    """CPU threads of each engine."""
    max_prompt_tokens: int = Field(default=32, ge=1)
    max_response_tokens: int = Field(default=8, ge=1)
    temperature: float = Field(default=1.0, gt=0)
    max_failures: int = Field(default=10, ge=0)
    """Failed prompt groups a run survives; one more ends it."""


class Trainer(Section):
    total_steps: int = Field(default=100, ge=1)
    num_devices: int = Field(default=1, ge=1)
    """Data-parallel FSDP2 ranks."""
    num_threads: int = Field(default=1, ge=1, le=_MAX_THREADS)
    lr: float = Field(default=1e-3, gt=0)
    warmup_steps: int = Field(default=0, ge=0)
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    micro_batch_tokens: int = Field(default=8192, ge=1)
    """Padded tokens of one forward pass."""
    gradient_checkpointing: bool = False
    dtype: Literal["float32", "bfloat16"] = "float32"
    max_rejected_batches: int = Field(default=10, ge=0)
    """Batches in a row whose every token was rejected; one more ends the run."""


class Async(Section):
    staleness_threshold: float = Field(default=1.0, ge=0)
    """s: slots beyond one version's need, as a share of it; 0 = synchronous."""
    trigger_parameter_sync_step: int = Field(default=1, ge=1)
    """T: optimizer steps a published version."""
    require_batches: int = Field(default=1, ge=1)
    """Mini-batches an optimizer step takes from the buffer."""
    lookahead: int = Field(default=0, ge=0)
    """W: how far past the oldest unconsumed group a ready one may overtake."""
    partial_rollout: bool = True
    """Running requests go on under new weights; false: they finish under the old ones first."""
    stale: Literal["mask", "refill"] = "mask"
    """A token beyond the bound is masked, or its group is evicted and its prompt admitted again."""
    rollout_correction: Correction = Correction()

    @field_validator("rollout_correction", mode="before")
    @classmethod
    def _shorthand(cls, value: Any) -> Any:
        return value if isinstance(value, Correction) else table_of(value)


class Validation(Section):
    num_prompts: int = Field(default=64, ge=0)
    """Held-out prompts, answered before the first and after the last step; 0 = none."""
    every_versions: int | None = Field(default=None, ge=1)
    """Also after each that many versions; rollouts go on meanwhile."""


class Buffer(Section):
    capacity_bytes: int = Field(default=64 << 20, ge=1 << 16)
    """Shared memory of the trajectory buffer."""


class Cluster(Section):
    num_nodes: int = Field(default=1, ge=1)
    devices_per_node: int | None = Field(default=None, ge=1)
    """Accelerators a node has; on a CPU: cores to use (null = what is there)."""
    address: str | None = None
    """Ray cluster to join; null starts a local one."""


class Deadlines(Section):
    """Seconds that each wait may take; a wait that takes longer ends the run by name."""

    start_s: float = Field(default=300, gt=0)
    generate_s: float = Field(default=300, gt=0)
    """For one completion, its wait for a place in the engine included."""
    reward_s: float = Field(default=120, gt=0)
    """For one score, its wait for others included."""
    step_s: float = Field(default=600, gt=0)
    publish_s: float = Field(default=120, gt=0)
    stop_s: float = Field(default=20, gt=0)


class Config(Section):
    """One run."""

    run: Run = Run()
    device: str = "cpu"
    """Module in asyncrl/devices."""
    model: Model
    data: PluginSection
    reward: PluginSection
    environment: Annotated[PluginSection, _defaults_to("single_turn")] = PluginSection(
        type="single_turn"
    )
    algorithm: Algorithm = Algorithm()
    rollout: Rollout = Rollout()
    trainer: Trainer = Trainer()
    asynchrony: Async = Field(default=Async(), alias="async")
    validation: Validation = Validation()
    weights: Annotated[PluginSection, _defaults_to("shared_memory")] = PluginSection(
        type="shared_memory"
    )
    trackers: tuple[PluginSection, ...] = (
        PluginSection(type="jsonl"),
        PluginSection(type="tensorboard"),
    )
    buffer: Buffer = Buffer()
    cluster: Cluster = Cluster()
    deadlines: Deadlines = Deadlines()

    @property
    def groups_per_step(self) -> int:
        """R: prompt groups an optimizer step."""
        return self.algorithm.mini_batch_groups * self.asynchrony.require_batches

    @property
    def groups_per_version(self) -> int:
        """R x T."""
        return self.groups_per_step * self.asynchrony.trigger_parameter_sync_step

    @property
    def num_slots(self) -> int:
        """C = floor((1 + s) R T): groups admitted and not yet given back, at most."""
        # In decimal, as it was written: 1 + s in binary may fall just below the slot it names.
        threshold = Fraction(str(self.asynchrony.staleness_threshold))
        return math.floor((1 + threshold) * self.groups_per_version)

    @property
    def max_staleness(self) -> int:
        """floor((C + W - 1) / (R T)): the proved bound on any trained token's staleness."""
        return (self.num_slots + self.asynchrony.lookahead - 1) // self.groups_per_version

    @property
    def num_versions(self) -> int:
        """Publications in the whole run; the last step always publishes."""
        return math.ceil(self.trainer.total_steps / self.asynchrony.trigger_parameter_sync_step)

    @property
    def load_s(self) -> float:
        """Deadline for engines to load a version: without keep they finish their requests first."""
        deadlines = self.deadlines
        draining = 0.0 if self.asynchrony.partial_rollout else deadlines.generate_s
        return deadlines.publish_s + draining

    @property
    def generation_s(self) -> float:
        """Deadline for one answer of an engine: it may first have to load a version."""
        return self.load_s + self.deadlines.generate_s

    @property
    def completion_s(self) -> float:
        """Deadline for a completion and its score; a batch fills in that time as well."""
        return self.generation_s + self.deadlines.reward_s

    @property
    def slot_s(self) -> float:
        """Deadline for a slot to come free: T steps and their batches, written and loaded."""
        deadlines = self.deadlines
        steps = self.asynchrony.trigger_parameter_sync_step * (self.completion_s + deadlines.step_s)
        return steps + deadlines.publish_s + self.load_s

    @model_validator(mode="after")
    def _sizes_fit_together(self) -> Config:
        problems = [*_batch_problems(self), *_length_problems(self), *_schedule_problems(self)]
        if problems:
            raise ValueError("\n".join(problems))
        return self


def _batch_problems(config: Config) -> list[str]:
    algorithm, ranks = config.algorithm, config.trainer.num_devices
    per_group = config.asynchrony.require_batches * algorithm.group_size
    trajectories = algorithm.mini_batch_groups * per_group
    if trajectories % ranks == 0:
        return []
    unit = ranks // math.gcd(ranks, per_group)
    nearest = max(1, math.floor(algorithm.mini_batch_groups / unit + 0.5)) * unit
    return [
        f"a step's {trajectories} trajectories (algorithm.mini_batch_groups "
        f"{algorithm.mini_batch_groups} x async.require_batches "
        f"{config.asynchrony.require_batches} x algorithm.group_size {algorithm.group_size}) do "
        f"not divide over trainer.num_devices={ranks} ranks; change one of them so that they do, "
        f"for example algorithm.mini_batch_groups={nearest}"
    ]


def _length_problems(config: Config) -> list[str]:
    problems = []
    rollout, overlong = config.rollout, config.algorithm.overlong
    if overlong and overlong.buffer_tokens >= rollout.max_response_tokens:
        problems.append(
            f"algorithm.overlong.buffer_tokens={overlong.buffer_tokens} is as long as the whole "
            f"response (rollout.max_response_tokens={rollout.max_response_tokens}), so every "
            "answer would be penalised; set it below rollout.max_response_tokens"
        )
    longest = rollout.max_prompt_tokens + rollout.max_response_tokens
    if config.trainer.micro_batch_tokens < longest:
        problems.append(
            f"trainer.micro_batch_tokens={config.trainer.micro_batch_tokens} cannot hold one "
            f"trajectory of rollout.max_prompt_tokens + rollout.max_response_tokens = {longest} "
            f"tokens; set trainer.micro_batch_tokens >= {longest}"
        )
    return problems


_MAX_SLOTS = 65536
"""Slots a trajectory buffer can have."""


def _schedule_problems(config: Config) -> list[str]:
    problems = []
    if config.num_slots > _MAX_SLOTS:
        problems.append(
            f"async.staleness_threshold={config.asynchrony.staleness_threshold:g} needs "
            f"{config.num_slots:g} slots, at most {_MAX_SLOTS} are possible; lower it, or "
            "algorithm.mini_batch_groups, async.require_batches or "
            "async.trigger_parameter_sync_step"
        )
    steps = config.asynchrony.trigger_parameter_sync_step
    if steps > config.trainer.total_steps:
        problems.append(
            f"async.trigger_parameter_sync_step={steps} is more than the run's steps "
            f"(trainer.total_steps={config.trainer.total_steps}), so all rollouts would be "
            "the initial policy's; set it to at most trainer.total_steps"
        )
    if config.trainer.warmup_steps > config.trainer.total_steps:
        problems.append(
            f"trainer.warmup_steps={config.trainer.warmup_steps} is longer than the run "
            f"(trainer.total_steps={config.trainer.total_steps}), so trainer.lr would never be "
            "reached; set it to at most trainer.total_steps"
        )
    if config.validation.every_versions and config.validation.num_prompts == 0:
        problems.append(
            f"validation.every_versions={config.validation.every_versions} with "
            "validation.num_prompts=0 validates nothing; set validation.num_prompts > 0 or "
            "validation.every_versions=null"
        )
    return problems

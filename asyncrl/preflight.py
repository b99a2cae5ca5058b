"""What is checked on this machine before any process starts: files, packages, devices, memory.

`check` finds all problems and raises once; `describe` says what a configuration amounts to.
Values that do not fit each other are `asyncrl.config`'s business.

A plug-in module may offer, besides what its family documents,

    requires               ((package, how to install it), ...) that this interpreter must have
    check(settings)        ValueError when its own settings cannot work on this machine
    check_fit(config)      ValueError when its section does not fit the rest of the whole
                           `asyncrl.config.Config`: name both keys and the one to change

called in this order; a plug-in that fails one is not asked the next.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from asyncrl import plugins
from asyncrl.config import Config, ConfigError
from asyncrl.config_file import plugin_sections
from asyncrl.correction import formula
from asyncrl.observe.run_folder import RunFolder
from asyncrl.trajectory import FinishReason, PromptGroup, Trajectory, group_num_bytes

SHARED_MEMORY = Path("/dev/shm")
_TABLE_BYTES = 64 * 16 + 128
"""What the buffer adds to a group: its table of version segments, and alignment."""


def check(config: Config) -> None:
    """Returns when the run can start here; raises ConfigError with one line a problem otherwise."""
    problems = [
        *_model_problems(config),
        *_plugin_problems(config),
        *_context_problems(config),
        *_device_problems(config),
        *_memory_problems(config),
        *_folder_problems(config),
    ]
    if problems:
        raise ConfigError("\n".join(problems))


def describe(config: Config) -> str:
    """The derived sizes, the staleness bound and the correction formula, one fact a line."""
    asynchrony = config.asynchrony
    steps = asynchrony.trigger_parameter_sync_step
    trajectories = config.groups_per_step * config.algorithm.group_size
    is_synchronous = config.num_slots == config.groups_per_version and not asynchrony.lookahead
    longest = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    return "\n".join(
        [
            f"prompt groups a step      R = {config.groups_per_step}  "
            f"({trajectories} trajectories of at most {longest} tokens)",
            f"steps a policy version    T = {steps}  "
            f"({config.trainer.total_steps} steps, {config.num_versions} versions)",
            f"staleness threshold       s = {asynchrony.staleness_threshold:g}"
            + ("  (synchronous)" if is_synchronous else ""),
            f"slots                     C = {config.num_slots}  (floor((1 + s) R T))",
            f"lookahead                 W = {asynchrony.lookahead}",
            f"staleness bound           async.max_staleness = {config.max_staleness}  "
            "(floor((C + W - 1) / (R T)) versions)",
            f"devices                   {config.rollout.num_devices} rollout + "
            f"{config.trainer.num_devices} trainer on {config.device}",
            f"buffer                    {config.buffer.capacity_bytes:,} bytes; largest group "
            f"{largest_group_bytes(config):,} bytes",
            f"correction                {formula(asynchrony.rollout_correction)}",
        ]
    )


def largest_group_bytes(config: Config) -> int:
    """Bytes of a prompt group whose prompt and completions are as long as they may be."""
    # Arrays of stride 0 have the shape and the size in a slot, but take no memory here.
    length = config.rollout.max_response_tokens
    tokens = np.broadcast_to(np.int32(0), (length,))
    trajectory = Trajectory(
        completion_tokens=tokens,
        behavior_logprobs=np.broadcast_to(np.float32(0), (length,)),
        token_versions=tokens,
        finish_reason=FinishReason.LENGTH,
    )
    prompt = np.broadcast_to(np.int32(0), (config.rollout.max_prompt_tokens,))
    return group_num_bytes(PromptGroup(0, prompt, [trajectory] * config.algorithm.group_size))


def _model_problems(config: Config) -> Iterator[str]:
    path = config.model.path
    if path is None:
        return
    if not path.is_dir():
        yield (
            f"model.path={path} {'is a file' if path.exists() else 'does not exist'}; it must be a "
            "Hugging Face folder with config.json, weights and tokenizer; set model.path"
        )
        return
    try:
        _architecture(path)
    except ValueError as error:
        yield f"model.path={path} {error}, so it is no Hugging Face folder; set model.path"
        return
    if _model_bytes(config) == 0:
        yield (
            f"model.path={path} holds no *.safetensors weights with anything in them; set "
            "model.path to a folder with whole ones"
        )


def _architecture(folder: Path) -> dict[str, Any]:
    """The values of a model folder's config.json; ValueError when that describes no model."""
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError("has no config.json")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"has a config.json that is not JSON ({error})") from error
    if not isinstance(values, dict) or not (
        values.get("architectures") or values.get("model_type")
    ):
        raise ValueError("has a config.json that names neither architectures nor model_type")
    return values


def _model_bytes(config: Config) -> int:
    """Bytes of the weight files of model.path; 0 for a random model, which is small."""
    path = config.model.path
    files = path.glob("*.safetensors") if path else ()
    return sum(file.stat().st_size for file in files if file.is_file())


def _plugin_problems(config: Config) -> Iterator[str]:
    for key, family, section in plugin_sections(config):
        module = plugins.load(family, section.type)
        missing = list(_missing_packages(module))
        for package, how in missing:
            yield f"{key}.type={section.type} needs the package {package}; install it with: {how}"
        if not missing:
            yield from _refusals(config, module, key=key, settings=section.settings(family))
    for package, how in _missing_packages(plugins.load("devices", config.device)):
        yield f"device={config.device} needs the package {package}; install it with: {how}"


def _refusals(config: Config, module: ModuleType, *, key: str, settings: Any) -> Iterator[str]:
    """What a plug-in itself has against its settings; else what against the rest."""
    try:
        if hasattr(module, "check"):
            module.check(settings)
        if hasattr(module, "check_fit"):
            module.check_fit(config)
    except ValueError as error:
        yield _with_key(key, str(error), settings=settings)


def _with_key(key: str, message: str, *, settings: Any) -> str:
    """A plug-in's message about `path=...` as one about `data.path=...`."""
    if message.startswith(f"{key}."):
        return message
    field = message.partition("=")[0]
    return f"{key}.{message}" if field in type(settings).model_fields else f"{key}: {message}"


def _missing_packages(module: ModuleType) -> Iterator[tuple[str, str]]:
    """(package, how to install it) of what a plug-in needs and this interpreter has not."""
    for package, how in module.requires if hasattr(module, "requires") else ():
        if importlib.util.find_spec(package.partition(".")[0]) is None:
            yield package, how


def _context_problems(config: Config) -> Iterator[str]:
    rollout = config.rollout
    longest = rollout.max_prompt_tokens + rollout.max_response_tokens
    for limit, source in _contexts(config):
        if longest > limit:
            yield (
                f"rollout.max_prompt_tokens={rollout.max_prompt_tokens} + "
                f"rollout.max_response_tokens={rollout.max_response_tokens} = {longest} is longer "
                f"than the context of {limit} tokens ({source}); lower one of them"
            )


def _contexts(config: Config) -> Iterator[tuple[int, str]]:
    """(tokens, where that limit comes from) of each limit on prompt plus response."""
    if config.model.random is not None:
        yield config.model.random.max_positions, "model.random.max_positions"
    elif config.model.path is not None:
        limit = _max_position_embeddings(config.model.path)
        if limit is not None:
            yield limit, f"max_position_embeddings of {config.model.path / 'config.json'}"
    engine = config.rollout.engine.settings("engines").model_dump()
    if engine.get("max_model_len") is not None:
        yield engine["max_model_len"], "rollout.engine.max_model_len"


def _max_position_embeddings(folder: Path) -> int | None:
    """The model's context, from its config.json or that of its text part; None when it has none."""
    with contextlib.suppress(ValueError):  # reported as the model's problem
        values = _architecture(folder)
        limit = {**values, **(values.get("text_config") or {})}.get("max_position_embeddings")
        return None if limit is None else int(limit)
    return None


def _device_problems(config: Config) -> Iterator[str]:
    if config.cluster.num_nodes > 1:
        yield (
            f"cluster.num_nodes={config.cluster.num_nodes}: runs over several nodes are not "
            "supported yet; set cluster.num_nodes=1"
        )
    needed = config.rollout.num_devices + config.trainer.num_devices
    a_node = config.cluster.devices_per_node
    source = "cluster.devices_per_node"
    if a_node is None:
        devices = plugins.load("devices", config.device)
        a_node = devices.Device(devices.Config()).num_devices()
        source = f"visible {config.device} devices"
    there = config.cluster.num_nodes * a_node
    if needed > there:
        yield (
            f"rollout.num_devices={config.rollout.num_devices} + trainer.num_devices="
            f"{config.trainer.num_devices} = {needed} is more than the cluster's {there} devices "
            f"(cluster.num_nodes={config.cluster.num_nodes} x {a_node} {source}); lower one of "
            "them, or set cluster.num_nodes or cluster.devices_per_node"
        )


def _memory_problems(config: Config) -> Iterator[str]:
    capacity, group = config.buffer.capacity_bytes, largest_group_bytes(config)
    # A step's batch is held where it lies; one more group must fit into one of the gaps.
    needed = (2 * config.groups_per_step + 1) * (group + _TABLE_BYTES)
    if needed > capacity:
        yield (
            f"buffer.capacity_bytes={capacity} is too little for a step's "
            f"{config.groups_per_step} prompt groups ({group} bytes each: algorithm.group_size="
            f"{config.algorithm.group_size} completions of rollout.max_response_tokens="
            f"{config.rollout.max_response_tokens}); set buffer.capacity_bytes >= {needed}"
        )
    weights = _weights_bytes(config)
    free = shutil.disk_usage(SHARED_MEMORY).free
    if capacity + weights > free:
        yield (
            f"buffer.capacity_bytes={capacity} and {weights} bytes of published weights "
            f"({_versions_kept(config)} versions of {_model_bytes(config)} bytes) are more than "
            f"the {free} bytes free in {SHARED_MEMORY}; lower buffer.capacity_bytes, take a "
            "smaller model, or give the machine more shared memory"
        )


def _weights_bytes(config: Config) -> int:
    """Bytes of shared memory for the weights that are published and not yet discarded."""
    is_shared = config.weights.type == "shared_memory"
    return _versions_kept(config) * _model_bytes(config) if is_shared else 0


def _versions_kept(config: Config) -> int:
    """The engines' version, and those that can be trained before it gives its slots back."""
    return config.num_slots // config.groups_per_version + 1


def _folder_problems(config: Config) -> Iterator[str]:
    run = config.run
    if run.dir is not None and run.dir.exists():
        if not run.dir.is_dir():
            yield f"run.dir={run.dir} is a file; set run.dir to a new folder"
        elif RunFolder(run.dir).holds_run():
            yield f"run.dir={run.dir} already holds a run; set run.dir to a new folder"
    if run.compare_to is not None and not RunFolder(run.compare_to).is_finished():
        yield (
            f"run.compare_to={run.compare_to} is not the folder of a run that made all its steps "
            "(config.yaml and summary.json); set run.compare_to to one, or to null"
        )

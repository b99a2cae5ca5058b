"""What is refused on this machine before any process starts, and how a run is described."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import yaml

from asyncrl import preflight
from asyncrl.config import Config, ConfigError
from asyncrl.config_file import load
from asyncrl.observe.run_folder import RunFolder

MINE = "plugin_of_mine.any_family"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A configuration that may start: 2 devices, context 64, groups of 4 x 8 tokens."""
    values = {
        "model": {"random": {"max_positions": 64}},
        "data": {"type": MINE},
        "reward": {"type": MINE},
        "rollout": {"engine": {"type": MINE}, "max_prompt_tokens": 8, "max_response_tokens": 8},
        "algorithm": {"group_size": 4, "mini_batch_groups": 4, "loss": {"type": MINE}},
        "cluster": {"devices_per_node": 2},
    }
    path = tmp_path / "base.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def problem(config: Config) -> str:
    """The message that `check` answers a configuration with."""
    with pytest.raises(ConfigError) as error:
        preflight.check(config)
    return str(error.value)


def model_folder(path: Path, config: dict[str, object]) -> Path:
    """A folder that looks like a Hugging Face model."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "qwen3", **config}))
    (path / "model.safetensors").write_bytes(b"weights")
    return path


def test_run_that_fits_is_accepted(base: Path) -> None:
    preflight.check(load(base))


def test_missing_model_folder_is_named(base: Path, tmp_path: Path) -> None:
    path = tmp_path / "no_model"
    message = problem(load(base, [f"model={{path: {path}}}"]))
    assert message.startswith(f"model.path={path} does not exist")


def test_folder_without_config_or_weights_is_no_model(base: Path, tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.mkdir()
    config = load(base, [f"model={{path: {path}}}"])
    assert "has no config.json" in problem(config)
    (path / "model.safetensors").write_bytes(b"weights")
    for text, reason in (("{", "is not JSON"), ("{}", "names neither"), ("[]", "names neither")):
        (path / "config.json").write_text(text)
        assert reason in problem(config)
    (path / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    preflight.check(config)
    (path / "model.safetensors").write_bytes(b"")
    assert "holds no *.safetensors" in problem(config)
    assert "is a file" in problem(load(base, [f"model={{path: {path / 'config.json'}}}"]))


def test_missing_data_path_is_named_with_its_key(base: Path, tmp_path: Path) -> None:
    message = problem(load(base, [f"data.path={tmp_path / 'no_data'}"]))
    assert message.startswith(f"data.path={tmp_path / 'no_data'} does not exist")


def test_package_that_is_not_installed_is_named_with_the_command(base: Path) -> None:
    message = problem(load(base, ["reward={type: plugin_of_mine.not_installed}"]))
    assert message == (
        "reward.type=plugin_of_mine.not_installed needs the package library_that_no_machine_has; "
        "install it with: pip install 'library-that-no-machine-has>=2'"
    )


@pytest.mark.parametrize(("prompt", "fits"), [(56, True), (57, False)])
def test_prompt_and_response_must_fit_the_random_models_context(
    base: Path, prompt: int, fits: bool
) -> None:
    config = load(base, [f"rollout.max_prompt_tokens={prompt}"])
    if fits:
        preflight.check(config)
    else:
        assert (
            "rollout.max_prompt_tokens=57 + rollout.max_response_tokens=8 = 65 is longer than the "
            "context of 64 tokens (model.random.max_positions)"
        ) in problem(config)


@pytest.mark.parametrize(
    "values", [{"max_position_embeddings": 15}, {"text_config": {"max_position_embeddings": 15}}]
)
def test_prompt_and_response_must_fit_the_models_own_context(
    base: Path, tmp_path: Path, values: dict[str, object]
) -> None:
    path = model_folder(tmp_path / "model", values)
    message = problem(load(base, [f"model={{path: {path}}}"]))
    assert "= 16 is longer than the context of 15 tokens (max_position_embeddings of" in message
    assert load(base, [f"model={{path: {path}}}", "rollout.max_response_tokens=7"])


def test_model_without_a_stated_context_is_accepted(base: Path, tmp_path: Path) -> None:
    preflight.check(load(base, [f"model={{path: {model_folder(tmp_path / 'model', {})}}}"]))


def test_prompt_and_response_must_fit_the_engines_context(base: Path) -> None:
    message = problem(load(base, ["rollout.engine.max_model_len=15"]))
    assert "the context of 15 tokens (rollout.engine.max_model_len)" in message
    preflight.check(load(base, ["rollout.engine.max_model_len=16"]))


def test_more_devices_than_the_cluster_has_are_refused(base: Path) -> None:
    message = problem(load(base, ["rollout.num_devices=2"]))
    assert (
        "rollout.num_devices=2 + trainer.num_devices=1 = 3 is more than the cluster's 2 devices "
        "(cluster.num_nodes=1 x 2 cluster.devices_per_node)"
    ) in message
    preflight.check(load(base, ["rollout.num_devices=2", "cluster.devices_per_node=3"]))


def test_several_nodes_are_refused_until_they_work(base: Path) -> None:
    assert "set cluster.num_nodes=1" in problem(load(base, ["cluster.num_nodes=2"]))


def test_visible_devices_count_when_none_are_configured(base: Path) -> None:
    config = load(base, ["cluster.devices_per_node=null", "rollout.num_devices=1000000"])
    assert "visible cpu devices" in problem(config)


def test_group_larger_than_the_buffer_is_refused(base: Path) -> None:
    config = load(
        base,
        [
            "buffer.capacity_bytes=65536",
            "rollout.max_response_tokens=2000",
            "model.random.max_positions=4096",
        ],
    )
    # 4 x 2000 tokens of 12 bytes, and what describes them
    assert 96_000 < preflight.largest_group_bytes(config) < 96_500
    message = problem(config)
    assert "buffer.capacity_bytes=65536 is too little for a step's 4 prompt groups" in message
    needed = 9 * (preflight.largest_group_bytes(config) + 1152)
    assert f"set buffer.capacity_bytes >= {needed}" in message
    preflight.check(load(base, [f"buffer.capacity_bytes={needed}"]))


def test_buffer_larger_than_the_shared_memory_is_refused(base: Path) -> None:
    message = problem(load(base, [f"buffer.capacity_bytes={1 << 50}"]))
    assert f"buffer.capacity_bytes={1 << 50} and 0 bytes of published weights" in message
    assert "/dev/shm" in message


def test_weights_count_as_shared_memory_beside_the_buffer(base: Path, tmp_path: Path) -> None:
    path = model_folder(tmp_path / "model", {})
    os.truncate(path / "model.safetensors", 1 << 42)
    message = problem(load(base, [f"model.path={path}"]))
    assert f"buffer.capacity_bytes={64 << 20} and {3 << 42} bytes of published" in message
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.random.alphabet=abch>"], "lacks 'defg'; add that to model.random.alphabet"),
        (["model.random.alphabet=abcdefgh"], "lacks '>'; add that to model.random.alphabet"),
        (["rollout.max_prompt_tokens=4"], "needs 5 tokens, rollout.max_prompt_tokens=4"),
        (["rollout.max_response_tokens=3"], "needs 4 tokens, rollout.max_response_tokens=3"),
        (["reward.type=reasoning_gym"], "not to data.type=reverse; change one of them"),
    ],
)
def test_sections_that_do_not_fit_each_other_are_refused(
    base: Path, overrides: list[str], message: str
) -> None:
    fits = ["data.type=reverse", "rollout.max_prompt_tokens=5", "rollout.max_response_tokens=4"]
    preflight.check(load(base, fits))
    answer = problem(load(base, [*fits, *overrides]))
    assert message in answer
    assert len(answer.splitlines()) == 1


def test_folder_of_another_run_is_refused(base: Path, tmp_path: Path) -> None:
    config = load(base, [f"run.dir={tmp_path / 'run'}"])
    (tmp_path / "run").mkdir()
    preflight.check(config)
    RunFolder.create(config)
    assert "already holds a run" in problem(config)
    assert "is a file" in problem(load(base, [f"run.dir={base}"]))


def test_only_a_run_that_made_all_its_steps_can_be_compared_to(base: Path, tmp_path: Path) -> None:
    folder = RunFolder.create(load(base, [f"run.dir={tmp_path / 'run'}"]))
    config = load(base, [f"run.compare_to={folder.root}"])
    refused = f"run.compare_to={folder.root} is not the folder of a run that made all its steps"
    assert refused in problem(config)
    folder.summary.write_text('{"is_complete": false}')
    assert refused in problem(config)
    folder.summary.write_text('{"is_complete": true, "machine": {}, "wall_s": 1.0}')
    preflight.check(config)


def test_all_problems_are_listed_at_once(base: Path, tmp_path: Path) -> None:
    message = problem(
        load(
            base,
            [
                "rollout.num_devices=9",
                "rollout.max_prompt_tokens=999",
                f"data.path={tmp_path / 'no_data'}",
            ],
        )
    )
    assert len(message.splitlines()) == 3


def test_description_states_sizes_bound_and_formula(base: Path) -> None:
    text = preflight.describe(
        load(
            base,
            [
                "async.staleness_threshold=0.5",
                "async.trigger_parameter_sync_step=2",
                "async.rollout_correction=sequence_tis_geometric_rs",
                "trainer.total_steps=7",
            ],
        )
    )
    lines = {" ".join(line.split()) for line in text.splitlines()}
    assert "prompt groups a step R = 4 (16 trajectories of at most 16 tokens)" in lines
    assert "steps a policy version T = 2 (7 steps, 4 versions)" in lines
    assert "staleness threshold s = 0.5" in lines
    assert "slots C = 12 (floor((1 + s) R T))" in lines
    assert "lookahead W = 0" in lines
    assert "staleness bound async.max_staleness = 1 (floor((C + W - 1) / (R T)) versions)" in lines
    assert "the geometric mean of proximal / behavior is in [0.999, 1.001]" in text


def test_only_a_run_without_spare_slots_is_described_as_synchronous(base: Path) -> None:
    assert "synchronous" in preflight.describe(load(base, ["async.staleness_threshold=0"]))
    assert "synchronous" not in preflight.describe(load(base))

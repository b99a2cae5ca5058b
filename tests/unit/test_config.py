"""What a configuration may say, and what is answered to one that cannot run."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from asyncrl import config_file, preflight, train
from asyncrl.config import Config, ConfigError
from asyncrl.config_file import load, resolve_config_path, resolved

MINE = "plugin_of_mine.any_family"
SHIPPED = sorted((Path(config_file.__file__).parent.parent / "configs").glob("*.yaml"))


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A small legal configuration: R = 4 groups of 4, T = 2, s = 1."""
    values = {
        "model": {"random": {"max_positions": 64}},
        "data": {"type": MINE},
        "reward": {"type": MINE},
        "rollout": {
            "engine": {"type": MINE},
            "max_prompt_tokens": 8,
            "max_response_tokens": 8,
        },
        "algorithm": {"group_size": 4, "mini_batch_groups": 4, "loss": {"type": MINE}},
        "async": {"staleness_threshold": 1.0, "trigger_parameter_sync_step": 2},
    }
    path = tmp_path / "base.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def problem(path: Path, *overrides: str) -> str:
    """The message that a wrong configuration is answered with."""
    with pytest.raises(ConfigError) as error:
        load(path, overrides)
    return str(error.value)


def test_overrides_replace_the_files_values_with_yaml_types(base: Path) -> None:
    config = load(
        base,
        [
            "trainer.lr=3e-4",
            "algorithm.group_size=6",
            "model.random.alphabet='01'",
            "run.dir=some/where",
            "async.partial_rollout=false",
            "algorithm.overlong.buffer_tokens=3",
        ],
    )
    assert config.trainer.lr == 3e-4
    assert config.algorithm.group_size == 6
    assert config.model.random is not None
    assert config.model.random.alphabet == "01"
    assert config.model.random.max_positions == 64
    assert config.run.dir == Path("some/where")
    assert config.asynchrony.partial_rollout is False
    assert config.algorithm.overlong is not None
    assert config.algorithm.overlong.buffer_tokens == 3


def test_a_whole_section_given_as_an_override_replaces_the_section(base: Path) -> None:
    config = load(base, ["model={path: some/folder}"])
    assert config.model.path == Path("some/folder")
    assert config.model.random is None


@pytest.mark.parametrize(
    ("threshold", "steps", "lookahead", "slots", "bound"),
    [
        (0, 1, 0, 4, 0),
        (0, 2, 0, 8, 0),
        (1, 2, 0, 16, 1),
        (0.5, 2, 0, 12, 1),
        (1.5, 1, 0, 10, 2),
        (1, 2, 1, 16, 2),
        (0.1, 1, 0, 4, 0),
        (0.1, 25, 0, 110, 1),
    ],
)
def test_slots_and_bound_follow_from_threshold_steps_and_lookahead(
    base: Path, threshold: float, steps: int, lookahead: int, slots: int, bound: int
) -> None:
    config = load(
        base,
        [
            f"async.staleness_threshold={threshold}",
            f"async.trigger_parameter_sync_step={steps}",
            f"async.lookahead={lookahead}",
        ],
    )
    assert config.groups_per_step == 4
    assert config.groups_per_version == 4 * steps
    assert config.num_slots == slots
    assert config.max_staleness == bound


@pytest.mark.parametrize("threshold", ["0.1", "0.15", "0.35", "0.7", "1.15", "2.3", "0.29"])
def test_slots_are_counted_in_decimal_as_written(base: Path, threshold: str) -> None:
    config = load(
        base,
        [
            f"async.staleness_threshold={threshold}",
            "algorithm.mini_batch_groups=100",
            "async.trigger_parameter_sync_step=1",
        ],
    )
    assert config.num_slots == 100 + round(float(threshold) * 100)


def test_batches_and_versions_are_derived(base: Path) -> None:
    config = load(base, ["async.require_batches=3", "trainer.total_steps=7"])
    assert config.groups_per_step == 12
    assert config.num_versions == 4


@pytest.mark.parametrize(
    ("override", "key", "nearest"),
    [
        ("trainer.total_step=3", "trainer.total_step", "total_steps"),
        ("async.stalenes_threshold=3", "async.stalenes_threshold", "staleness_threshold"),
        ("asinc.lookahead=3", "asinc", "async"),
        ("async.rollout_correction.wieght=null", "async.rollout_correction.wieght", "weight"),
        (
            "async.rollout_correction.weight={levl: token}",
            "async.rollout_correction.weight.levl",
            "level",
        ),
        (
            "async.rollout_correction.reject=[{statistik: k1, bounds: [0.5, 2]}]",
            "async.rollout_correction.reject.0.statistik",
            "statistic",
        ),
        ("data.num_leters=3", "data.num_leters", "num_letters"),
        ("algorithm.loss.clip.lowr=3", "algorithm.loss.clip.lowr", "lower"),
        ("rollout.engine.max_modellen=3", "rollout.engine.max_modellen", "max_model_len"),
        ("model.random.alphabeth=ab", "model.random.alphabeth", "alphabet"),
    ],
)
def test_unknown_key_is_named_with_the_nearest_legal_one(
    base: Path, override: str, key: str, nearest: str
) -> None:
    assert f"unknown key {key}; did you mean {nearest}?" in problem(base, override)


def test_unknown_key_of_a_tracker_names_its_place_in_the_list(base: Path) -> None:
    message = problem(base, "trackers=[{type: jsonl}, {type: jsonl, typ: x}]")
    assert message == "unknown key trackers.1.typ; did you mean type?"


def test_unknown_key_without_a_near_one_lists_the_legal_keys(base: Path) -> None:
    message = problem(base, "buffer.zzz=1")
    assert message == "unknown key buffer.zzz; legal: capacity_bytes"


def test_unknown_plugin_is_named_with_the_legal_ones(base: Path) -> None:
    message = problem(base, "trackers=[{type: jsnl}]")
    assert message.startswith("trackers.0.type=jsnl: ")
    assert "nearest: 'jsonl'" in message
    assert "tensorboard" in message


def test_module_that_is_not_there_is_named(base: Path) -> None:
    assert "data.type=no_such.module: No module named" in problem(base, "data.type=no_such.module")


def test_module_without_config_is_no_plugin(base: Path) -> None:
    assert "no class Config" in problem(base, "reward.type=os.path")


def test_unknown_device_is_answered_with_the_legal_ones(base: Path) -> None:
    message = problem(base, "device=cpuu")
    assert "device=cpuu is none of" in message
    assert "did you mean cpu?" in message


def test_group_of_one_is_refused(base: Path) -> None:
    message = problem(base, "algorithm.group_size=1")
    assert "algorithm.group_size=1: grpo centres rewards on the group" in message
    assert "set it to 2 or more" in message


def test_batch_that_does_not_divide_over_ranks_is_refused(base: Path) -> None:
    message = problem(base, "trainer.num_devices=3")
    assert "a step's 16 trajectories" in message
    assert "do not divide over trainer.num_devices=3 ranks" in message
    assert message.endswith("for example algorithm.mini_batch_groups=3")
    assert load(base, ["trainer.num_devices=3", "algorithm.mini_batch_groups=3"])
    assert problem(base, "trainer.num_devices=32").endswith("algorithm.mini_batch_groups=8")
    assert load(base, ["trainer.num_devices=8"]).trainer.num_devices == 8


@pytest.mark.parametrize("buffer_tokens", [8, 9])
def test_overlong_buffer_as_long_as_the_response_is_refused(base: Path, buffer_tokens: int) -> None:
    message = problem(base, f"algorithm.overlong.buffer_tokens={buffer_tokens}")
    assert f"algorithm.overlong.buffer_tokens={buffer_tokens} is as long as" in message
    assert "rollout.max_response_tokens=8" in message


def test_micro_batch_smaller_than_a_trajectory_is_refused(base: Path) -> None:
    message = problem(base, "trainer.micro_batch_tokens=15")
    assert "trainer.micro_batch_tokens=15 cannot hold one trajectory" in message
    assert "trainer.micro_batch_tokens >= 16" in message


def test_warmup_longer_than_the_run_is_refused(base: Path) -> None:
    message = problem(base, "trainer.warmup_steps=11", "trainer.total_steps=10")
    assert "trainer.warmup_steps=11 is longer than the run (trainer.total_steps=10)" in message


def test_repeated_validation_of_no_prompts_is_refused(base: Path) -> None:
    message = problem(base, "validation.num_prompts=0", "validation.every_versions=5")
    assert "validation.every_versions=5 with validation.num_prompts=0" in message


def test_no_model_and_two_models_are_refused(base: Path) -> None:
    assert "set exactly one of model.path" in problem(base, "model={}")
    both = ["model.path=some/folder", "model.random.num_layers=1"]
    assert "set exactly one of model.path" in problem(base, *both)


@pytest.mark.parametrize("value", ["-0.5", ".inf", ".nan", "many"])
def test_threshold_that_is_no_finite_number_from_0_is_refused(base: Path, value: str) -> None:
    assert "async.staleness_threshold=" in problem(base, f"async.staleness_threshold={value}")


@pytest.mark.parametrize("name", ["a/b", "", "../x", "..", ".", "x" * 65])
def test_run_name_that_is_no_folder_name_is_refused(base: Path, name: str) -> None:
    message = problem(base, f"run.name='{name}'")
    assert message.startswith(f"run.name={name}: 1 to 64 letters, digits, '_', '-' and '.'")


def test_number_is_a_run_name(base: Path) -> None:
    assert load(base, ["run.name=5"]).run.name == "5"


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_seed_outside_32_bits_is_refused(base: Path, seed: int) -> None:
    assert f"run.seed={seed}: " in problem(base, f"run.seed={seed}")
    assert load(base, [f"run.seed={2**32 - 1}"]).run.seed == 2**32 - 1


@pytest.mark.parametrize("key", ["rollout.num_threads", "trainer.num_threads"])
def test_more_threads_than_any_machine_has_are_refused(base: Path, key: str) -> None:
    assert f"{key}=1025: " in problem(base, f"{key}=1025")
    assert load(base, [f"{key}=1024"])


def test_more_steps_a_version_than_the_run_has_are_refused(base: Path) -> None:
    message = problem(base, "async.trigger_parameter_sync_step=6", "trainer.total_steps=5")
    assert message.startswith("async.trigger_parameter_sync_step=6 is more than the run's steps")
    assert "(trainer.total_steps=5)" in message
    assert load(base, ["async.trigger_parameter_sync_step=5", "trainer.total_steps=5"])


def test_run_without_trackers_is_legal(base: Path) -> None:
    assert load(base, ["trackers=[]"]).trackers == ()


@pytest.mark.parametrize(
    ("override", "keys"),
    [
        ("algorithm=null", "group_size, mini_batch_groups, advantage, loss, kl, overlong"),
        ("algorithm.kl=3", "coefficient, estimator"),
        ("algorithm.loss=clipped", "type, and those of the plug-in that it names"),
    ],
)
def test_value_in_place_of_a_section_is_answered_with_its_keys(
    base: Path, override: str, keys: str
) -> None:
    assert (
        problem(base, override) == f"{override}: a section is needed, not a value; its keys: {keys}"
    )


def test_plugin_exchanged_by_an_override_loses_only_the_files_settings(base: Path) -> None:
    values = yaml.safe_load(base.read_text())
    values["data"] = {"type": "reverse", "alphabet": "abc", "length": 5}
    values["rollout"]["engine"] = {"num_slots": 7}
    base.write_text(yaml.safe_dump(values))
    values = resolved(load(base, ["data.path=some/file", f"data.type={MINE}"]))
    assert (values["data"]["path"], values["data"]["num_letters"]) == ("some/file", 4)
    assert resolved(load(base, ["data.type=reverse"]))["data"]["length"] == 5
    engine = resolved(load(base, ["rollout.engine.type=builtin"]))["rollout"]["engine"]
    assert engine["num_slots"] == 7
    assert load(base, [f"rollout.engine.type={MINE}"]).rollout.engine.type == MINE
    message = problem(base, f"data.type={MINE}", "data.length=3")
    assert message.startswith("unknown key data.length; ")


def test_model_path_as_an_override_replaces_the_files_random_model(base: Path) -> None:
    model = load(base, ["model.path=some/folder"]).model
    assert (model.path, model.random) == (Path("some/folder"), None)


def test_missing_section_names_the_key_to_set(tmp_path: Path) -> None:
    path = tmp_path / "empty.yaml"
    path.write_text("")
    message = problem(path)
    assert "model is missing; set it in the YAML or with model=..." in message
    assert "data is missing" in message
    assert "reward is missing" in message


def test_several_problems_are_reported_at_once(base: Path) -> None:
    message = problem(
        base,
        "trainer.num_devices=3",
        "algorithm.overlong.buffer_tokens=8",
        "trainer.warmup_steps=999",
    )
    assert len(message.splitlines()) == 3


@pytest.mark.parametrize("override", ["trainer.lr", "=3", "trainer"])
def test_override_without_key_or_value_is_refused(base: Path, override: str) -> None:
    assert f"override {override!r} is not of the form key=value" in problem(base, override)


def test_broken_yaml_and_missing_file_are_configuration_errors(base: Path) -> None:
    assert "no configuration file" in problem(base.parent / "none.yaml")
    base.write_text("model: [")
    assert str(base) in problem(base)
    base.write_text("- model")
    assert "must be a mapping" in problem(base)


def test_override_with_broken_yaml_is_a_configuration_error(base: Path) -> None:
    message = problem(base, "trainer.lr=[1")
    assert message.startswith("override 'trainer.lr=[1': the value is not YAML (")
    assert len(message.splitlines()) == 1


def test_override_that_refers_to_nothing_is_a_configuration_error(base: Path) -> None:
    message = problem(base, "trainer.lr=${nothing}")
    assert message == "override 'trainer.lr=${nothing}': Interpolation key 'nothing' not found"


def test_shorthand_on_the_command_line_becomes_the_table(base: Path) -> None:
    config = load(base, ["async.rollout_correction=sequence_tis_geometric_rs"])
    correction = config.asynchrony.rollout_correction
    assert correction.weight is not None
    assert (correction.weight.level, correction.weight.bounds) == ("sequence", (None, 2.0))
    assert [(r.statistic, r.aggregate, r.bounds) for r in correction.reject] == [
        ("k1", "mean", (0.999, 1.001))
    ]


@pytest.mark.parametrize("in_file", ["token_tis_token_rs", {"weight": {"level": "token"}}])
def test_shorthand_override_replaces_the_files_whole_table(base: Path, in_file: object) -> None:
    values = yaml.safe_load(base.read_text())
    values["async"]["rollout_correction"] = in_file
    base.write_text(yaml.safe_dump(values))
    correction = load(base, ["async.rollout_correction=geometric_rs"]).asynchrony.rollout_correction
    assert correction.weight is None
    assert len(correction.reject) == 1


def test_field_overrides_apply_on_top_of_a_shorthand(base: Path) -> None:
    correction = load(
        base,
        [
            "async.rollout_correction=sequence_tis_geometric_rs",
            "async.rollout_correction.weight.level=token",
            "async.rollout_correction.weight.bounds=[0.5, 4]",
            "async.rollout_correction.reject.0.bounds=[0.9, 1.1]",
        ],
    ).asynchrony.rollout_correction
    assert correction.weight is not None
    assert correction.weight.level == "token"
    assert correction.weight.bounds == (0.5, 4.0)
    assert correction.weight.outside == "truncate"
    assert correction.reject[0].bounds == (0.9, 1.1)
    assert correction.reject[0].aggregate == "mean"


def test_shorthand_that_is_not_understood_is_answered_with_the_grammar(base: Path) -> None:
    message = problem(base, "async.rollout_correction=sequence_foo")
    assert message.startswith("async.rollout_correction=sequence_foo: ")
    assert message.count("async.rollout_correction") == 1
    assert "such as sequence_tis_geometric_rs" in message


@pytest.mark.parametrize("value", ["null", "[]", "3"])
def test_correction_that_is_no_name_and_no_table_is_refused(base: Path, value: str) -> None:
    message = problem(base, f"async.rollout_correction={value}")
    assert message.startswith(f"async.rollout_correction={value}: neither a name nor a table; ")


def test_bypass_with_a_weight_counts_a_ratio_twice_and_is_refused(base: Path) -> None:
    assert "count the same ratio twice" in problem(
        base, "async.rollout_correction=bypass_sequence_tis"
    )


def test_resolved_configuration_loads_again_to_the_equal_one(base: Path, tmp_path: Path) -> None:
    config = load(
        base,
        [
            "async.rollout_correction=sequence_tis_geometric_rs",
            "async.staleness_threshold=0.3",
            "algorithm.overlong.buffer_tokens=2",
            "data.path=some/file",
        ],
    )
    path = tmp_path / "again.yaml"
    path.write_text(config_file.to_yaml(config))
    again = load(path)
    assert again == config
    assert resolved(again) == resolved(config)


def test_resolved_configuration_names_the_defaults_of_plugins(base: Path) -> None:
    values = resolved(load(base))
    assert values["data"] == {
        "type": MINE,
        "path": None,
        "num_letters": 4,
        "clip": {"lower": 0.2},
        "max_model_len": None,
    }
    assert values["async"]["trigger_parameter_sync_step"] == 2
    assert values["trackers"] == [{"type": "jsonl"}, {"type": "tensorboard"}]


def test_config_is_found_by_path(base: Path) -> None:
    assert resolve_config_path(str(base)) == base


@pytest.mark.parametrize("layout", ["checkout", "wheel"])
@pytest.mark.parametrize("name", ["quickstart", "quickstart.yaml", "configs/quickstart.yaml"])
def test_config_is_found_by_name_in_checkout_and_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, name: str
) -> None:
    package = tmp_path / "site" / "asyncrl"
    folder = (package.parent if layout == "checkout" else package) / "configs"
    folder.mkdir(parents=True)
    package.mkdir(exist_ok=True)
    (folder / "quickstart.yaml").write_text("")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    monkeypatch.setattr(config_file, "__file__", str(package / "config.py"))
    assert resolve_config_path(name) == folder / "quickstart.yaml"


def test_config_that_is_nowhere_is_answered_with_the_names_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "quickstart.yaml").write_text("")
    monkeypatch.setattr(config_file, "__file__", str(tmp_path / "asyncrl" / "config.py"))
    with pytest.raises(ConfigError, match="quickstrt; did you mean quickstart") as error:
        resolve_config_path("quickstrt")
    assert "one of: quickstart" in str(error.value)


def test_configuration_is_frozen(base: Path) -> None:
    config = load(base)
    with pytest.raises(ValueError, match="frozen"):
        config.trainer.lr = 1.0  # type: ignore[misc]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_configuration_loads_and_is_described(path: Path) -> None:
    config = load(path)
    assert isinstance(config, Config)
    text = preflight.describe(config)
    assert f"async.max_staleness = {config.max_staleness}" in text
    assert f"C = {config.num_slots}" in text


def test_quickstart_is_shipped() -> None:
    assert "quickstart" in [path.stem for path in SHIPPED]


@pytest.mark.parametrize(
    "overrides",
    [
        ["data.type=jsonl", "data.path=no/such/file"],
        ["model.path=no/such/folder"],
        ["async.rollout_correction=null"],
        ["trainer.lr=[1"],
        ["run.name=a/b"],
        ["algorithm=null"],
        ["data.alphabet=xyz"],
        ["reward.type=reasoning_gym"],
    ],
    ids=lambda overrides: " ".join(overrides),
)
def test_command_line_answers_what_cannot_run_with_one_line_and_code_2(
    overrides: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert train.main(["--config", "quickstart", *overrides]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    headline, message = output.err.splitlines()
    assert headline == "asyncrl: the configuration cannot run"
    assert overrides[-1].split("=")[0] in message


def test_help_names_the_shipped_configurations(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train.main(["--help"])
    words = capsys.readouterr().out.replace(",", "").split()
    assert {path.stem for path in SHIPPED} <= set(words)

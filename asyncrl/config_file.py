"""How a configuration is read and written: YAML, `key=value` overrides, and errors in plain words.

`load` gives a `Config` that has been checked with its plug-ins' settings, or a ConfigError with one
line a problem. What is legal is written in `asyncrl.config`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, get_args

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError

from asyncrl import plugins
from asyncrl.config import Config, ConfigError, PluginSection
from asyncrl.correction import parse_shorthand

PLUGIN_SECTIONS = {
    "data": "datasets",
    "reward": "rewards",
    "environment": "environments",
    "rollout.engine": "engines",
    "algorithm.loss": "losses",
    "weights": "weights",
}
"""Dotted key -> plug-in family of the sections that name one plug-in; `trackers` is a list."""
_CORRECTION_KEY = "async.rollout_correction"


class Override(NamedTuple):
    """One `key=value` of the command line."""

    key: str
    value: Any
    text: str
    """As it was typed."""


def load(path: Path, overrides: Sequence[str] = ()) -> Config:
    """The checked configuration of a YAML file with `key=value` overrides.

    A value given on the command line replaces what the file has at that key; what the file says
    of a plug-in or model that is thereby exchanged is left out. Plug-in sections come back with
    all their settings. Raises ConfigError, one line a problem, for what is wrong.
    """
    values = _read(path)
    given = [_parse(override) for override in overrides]
    _drop_exchanged(values, given)
    for override in given:
        values = _replace(values, override)
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_describe(error, Config)) from error
    problems = [*_plugin_problems(config), *_device_problems(config)]
    if problems:
        raise ConfigError("\n".join(problems))
    # Once more, with the plug-ins' defaults filled in: what is dumped is what was run.
    return Config.model_validate(resolved(config))


def plugin_sections(config: Config) -> list[tuple[str, str, PluginSection]]:
    """(dotted key, plug-in family, section) of every plug-in section of a configuration."""
    trackers = enumerate(config.trackers)
    return [
        *((key, family, attrgetter(key)(config)) for key, family in PLUGIN_SECTIONS.items()),
        *((f"trackers.{index}", "trackers", section) for index, section in trackers),
    ]


def resolved(config: Config) -> dict[str, Any]:
    """Plain values of every setting, defaults and plug-in settings included; `load` reads them."""
    values = config.model_dump(mode="json", by_alias=True)
    for key, family, section in plugin_sections(config):
        *parents, last = key.split(".")
        parent: Any = values
        for part in parents:
            parent = parent[part]
        parent[int(last) if last.isdigit() else last] = section.settings(family).model_dump(
            mode="json", by_alias=True
        )
    return values


def to_yaml(config: Config) -> str:
    """`resolved` as YAML text."""
    return yaml.safe_dump(resolved(config), sort_keys=False)


def shipped_names() -> list[str]:
    """Names that `resolve_config_path` knows."""
    return sorted({file.stem for folder in _folders() for file in folder.glob("*.yaml")})


def resolve_config_path(name_or_path: str) -> Path:
    """The YAML file of a path, or of a name such as `quickstart` or `configs/quickstart.yaml`.

    Names are looked up in the checkout's configs/ and in those that a wheel carries. Raises
    ConfigError with the names there are.
    """
    given = Path(name_or_path)
    if given.is_file():
        return given
    name = given.name if given.suffix in (".yaml", ".yml") else f"{given.name}.yaml"
    is_name = given.parent in (Path(), Path("configs"))
    for folder in _folders():
        if is_name and (folder / name).is_file():
            return folder / name
    known = shipped_names()
    near = difflib.get_close_matches(given.stem, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else ";"
    raise ConfigError(
        f"no configuration file {name_or_path}{hint} --config takes the path of a YAML file or one "
        f"of: {', '.join(known)}"
    )


def _folders() -> list[Path]:
    package = Path(__file__).parent
    return [package.parent / "configs", package / "configs"]


def _read(path: Path) -> dict[str, Any]:
    """The values of a YAML file, with interpolations resolved and shorthands expanded."""
    if not path.is_file():
        raise ConfigError(f"no configuration file {path}; --config takes the path of a YAML file")
    try:
        values = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except yaml.MarkedYAMLError as error:
        where = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{path}{where}: not YAML: {error.problem}") from error
    except (OmegaConfBaseException, yaml.YAMLError, OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {_first_line(error)}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: the top level must be a mapping of sections")
    section = values.get("async")
    if isinstance(section, dict) and "rollout_correction" in section:
        section["rollout_correction"] = _expand(section["rollout_correction"])
    return {str(key): value for key, value in values.items()}


def _parse(text: str) -> Override:
    key, has_value, value_text = text.partition("=")
    key = key.strip()
    if not has_value or not key:
        raise ConfigError(f"override {text!r} is not of the form key=value")
    try:
        value = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={value_text}"]))
    except (OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
        what = error.problem if isinstance(error, yaml.MarkedYAMLError) else _first_line(error)
        raise ConfigError(
            f"override {text!r}: the value is not YAML ({what}); close brackets and quotes, and "
            "quote what has special characters"
        ) from error
    assert isinstance(value, dict)
    return Override(key, value["value"], text)


def _replace(values: dict[str, Any], override: Override) -> dict[str, Any]:
    """The values with one override applied."""
    value = _expand(override.value) if override.key == _CORRECTION_KEY else override.value
    try:
        tree = OmegaConf.create(values)
        OmegaConf.update(tree, override.key, value, merge=False)
        merged = OmegaConf.to_container(tree, resolve=True)
    except (OmegaConfBaseException, ValueError, IndexError) as error:
        raise ConfigError(f"override {override.text!r}: {_first_line(error)}") from error
    assert isinstance(merged, dict)
    return {str(name): value for name, value in merged.items()}


def _drop_exchanged(values: dict[str, Any], overrides: Sequence[Override]) -> None:
    """Takes out what the file says of a plug-in, or a random model, that overrides exchange."""
    given = {override.key: override.value for override in overrides}
    for key in PLUGIN_SECTIONS:
        section = _section_of_file(values, key)
        if f"{key}.type" in given and given[f"{key}.type"] != section.get(
            "type", _default_type(key)
        ):
            section.clear()
    keeps_random = any(f"{key}.".startswith("model.random.") for key in given)
    if given.get("model.path") is not None and not keeps_random:
        _section_of_file(values, "model").pop("random", None)


def _section_of_file(values: dict[str, Any], key: str) -> dict[str, Any]:
    """The section at a dotted key; an empty one where there is none."""
    section: Any = values
    for part in key.split("."):
        section = section.get(part) if isinstance(section, dict) else None
    return section if isinstance(section, dict) else {}


def _default_type(key: str) -> str | None:
    """The plug-in that a section has when none is named; None when one must be."""
    top, _, inner = key.partition(".")
    default = Config.model_fields[top].default
    section = attrgetter(inner)(default) if inner else default
    return section.type if isinstance(section, PluginSection) else None


def _expand(correction: Any) -> Any:
    """A correction shorthand as its table, so that overrides of single fields find the table.

    What is no shorthand stays, for the check of the whole configuration to report.
    """
    try:
        return parse_shorthand(correction) if isinstance(correction, str) else correction
    except ValueError:
        return correction


def _plugin_problems(config: Config) -> list[str]:
    problems = []
    for key, family, section in plugin_sections(config):
        try:
            section.settings(family)
        except ValidationError as error:
            problems.append(_describe(error, plugins.load(family, section.type).Config, key))
        except (ValueError, ImportError) as error:
            problems.append(f"{key}.type={section.type}: {error}")
    return problems


def _device_problems(config: Config) -> list[str]:
    known = plugins.names("devices")
    if config.device in known:
        return []
    if "." in config.device:
        try:
            plugins.load("devices", config.device)
        except ImportError as error:
            return [f"device={config.device}: {error}"]
        return []
    near = difflib.get_close_matches(config.device, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return [
        f"device={config.device} is none of {', '.join(known)} (modules in asyncrl/devices){hint}"
    ]


def _first_line(error: Exception) -> str:
    """What a library says of a problem, without its excerpt of the text."""
    return str(error).partition("\n")[0]


def _describe(error: ValidationError, model: type[BaseModel], prefix: str = "") -> str:
    """One line a problem, each naming the dotted key; unknown keys with the nearest legal one."""
    return "\n".join(_line(problem, model, prefix) for problem in error.errors())


def _line(problem: Mapping[str, Any], model: type[BaseModel], prefix: str) -> str:
    path = [str(part) for part in problem["loc"]]
    key = ".".join([prefix, *path] if prefix else path)
    if problem["type"] == "extra_forbidden":
        return f"unknown key {key}{_nearest(path, model)}"
    if problem["type"] == "missing":
        return f"{key} is missing; set it in the YAML or with {key}=..."
    value = problem["input"]
    message = str(problem["msg"]).removeprefix("Value error, ")
    if problem["type"] == "model_type":
        message = f"a section is needed, not a value; its keys: {_keys(path, model)}"
    is_own_message = problem["type"] == "value_error"
    if is_own_message and (not path or message.startswith(key)):
        return message
    if isinstance(value, str | int | float | bool | list | None):
        return f"{key}={'null' if value is None else value}: {message}"
    return f"{key}: {message}"


def _nearest(path: Sequence[str], model: type[BaseModel]) -> str:
    """'; did you mean ...' for an unknown key, from the fields of the section it stands in."""
    section = _section_at(path[:-1], model)
    if section is None:
        return ""
    legal = [field.alias or name for name, field in section.model_fields.items()]
    near = difflib.get_close_matches(path[-1], legal, n=1)
    return f"; did you mean {near[0]}?" if near else f"; legal: {', '.join(sorted(legal))}"


def _keys(path: Sequence[str], model: type[BaseModel]) -> str:
    """The keys of the section at a path, for one who gave a value there."""
    section = _section_at(path, model)
    if section is None or issubclass(section, PluginSection):
        return "type, and those of the plug-in that it names"
    return ", ".join(field.alias or name for name, field in section.model_fields.items())


def _section_at(path: Sequence[str], model: type[BaseModel]) -> type[BaseModel] | None:
    """The section class that a path of keys and list positions leads to."""
    section: type[BaseModel] | None = model
    for part in path:
        if part.isdigit():
            continue
        if section is None:
            return None
        fields = {field.alias or name: field for name, field in section.model_fields.items()}
        section = _section_in(fields[part].annotation) if part in fields else None
    return section


def _section_in(annotation: Any) -> type[BaseModel] | None:
    """The section class in an annotation such as `Section | None` or `tuple[Section, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    inner = (_section_in(argument) for argument in get_args(annotation))
    return next((section for section in inner if section is not None), None)

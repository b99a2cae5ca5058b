"""What every file in a plug-in folder must offer, tested before its author writes a test."""

from __future__ import annotations

import importlib
import inspect
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from asyncrl import interfaces, plugins

ALL = [
    (family, name)
    for family in plugins.FAMILIES
    for name in plugins.names(family)
    if not name.startswith("_")  # a part of a plug-in
]

OFFERS = {
    "datasets": ("Dataset", ["config"], ["seed", "split"]),
    "devices": ("Device", ["config"], []),
    "engines": (
        "Engine",
        ["config"],
        ["model_folder", "log_folder", "seed", "num_threads", "device", "max_model_len"],
    ),
    "environments": (
        "Environment",
        ["config"],
        ["engine", "tokenizer", "reward", "rollout", "generation_s", "reward_s"],
    ),
    "losses": ("loss", ["inputs", "config"], []),
    "rewards": ("Reward", ["config"], []),
    "trackers": ("Tracker", ["config"], ["run_dir"]),
    "weights": ("Channel", ["config"], ["run_dir"]),
}
"""Family -> (class or function, positional parameters, keyword-only parameters)."""

PROTOCOLS = {
    "datasets": interfaces.Dataset,
    "engines": interfaces.Engine,
    "rewards": interfaces.Reward,
    "trackers": interfaces.Tracker,
}

every_plugin = pytest.mark.parametrize(
    ("family", "name"), ALL, ids=[f"{family}.{name}" for family, name in ALL]
)


def parameters(function: Any) -> tuple[list[str], list[str]]:
    """(positional, keyword-only) parameter names, `self` left out."""
    found = inspect.signature(function).parameters.values()
    positional = [p.name for p in found if p.kind == p.POSITIONAL_OR_KEYWORD and p.name != "self"]
    return positional, [p.name for p in found if p.kind == p.KEYWORD_ONLY]


def verbs(protocol: type) -> dict[str, Any]:
    """Methods that a protocol asks for."""
    return {
        name: value
        for name, value in vars(protocol).items()
        if inspect.isfunction(value) and (name == "__len__" or not name.startswith("_"))
    }


@every_plugin
def test_config_is_frozen_strict_and_names_its_module(family: str, name: str) -> None:
    config = plugins.load(family, name).Config
    assert issubclass(config, BaseModel)
    assert config.model_config.get("frozen") is True
    assert config.model_config.get("extra") == "forbid"
    field = config.model_fields["type"]
    assert get_args(field.annotation) == (name,)
    assert field.default == name


@every_plugin
def test_plugin_offers_what_its_family_documents(family: str, name: str) -> None:
    attribute, positional, keywords = OFFERS[family]
    offered = getattr(plugins.load(family, name), attribute)
    assert parameters(offered) == (positional, keywords)


@every_plugin
def test_plugin_answers_to_its_protocols_verbs(family: str, name: str) -> None:
    if family not in PROTOCOLS:
        return
    offered = getattr(plugins.load(family, name), OFFERS[family][0])
    for verb, asked in verbs(PROTOCOLS[family]).items():
        method = getattr(offered, verb)
        assert parameters(method) == parameters(asked), verb
        assert inspect.iscoroutinefunction(method) == inspect.iscoroutinefunction(asked), verb


@every_plugin
def test_what_preflight_asks_has_the_agreed_form(family: str, name: str) -> None:
    module = plugins.load(family, name)
    for package, how in getattr(module, "requires", ()):
        assert package.isidentifier()
        assert "pip install" in how
    for hook in ("check", "check_fit"):
        if hasattr(module, hook):
            assert len(inspect.signature(getattr(module, hook)).parameters) == 1


@pytest.mark.parametrize("family", plugins.FAMILIES)
def test_family_has_a_plugin_and_documents_what_one_offers(family: str) -> None:
    assert family in [known for known, _ in ALL]
    assert f"{OFFERS[family][0]}" in (importlib.import_module(f"asyncrl.{family}").__doc__ or "")


def test_unknown_plugin_is_answered_with_the_nearest_and_all_legal_names() -> None:
    with pytest.raises(ValueError, match="unknown trackers type 'jsnl'") as error:
        plugins.load("trackers", "jsnl")
    assert "(nearest: 'jsonl')" in str(error.value)
    assert "legal: jsonl, tensorboard" in str(error.value)


def test_dotted_name_loads_a_module_of_the_users_own() -> None:
    assert plugins.load("rewards", "os.path") is importlib.import_module("os.path")

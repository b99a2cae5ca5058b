"""Who may import whom, read from the sources; a breach is named by file and line."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import asyncrl
from asyncrl.plugins import FAMILIES

PACKAGE = Path(asyncrl.__file__).parent
HEAVY = {"torch", "ray", "vllm", "transformers"}
VENDORS = {"vllm", "torch_npu", "math_verify", "reasoning_gym", "wandb"}
ALONE = {
    "asyncrl.trajectory",
    "asyncrl.config",
    "asyncrl.config_file",
    "asyncrl.correction",
    "asyncrl.plugins",
    "asyncrl.interfaces",
    "asyncrl.buffer",
    "asyncrl.kernels",
    "asyncrl.kernels.native",
}
"""Modules whose import must bring in neither torch, ray, vllm nor transformers."""


@dataclass(frozen=True)
class Import:
    """One module that a file imports."""

    where: str
    """File and line."""
    importer: str
    """Dotted name of the importing module."""
    names: tuple[str, ...]
    """Dotted names that may be meant: the module, and module.name for each imported name."""
    is_at_import: bool
    """True when it happens as the module is imported; False inside a function or for types only."""

    @property
    def library(self) -> str:
        """Top-level package."""
        return self.names[0].partition(".")[0]


def imports(package: Path) -> Iterator[Import]:
    """All imports of all modules of a package named asyncrl."""
    for path in sorted(package.rglob("*.py")):
        parts = ["asyncrl", *path.relative_to(package).with_suffix("").parts]
        importer = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        for node, is_at_import in _walk(ast.parse(path.read_text()), is_at_import=True):
            where = f"{path.relative_to(package.parent)}:{node.lineno}"
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield Import(where, importer, (alias.name,), is_at_import)
            else:
                base = node.module or ""
                if node.level:
                    container = parts[: len(parts) - node.level]
                    base = ".".join([*container, base] if base else container)
                names = (base, *(f"{base}.{alias.name}" for alias in node.names))
                yield Import(where, importer, names, is_at_import)


def _walk(
    node: ast.AST, *, is_at_import: bool
) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, is_at_import
            continue
        is_later = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        is_for_types = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)
        yield from _walk(child, is_at_import=is_at_import and not (is_later or is_for_types))


def leaf_of(name: str) -> tuple[str, str] | None:
    """(family, module) when a dotted name is, or lies in, a file of a plug-in folder."""
    parts = name.split(".")
    is_leaf = len(parts) > 2 and parts[0] == "asyncrl" and parts[1] in FAMILIES
    return (parts[1], parts[2]) if is_leaf else None


def is_module(package: Path, name: str) -> bool:
    """Whether a dotted name is a file of the package."""
    path = package.joinpath(*name.split(".")[1:])
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def heavy_in_modules_that_stand_alone(package: Path) -> list[str]:
    """`trajectory`, `config` and the public core import nothing heavy."""
    return [
        f"{i.where}: {i.importer} imports {i.library}"
        for i in imports(package)
        if i.importer in ALONE and i.is_at_import and i.library in HEAVY
    ]


def leaves_that_import_leaves(package: Path) -> list[str]:
    """A leaf imports no other leaf; modules with `_` before their name are parts of a leaf."""
    breaches = []
    for i in imports(package):
        importer = leaf_of(i.importer)
        for name in i.names:
            imported = leaf_of(name)
            if not importer or not imported or imported == importer or not is_module(package, name):
                continue
            is_own_part = imported[1].startswith("_") and imported[0] == importer[0]
            if not is_own_part:
                breaches.append(f"{i.where}: {i.importer} imports {name}")
    return breaches


def rollout_and_trainer_that_meet(package: Path) -> list[str]:
    """`rollout` and `trainer` never import each other."""
    sides = {"asyncrl.rollout": "asyncrl.trainer", "asyncrl.trainer": "asyncrl.rollout"}
    return [
        f"{i.where}: {i.importer} imports {name}"
        for i in imports(package)
        for mine, other in sides.items()
        for name in i.names
        if f"{i.importer}.".startswith(f"{mine}.")
        and name == other
        or f"{i.importer}.".startswith(f"{mine}.")
        and name.startswith(f"{other}.")
    ]


def ray_outside_cluster(package: Path) -> list[str]:
    """Only `cluster` imports ray."""
    return [
        f"{i.where}: {i.importer} imports ray"
        for i in imports(package)
        if i.library == "ray" and i.importer != "asyncrl.cluster"
    ]


def vendors_at_import_of_a_leaf(package: Path) -> list[str]:
    """Vendor libraries are imported when a plug-in is made, not when its module is imported."""
    return [
        f"{i.where}: {i.importer} imports {i.library}"
        for i in imports(package)
        if leaf_of(f"{i.importer}.x") and i.is_at_import and i.library in VENDORS
    ]


RULES = [
    heavy_in_modules_that_stand_alone,
    leaves_that_import_leaves,
    rollout_and_trainer_that_meet,
    ray_outside_cluster,
    vendors_at_import_of_a_leaf,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_sources_keep_the_import_rule(rule: Callable[[Path], list[str]]) -> None:
    assert rule(PACKAGE) == []


@pytest.mark.parametrize(
    ("rule", "file", "source", "breach"),
    [
        (
            heavy_in_modules_that_stand_alone,
            "config.py",
            "import os\nimport torch.nn",
            "asyncrl/config.py:2: asyncrl.config imports torch",
        ),
        (
            leaves_that_import_leaves,
            "losses/b.py",
            "def f():\n    from asyncrl.losses import a",
            "asyncrl/losses/b.py:2: asyncrl.losses.b imports asyncrl.losses.a",
        ),
        (
            leaves_that_import_leaves,
            "rewards/b.py",
            "from ..losses.a import x",
            "asyncrl/rewards/b.py:1: asyncrl.rewards.b imports asyncrl.losses.a",
        ),
        (
            rollout_and_trainer_that_meet,
            "trainer/step.py",
            "from asyncrl.rollout.prompts import x",
            "asyncrl/trainer/step.py:1: asyncrl.trainer.step imports asyncrl.rollout.prompts",
        ),
        (
            ray_outside_cluster,
            "pipeline.py",
            "def f():\n    import ray",
            "asyncrl/pipeline.py:2: asyncrl.pipeline imports ray",
        ),
        (
            vendors_at_import_of_a_leaf,
            "rewards/m.py",
            "try:\n    import math_verify\nexcept ImportError:\n    pass",
            "asyncrl/rewards/m.py:2: asyncrl.rewards.m imports math_verify",
        ),
    ],
)
def test_breach_of_a_rule_is_named_by_line(
    tmp_path: Path, rule: Callable[[Path], list[str]], file: str, source: str, breach: str
) -> None:
    package = tmp_path / "asyncrl"
    for path, text in (("losses/a.py", "x = 1"), (file, source)):
        (package / path).parent.mkdir(parents=True, exist_ok=True)
        (package / path).write_text(text)
    assert breach in rule(package)


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("losses/b.py", "from asyncrl.losses import x\nfrom asyncrl.losses._parts import y"),
        ("rewards/m.py", "def f():\n    import math_verify"),
        ("buffer.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
        ("cluster.py", "import ray\nfrom asyncrl.trainer import x\nfrom asyncrl.rollout import y"),
    ],
)
def test_what_the_rules_allow_is_no_breach(tmp_path: Path, file: str, source: str) -> None:
    package = tmp_path / "asyncrl"
    for path, text in (("losses/_parts.py", "y = 1"), (file, source)):
        (package / path).parent.mkdir(parents=True, exist_ok=True)
        (package / path).write_text(text)
    assert [breach for rule in RULES for breach in rule(package)] == []


def test_importing_the_configuration_brings_in_nothing_heavy() -> None:
    code = (
        "import sys, asyncrl.config_file, asyncrl.trajectory, asyncrl.preflight, asyncrl.train\n"
        f"print(sorted({HEAVY!r} & set(sys.modules)))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert answer.stdout.strip() == "[]"

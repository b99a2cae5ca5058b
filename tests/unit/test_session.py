from __future__ import annotations

from pathlib import Path

from asyncrl.session import copy_model


def test_shards_of_the_initial_weights_do_not_hide_the_published_ones(tmp_path: Path) -> None:
    initial, published = tmp_path / "initial", tmp_path / "published"
    for folder in (initial, published):
        folder.mkdir()
    for name in ("config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json"):
        (initial / name).write_text("initial")
    (published / "model.safetensors").write_text("published")
    copy_model(initial, tmp_path / "model", weights=published)
    found = {path.name: path.read_text() for path in (tmp_path / "model").iterdir()}
    assert found == {"config.json": "initial", "model.safetensors": "published"}

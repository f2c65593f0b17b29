"""Reading a checkpoint's tensors: sharded or single safetensors, one tensor at a time, through a memory map.

Nothing else is opened: no pickle, no code from the model's directory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from service.models.errors import ModelError

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Checkpoint:
    """The tensors of an open checkpoint by name; see `open_checkpoint`."""

    def __init__(self, model_dir: Path, files: dict[str, Any]) -> None:
        """files  safetensors file name -> open handle"""
        self._model_dir = model_dir
        self._files = files
        self._file_of = {name: file for file, handle in files.items() for name in handle.keys()}  # noqa: SIM118
        self._read: set[str] = set()

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor as it is stored, perhaps still in the memory map. Raises ModelError."""
        if name not in self._file_of:
            raise ModelError(f"the checkpoint in {self._model_dir} has no tensor {name}")
        file = self._file_of[name]
        header = self._files[file].get_slice(name)
        if tuple(header.get_shape()) != shape:
            raise ModelError(
                f"tensor {name} in {file} has the shape {header.get_shape()}, and config.json calls for {list(shape)}"
            )
        try:
            tensor: torch.Tensor = self._files[file].get_tensor(name)
        except (SafetensorError, AttributeError, KeyError) as error:
            raise ModelError(f"tensor {name} in {file} cannot be read: {error}") from error
        if tensor.dtype not in _DTYPES:
            raise ModelError(f"tensor {name} in {file} is {header.get_dtype()}; served are F32, BF16 and F16")
        self._read.add(name)
        return tensor

    def dtype(self, name: str) -> str:
        """The stored dtype in torch's spelling, or safetensors' where torch has none of ours. Raises ModelError."""
        if name not in self._file_of:
            raise ModelError(f"the checkpoint in {self._model_dir} has no tensor {name}")
        stored: str = self._files[self._file_of[name]].get_slice(name).get_dtype()
        return {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}.get(stored, stored)

    def unread(self) -> list[str]:
        """Names of tensors that nobody asked for, in order."""
        return sorted(set(self._file_of) - self._read)


@contextmanager
def open_checkpoint(model_dir: Path) -> Iterator[Checkpoint]:
    """Open the safetensors files of `model_dir`; the memory maps end with the context. Raises ModelError."""
    with ExitStack() as stack:
        files = {}
        for file in _file_names(model_dir):
            try:
                files[file] = stack.enter_context(safe_open(model_dir / file, framework="pt", device="cpu"))
            except FileNotFoundError:
                raise ModelError(f"{_INDEX} names {file}, which {model_dir} does not have") from None
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{model_dir / file} cannot be read as safetensors: {error}") from error
        yield Checkpoint(model_dir, files)


def _file_names(model_dir: Path) -> list[str]:
    if (model_dir / _SINGLE).is_file():
        return [_SINGLE]
    if not (model_dir / _INDEX).is_file():
        raise ModelError(f"{model_dir} has neither {_SINGLE} nor {_INDEX} (pickled weights are never read)")
    try:
        weight_map: dict[str, str] = json.loads((model_dir / _INDEX).read_text(encoding="utf-8"))["weight_map"]
        file_names = sorted(set(weight_map.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{model_dir / _INDEX} has no readable weight_map: {error!r}") from error
    outside = [file for file in file_names if Path(file).name != file]
    if outside:
        raise ModelError(f"{_INDEX} names {outside[0]}, which is not a file of {model_dir} itself")
    return file_names

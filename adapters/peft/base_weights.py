"""The base checkpoint, read to distinguish a copy of a base weight from a changed one.

PEFT saves the base's embedding beside an adapter that targets it. An identical copy is left out; a changed one would
be full training under the name of LoRA, and is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adapters.errors import AdapterError
from adapters.files.safetensors_header import ELEMENT_BYTES, Tensor, parse_json_object, read_chunks, read_header
from adapters.peft.module_names import tail_of

if TYPE_CHECKING:
    import numpy as np

CHUNK_ELEMENTS = 1 << 18
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


class BaseWeights:
    """Reads `directory` (Hugging Face layout, safetensors) lazily; nothing is kept in memory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @property
    def can_compare(self) -> bool:
        """Whether there are safetensors files to read: a GGUF file, which rounds the weights anyway, is none."""
        return any((self._directory / name).exists() for name in ("model.safetensors", "model.safetensors.index.json"))

    def repeats(self, name: str, copy: Tensor, path: Path) -> bool:
        """Whether `copy`, in the file at `path`, equals the base's tensor `name` once that is rounded to its dtype."""
        found = self._find(name)
        if found is None and name == _HEAD:  # tied to the embedding, hence not in the checkpoint
            found = self._find(_EMBEDDING)
        if found is None or found[1].shape != copy.shape:
            return False
        base_path, base = found
        base_chunks = read_chunks(base_path, base, CHUNK_ELEMENTS * ELEMENT_BYTES[base.dtype])
        copy_chunks = read_chunks(path, copy, CHUNK_ELEMENTS * ELEMENT_BYTES[copy.dtype])
        return all(
            _same(ours, base.dtype, theirs, copy.dtype) for ours, theirs in zip(base_chunks, copy_chunks, strict=True)
        )

    def _find(self, name: str) -> tuple[Path, Tensor] | None:
        """The tensor of this name, whatever the checkpoint calls the model around it, if just one is called so."""
        index = self._directory / "model.safetensors.index.json"
        path = self._directory / "model.safetensors"
        try:
            if index.exists():
                text = index.read_bytes()
                fields = parse_json_object(text, "the base's index", max_containers=math.inf, max_values=math.inf)
                weight_map = fields.get("weight_map", {})
                stored = _called(name, weight_map)
                if stored is None:
                    return None
                path = self._directory / weight_map[stored]
            tensors = read_header(path, any_dtype=True)
        except (OSError, AdapterError):
            return None
        stored = _called(name, tensors)
        return None if stored is None else (path, tensors[stored])


def _called(name: str, stored: Iterable[str]) -> str | None:
    """As `service.models.checkpoint.checkpoint.Checkpoint` finds it."""
    alike = [one for one in stored if tail_of(one) == tail_of(name)]
    if name in alike:
        return name
    return alike[0] if len(alike) == 1 else None


def _same(base: bytes, base_dtype: str, copy: bytes, copy_dtype: str) -> bool:
    import numpy as np

    if base_dtype == copy_dtype:
        return base == copy
    return bool(np.array_equal(_rounded(_widened(base, base_dtype), copy_dtype), _widened(copy, copy_dtype)))


def _widened(data: bytes, dtype: str) -> np.ndarray[Any, Any]:
    """float32 values."""
    import numpy as np

    if dtype == "BF16":
        return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
    return np.frombuffer(data, "<f4" if dtype == "F32" else "<f2").astype("<f4")


def _rounded(values: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    """float32 values rounded to `dtype`, to nearest even."""
    import numpy as np

    if dtype == "BF16":
        bits = values.view("<u4")
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view("<f4")
    if dtype == "F16":
        with np.errstate(over="ignore"):
            return values.astype("<f2").astype("<f4")
    return values

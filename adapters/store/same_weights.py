"""Comparison of two adapters' weights in different float types: the same only if every value is the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from adapters.files.manifest import Manifest
from adapters.files.paths import TENSOR_FILE
from adapters.files.safetensors_header import ELEMENT_BYTES, Tensor, read_chunks, read_header, widened

_STEP_ELEMENTS = 1 << 18


def have_same_weights(one: Path, one_manifest: Manifest, other: Path, other_manifest: Manifest) -> bool:
    """For two published directories of different content: whether they differ in nothing but the float types of
    tensors, and all values are equal when widened to float32, which every type allows exactly.

    Reads both files as far as they agree. OSError, Malformed if one cannot be read.
    """
    if _structure(one_manifest) != _structure(other_manifest):
        return False
    tensors, others = read_header(one / TENSOR_FILE), read_header(other / TENSOR_FILE)
    if {name: tensor.shape for name, tensor in tensors.items()} != {
        name: tensor.shape for name, tensor in others.items()
    }:
        return False
    if all(tensor.dtype == others[name].dtype for name, tensor in tensors.items()):
        return False  # the values differ, or something else that changes the digest
    return all(
        _are_equal(one / TENSOR_FILE, tensor, other / TENSOR_FILE, others[name]) for name, tensor in tensors.items()
    )


def _structure(manifest: Manifest) -> object:
    modules = [(one.module, one.rank, one.scaling, one.token_ids) for one in manifest.modules]
    text = manifest.has_chat_template, manifest.special_tokens, sorted(manifest.eos_token_ids)
    return sorted(modules), text, manifest.invocation


def _are_equal(path: Path, tensor: Tensor, other_path: Path, other: Tensor) -> bool:
    pieces = (
        read_chunks(file, one, _STEP_ELEMENTS * ELEMENT_BYTES[one.dtype])
        for file, one in ((path, tensor), (other_path, other))
    )
    return all((_bits(a, tensor.dtype) == _bits(b, other.dtype)).all() for a, b in zip(*pieces, strict=True))


def _bits(data: bytes, dtype: str) -> Any:
    """Bit patterns of the elements as float32, uint32: -0 differs from 0."""
    return widened(data, dtype).view("<u4")

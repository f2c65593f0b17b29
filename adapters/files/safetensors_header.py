"""Safetensors files without torch: the header is read and proven consistent before a byte of data is touched.
Tensors that lie in several files are put together into one before anything else looks at them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapters.errors import Malformed, Unsupported

ELEMENT_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
MAX_HEADER_BYTES = 8 << 20
MAX_TENSORS = 65_536
MAX_DIMENSIONS = 8
MAX_NAME_LENGTH = 1000
# A larger block of the API process has pages of its own, which cost more than the read (`service.models.heap`).
CHUNK_BYTES = 1 << 18
# Limits of an adapter's JSON beside its tensors. Tokenizers of 6,000 added tokens have 6,000 objects and 50,000 values;
# millions are built for a second in which no other thread of Python works.
MAX_CONTAINERS = 1 << 15
MAX_VALUES = 1 << 18
# The same of a header: a tensor has three lists and objects.
_MAX_HEADER_CONTAINERS = 4 * MAX_TENSORS
_MAX_HEADER_VALUES = 12 * MAX_TENSORS
# How JSON spells half of a UTF-16 pair. UTF-8 has no bytes for one, so a text can hold it in no other way.
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


@dataclass(frozen=True, slots=True)
class Tensor:
    """One entry of a header. `start` and `end` are offsets in the file, not in its data section."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.start


def read_header(path: Path, *, any_dtype: bool = False, is_growing: bool = False) -> dict[str, Tensor]:
    """Tensors of the file by name, in the order of their data.

    any_dtype   for base checkpoints: only tensors of a known dtype are returned
    is_growing  the file is still being written; its header is there

    Raises Malformed when the file is not a consistent safetensors file (sizes, offsets, gaps, overlaps, duplicate
    names), Unsupported for dtypes other than F32, F16 and BF16.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            raise Malformed("The tensor file is shorter than a safetensors header; upload a .safetensors file.")
        header_bytes = int.from_bytes(prefix, "little")
        if header_bytes > MAX_HEADER_BYTES or header_bytes + 8 > size:
            # Both kinds of torch.save: as a header length, their first bytes are far above the limit.
            if prefix.startswith((b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")):
                raise Unsupported("The tensor file is a pickle; save the adapter as safetensors and upload that.")
            raise Malformed(
                f"The safetensors header claims {header_bytes} bytes; the file has {size} and the limit is "
                f"{MAX_HEADER_BYTES}. The file is damaged or not safetensors."
            )
        data_start = 8 + header_bytes
        found = _tensors(file.read(header_bytes), data_start, any_dtype)
    in_order = sorted(found, key=lambda tensor: (tensor.start, tensor.end))
    contiguous = _contiguous(in_order, data_start, None if is_growing else size)
    return {tensor.name: tensor for tensor in contiguous if tensor.dtype in ELEMENT_BYTES}


def parse_json_object(
    text: bytes, what: str, *, max_containers: float = MAX_CONTAINERS, max_values: float = MAX_VALUES
) -> dict[str, Any]:
    """A JSON object without duplicate keys, NaN, Infinity or strings that are no Unicode. Raises Malformed naming
    `what`.

    max_containers  brackets and braces that open, those in strings counted too
    max_values      commas, likewise
    """
    if text.count(b"[") + text.count(b"{") > max_containers or text.count(b",") > max_values:
        raise Malformed(
            f"{what} cannot be read: it may have {max_containers} lists and objects and {max_values} commas."
        )
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
        if _SURROGATE.search(text):
            refuse_surrogates(value)
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        reason = error if isinstance(error, Malformed) else "it is not valid JSON in UTF-8"
        raise Malformed(f"{what} cannot be read: {reason}.") from None
    if not isinstance(value, dict):
        raise Malformed(f"{what} cannot be read: it is not a JSON object.")
    return value


def refuse_surrogates(value: Any) -> None:
    """Raises Malformed when a string in parsed JSON holds half of a UTF-16 pair: such a string cannot be written or
    sent again, nor looked up in a tokenizer."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise Malformed(f"it holds {half} outside a UTF-16 pair, which is no character; remove it") from None


def printable(text: str) -> str:
    """For messages and notes: "?" in place of what is no Unicode. Names of files may hold any bytes."""
    return text.encode("utf-8", "replace").decode()


def read_chunks(path: Path, tensor: Tensor, chunk_bytes: int = CHUNK_BYTES) -> Iterator[bytes]:
    """The tensor's bytes in pieces of at most `chunk_bytes` (a multiple of every element size)."""
    with path.open("rb") as file:
        file.seek(tensor.start)
        left = tensor.num_bytes
        while left:
            chunk = file.read(min(left, chunk_bytes))
            if not chunk:
                raise Malformed("The tensor file ended early; upload it again.")
            left -= len(chunk)
            yield chunk


def widened(data: bytes, dtype: str) -> Any:
    """The elements as float32, which holds every value of the other dtypes."""
    import numpy as np

    if dtype == "BF16":
        return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
    return np.frombuffer(data, "<f2" if dtype == "F16" else "<f4").astype("<f4")


def header_bytes(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> bytes:
    """The header of a file whose tensors (name, dtype, shape) follow in this order without gaps, as the safetensors
    library writes it."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, dtype, shape in tensors:
        end = offset + math.prod(shape) * ELEMENT_BYTES[dtype]
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data starts aligned, so that it can be mapped
    return len(text).to_bytes(8, "little") + text


def header_of(path: Path) -> bytes:
    """The bytes that `header_bytes` has made of a file in the store; of a damaged one, whatever is there."""
    with path.open("rb") as file:
        prefix = file.read(8)
        return prefix + file.read(min(int.from_bytes(prefix, "little"), MAX_HEADER_BYTES))


def _tensors(text: bytes, data_start: int, any_dtype: bool) -> list[Tensor]:
    """The tensors of a header, in its order."""
    if not text.startswith(b"{"):
        raise Malformed("The safetensors header is not a JSON object; the file is damaged or not safetensors.")
    entries = parse_json_object(
        text, "The safetensors header", max_containers=_MAX_HEADER_CONTAINERS, max_values=_MAX_HEADER_VALUES
    )
    _check_metadata(entries.pop("__metadata__", {}))
    if len(entries) > MAX_TENSORS:
        raise Malformed(f"The safetensors header lists more than {MAX_TENSORS} tensors, which is the limit.")
    return [_tensor(name, entry, data_start, any_dtype) for name, entry in entries.items()]


def _check_metadata(metadata: Any) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise Malformed("The safetensors header's __metadata__ is not a map of strings.")


def _tensor(name: str, entry: Any, data_start: int, any_dtype: bool) -> Tensor:
    if len(name) > MAX_NAME_LENGTH:
        raise Malformed(f"The tensor name {name[:100]!r}... is longer than {MAX_NAME_LENGTH} characters.")
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise Malformed(f"Tensor {name[:200]!r}: the header entry needs exactly dtype, shape and data_offsets.")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or (dtype not in ELEMENT_BYTES and not any_dtype):
        raise Unsupported(f"Tensor {name[:200]!r} has dtype {str(dtype)[:40]!r}; F32, F16 and BF16 are supported.")
    if not _is_sizes(shape) or len(shape) > MAX_DIMENSIONS:
        raise Malformed(f"Tensor {name[:200]!r}: the shape is not a list of at most {MAX_DIMENSIONS} sizes.")
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise Malformed(f"Tensor {name[:200]!r}: data_offsets is not [start, end].")
    start, end = offsets
    if dtype in ELEMENT_BYTES and math.prod(shape) * ELEMENT_BYTES[dtype] != end - start:
        raise Malformed(f"Tensor {name[:200]!r}: shape {shape} of {dtype} does not take {end - start} bytes.")
    return Tensor(name, dtype, tuple(shape), data_start + start, data_start + end)


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(size) is int and 0 <= size < 1 << 48 for size in value)


def _contiguous(tensors: Iterable[Tensor], data_start: int, file_size: int | None) -> Iterator[Tensor]:
    """The tensors, which are in data order, after checking that they fill the file from the header's end to its end,
    where that is known."""
    expected = data_start
    for tensor in tensors:
        if tensor.start != expected:
            kind = "overlaps the tensor before it" if tensor.start < expected else "leaves a gap before it"
            raise Malformed(f"Tensor {tensor.name[:200]!r} {kind}; the file is damaged.")
        expected = tensor.end
        yield tensor
    if file_size not in (None, expected):
        fault = "cut off" if file_size is not None and expected > file_size else "too long"
        raise Malformed(f"The tensors end at byte {expected} of {file_size}: the file is {fault}.")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise Malformed(f"key {key[:200]!r} occurs twice")
        result[key] = value
    return result


def _no_constant(text: str) -> Any:
    raise Malformed(f"{text} is not a JSON number")


SHARD_NAME = re.compile(r"adapter_model-(\d{5})-of-(\d{5})\.safetensors")
INDEX_NAME = "adapter_model.safetensors.index.json"


def join_shards(shards: Mapping[str, Path], index: bytes | None, target: Path) -> None:
    """Write the tensors of all `shards` (by file name) to `target`, which must not exist.

    index  of the file INDEX_NAME, whose `weight_map` must name these tensors and no others; None: there is none

    Raises Malformed for a shard or a tensor that is missing or there twice, and what `read_header` raises.
    """
    _check_complete(shards)
    tensors: dict[str, tuple[str, Tensor]] = {}
    for shard in sorted(shards):
        for tensor in read_header(shards[shard]).values():
            if tensor.name in tensors:
                raise Malformed(f"Two of the adapter's shards hold the tensor {tensor.name[:200]!r}; upload them anew.")
            tensors[tensor.name] = shard, tensor
    if index is not None:
        _check_index(index, {name: shard for name, (shard, _) in tensors.items()})
    with target.open("xb") as file:
        file.write(header_bytes((tensor.name, tensor.dtype, tensor.shape) for _, tensor in tensors.values()))
        for shard, tensor in tensors.values():
            for chunk in read_chunks(shards[shard], tensor):
                file.write(chunk)


def _check_complete(shards: Mapping[str, Path]) -> None:
    matches = [match for name in shards if (match := SHARD_NAME.fullmatch(name))]
    assert len(matches) == len(shards), "other files are no shards"
    totals = {int(match[2]) for match in matches}
    numbers = sorted(int(match[1]) for match in matches)
    if len(totals) != 1 or numbers != list(range(1, max(totals) + 1)):
        shown = ", ".join(sorted(shards))[:300]
        raise Malformed(f"The adapter's shards are not complete: there are {shown}. Upload all of them.")


def _check_index(index: bytes, shard_of: Mapping[str, str]) -> None:
    weight_map = parse_json_object(index, INDEX_NAME).get("weight_map")
    if not isinstance(weight_map, dict):
        raise Malformed(f"{INDEX_NAME} has no weight_map; upload the file that was saved with the shards.")
    for name in (*weight_map, *shard_of):
        if weight_map.get(name) != shard_of.get(name):
            raise Malformed(f"{INDEX_NAME} and the shards disagree about the tensor {name[:200]!r}; upload them anew.")

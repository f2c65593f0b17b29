"""An adapter whose tensors lie in several safetensors files, put together into one before anything else looks at it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from adapters.errors import Malformed
from adapters.files.safetensors_header import Tensor, header_bytes, parse_json_object, read_chunks, read_header

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

"""Small base layouts and PEFT directories made with numpy alone, for tests of the store that need no model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from adapters.files.manifest import AdapterRecord
from adapters.files.name_versions import Change, Condition, keep, move
from adapters.layout import BaseLayout, ProjectionSpec, Slice
from adapters.store.store import AdapterStore

HIDDEN, INNER, VOCAB = 6, 10, 14
_SAFETENSORS_DTYPES = {np.dtype("<f4"): "F32", np.dtype("<f2"): "F16", np.dtype("<u2"): "BF16"}


def small_layout(num_layers: int = 2) -> BaseLayout:
    """Packed q/k/v, a lone o, an MLP, a convolution's projections, an embedding and a head."""
    projections = [
        ProjectionSpec(
            "model.embed_tokens", -1, "embeddings", "embedding", VOCAB, (Slice("model.embed_tokens", HIDDEN),)
        )
    ]
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}"
        qkv = tuple(Slice(f"{prefix}.self_attn.{name}_proj", width) for name, width in (("q", 8), ("k", 4), ("v", 4)))
        projections += [
            ProjectionSpec(f"{prefix}.self_attn.qkv_proj", layer, "attention", "linear", HIDDEN, qkv),
            _linear(f"{prefix}.self_attn.o_proj", layer, "attention", 8, HIDDEN),
            _linear(f"{prefix}.mlp.down_proj", layer, "mlp", INNER, HIDDEN),
            _linear(f"{prefix}.conv.in_proj", layer, "operator", HIDDEN, 3 * HIDDEN),
        ]
    projections.append(_linear("lm_head", -1, "embeddings", HIDDEN, VOCAB))
    return BaseLayout("small", num_layers, "model.layers.", tuple(projections))


def _linear(name: str, layer: int, group: Any, in_features: int, out_features: int) -> ProjectionSpec:
    return ProjectionSpec(name, layer, group, "linear", in_features, (Slice(name, out_features),))


def modules_ending(layout: BaseLayout, *endings: str) -> list[str]:
    """Module paths whose last component is one of `endings`, in the layout's order."""
    paths = [piece.module for projection in layout.projections for piece in projection.slices]
    return [path for path in paths if path.rsplit(".", 1)[-1] in endings]


def lora_tensors(
    layout: BaseLayout,
    modules: Iterable[str],
    rank: int | Mapping[str, int],
    *,
    seed: int = 0,
    dtype: str = "<f4",
    prefix: str = "base_model.model.",
) -> dict[str, np.ndarray]:
    """Random tensors under PEFT's names. dtype "<u2" makes bfloat16 bit patterns of small numbers."""
    generator = np.random.default_rng(seed)
    by_module = {piece.module: (p, piece) for p in layout.projections for piece in p.slices}
    tensors = {}
    for module in modules:
        projection, piece = by_module[module]
        r = rank if isinstance(rank, int) else rank[module]
        for side, shape in (("A", (r, projection.in_features)), ("B", (piece.out_features, r))):
            values = generator.standard_normal(shape).astype("<f4")
            data = (values.view("<u4") >> 16).astype("<u2") if dtype == "<u2" else values.astype(dtype)
            name = f"lora_embedding_{side}" if projection.kind == "embedding" else f"lora_{side}.weight"
            tensors[f"{prefix}{module}.{name}"] = data
    return tensors


def safetensors_bytes(tensors: Mapping[str, np.ndarray], metadata: dict[str, str] | None = None) -> bytes:
    """A safetensors file with the tensors in the mapping's order."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    offset = 0
    for name, data in tensors.items():
        end = offset + data.nbytes
        dtype = _SAFETENSORS_DTYPES[data.dtype]
        header[name] = {"dtype": dtype, "shape": list(data.shape), "data_offsets": [offset, end]}
        offset = end
    return file_bytes(header, b"".join(data.tobytes() for data in tensors.values()))


def file_bytes(header: Any, data: bytes) -> bytes:
    """A file with this header, right or wrong."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def config_bytes(**fields: Any) -> bytes:
    """An adapter_config.json; rank 4 on q_proj unless told otherwise."""
    return json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], **fields}).encode()


def write_peft_directory(directory: Path, config: bytes, tensors: bytes) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_bytes(config)
    (directory / "adapter_model.safetensors").write_bytes(tensors)
    return directory


def hub_snapshot(directory: Path, repository: Path) -> Path:
    """The files of `directory` as Hugging Face's cache has them: a snapshot of links to blobs beside it."""
    blobs, snapshot = repository / "blobs", repository / "snapshots" / "0123abcd"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(directory.iterdir())):
        (blobs / f"{number}").write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    return snapshot


def upload_bytes(
    store: AdapterStore,
    name: str,
    config: bytes,
    tensors: bytes,
    *,
    chunk_bytes: int = 1000,
    condition: Condition = keep,
    is_ephemeral: bool = False,
    **change: Any,
) -> tuple[AdapterRecord, bool]:
    """Upload the two files in chunks, as the API does; `change` as `adapters.files.name_versions.Change` has it."""
    with store.begin(declared_bytes=len(config) + len(tensors), is_ephemeral=is_ephemeral) as upload:
        for part_name, data in (("adapter_config", config), ("adapter_model", tensors)):
            with upload.open_part(part_name) as part:
                for start in range(0, len(data), chunk_bytes):
                    part.write(data[start : start + chunk_bytes])
        return upload.finish(name, Change(**change), condition=condition)


def upload_small(
    store: AdapterStore,
    layout: BaseLayout,
    name: str,
    *,
    seed: int = 0,
    rank: int = 4,
    endings: tuple[str, ...] = ("q_proj",),
) -> tuple[AdapterRecord, bool]:
    """Upload a valid random adapter on the modules with these endings."""
    tensors = lora_tensors(layout, modules_ending(layout, *endings), rank, seed=seed)
    return upload_bytes(store, name, config_bytes(r=rank, target_modules=list(endings)), safetensors_bytes(tensors))


def put_version(
    store: AdapterStore, layout: BaseLayout, name: str, seed: int, condition: Condition = move, **change: Any
) -> tuple[AdapterRecord, bool]:
    """Upload the adapter of this seed, whatever the name stands for; `change` as `adapters.files.name_versions.Change`
    has it.
    """
    tensors = safetensors_bytes(lora_tensors(layout, modules_ending(layout, "q_proj"), 4, seed=seed))
    return upload_bytes(store, name, config_bytes(), tensors, condition=condition, **change)

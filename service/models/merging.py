"""An adapter merged into a checkpoint: the base's files with changed weights, a tensor at a time."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open

from adapters.errors import Unsupported
from adapters.files.manifest import Manifest, ModuleRecord
from adapters.files.paths import EMBEDDING_SIDES, LINEAR_SIDES, TENSOR_FILE, stored_name
from adapters.layout import BaseLayout, Experts
from adapters.peft.bound_tensors import BIAS, LORA_BIAS, MAGNITUDE, TOKENS, WEIGHT
from adapters.store.store import AdapterStore, StoreLimits
from adapters.text.side_files import TEMPLATES_FOLDER
from adapters.upload.peft_form import text_files
from service.models.checkpoint.checkpoint import Checkpoint, open_checkpoint
from service.models.families import model_spec
from service.models.layouts import layout_in
from service.models.spec.config_json import ModelError, read_config
from service.models.spec.quantisation import KEYS, quantisation_of

_HEAD, _INDEX = "lm_head.weight", "model.safetensors.index.json"
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2} | (
    dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1)
)
_MAX_ADAPTER_BYTES = 1 << 40
# Files of weights, which are written anew or, in formats that are never read, left.
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")

Change = Callable[[torch.Tensor], torch.Tensor]


class Merged(NamedTuple):
    """The result of `merge`: how many tensors differ from the base's, whether the head is no longer the embedding, and
    the adapter, whose notes say what was left out."""

    num_changed: int
    is_untied: bool
    adapter: Manifest


def merge(base_dir: Path, adapter_dir: Path, out_dir: Path, scratch: Path, *, dequantise: bool = False) -> Merged:
    """Write the base with the adapter's weights into the empty `out_dir`: files, names and dtypes of tensors as the
    base's, products in float32 and rounded once; everything that is no weight is copied, with the adapter's chat
    templates and end tokens in the place of the base's.

    scratch     an empty directory, where a store of the adapter is left
    dequantise  a quantised base is written in the dtype of its config.json

    Raises ModelError, AdapterError, OSError.
    """
    config, layout = read_config(base_dir), layout_in(base_dir)
    quantisation = quantisation_of(config)
    if quantisation is not None and not dequantise:
        raise ModelError(
            f"{base_dir} is quantised ({quantisation.method}), and a merged weight has other codes: give --dequantise, "
            "which writes floats, or serve the adapter beside the base"
        )
    store = AdapterStore(
        scratch,
        layout,
        StoreLimits(max_upload_bytes=_MAX_ADAPTER_BYTES, free_disk_floor_bytes=0),
        base_name="base",
        base_dir=base_dir,
    )
    with closing(store), store.begin() as upload, open_checkpoint(base_dir) as base:
        if not isinstance(base, Checkpoint):
            raise ModelError(f"{base_dir} is a GGUF file; merge into the safetensors that it was made of")
        upload.add_directory(adapter_dir)
        manifest = upload.finish("adapter")[0].manifest
        if manifest.invocation:
            raise Unsupported("The adapter begins at its invocation tokens (aLoRA): no weight is the same before them.")
        if manifest.labels:
            raise Unsupported(
                "The adapter has a score head, and the base has no place for one; serve it beside the base."
            )
        with safe_open(store.path_of(manifest.digest) / TENSOR_FILE, framework="pt") as tensors:
            writer = _Writer(base_dir, base, layout, _Changes(manifest, layout, tensors.get_tensor))
            writer.write(out_dir)
        _copy_others(base_dir, out_dir, writer.is_untied, is_dequantised=quantisation is not None)
        _add_text(out_dir, manifest, store.chat_templates(manifest.digest), config)
    return Merged(writer.num_changed, writer.is_untied, manifest)


class _Changes:
    """The adapter's changes of the base's tensors, by the names that the model's specification gives them.

    read  a tensor of the stored adapter by name
    """

    def __init__(self, manifest: Manifest, layout: BaseLayout, read: Callable[[str], torch.Tensor]) -> None:
        self._read = read
        self._records = {one.module: one for one in manifest.modules}
        self._layout = layout
        self._embeddings = {piece.module for p in layout.projections if p.kind == "embedding" for piece in p.slices}

    def of(self, names: Mapping[str, object]) -> dict[str, Change]:
        """Changes by tensor, of a base that holds `names`. Unsupported for one that it has no place for."""
        changes: dict[str, Change] = {}
        for module, one in self._records.items():
            if one.num_experts == 1 and (one.rank or WEIGHT in one.parts or TOKENS in one.parts):
                changes[f"{module}.weight"] = partial(self._weight, one)
            if BIAS in one.parts or LORA_BIAS in one.parts:
                changes[f"{module}.bias"] = partial(self._bias, one)
        for experts in self._layout.experts:
            changes |= self._of_experts(experts, names)
        missing = sorted(changes.keys() - names.keys() - ({_HEAD} if self._layout.ties_head else set()))
        if missing:
            raise Unsupported(
                f"The base has no tensor {missing[0]!r} to merge into (an adapter with lora_bias needs biases there)."
            )
        return changes

    def _tensor(self, module: str, part: str) -> torch.Tensor:
        return self._read(stored_name(module, part)).float()

    def _weight(self, one: ModuleRecord, weight: torch.Tensor) -> torch.Tensor:
        """[out, in]; of the embedding [vocabulary, hidden]."""
        if WEIGHT in one.parts:
            return self._tensor(one.module, WEIGHT)
        merged = weight.float()
        if TOKENS in one.parts:
            return merged.index_copy(0, torch.tensor(one.token_ids), self._tensor(one.module, TOKENS))
        is_embedding = one.module in self._embeddings
        a, b = (self._tensor(one.module, side) for side in (EMBEDDING_SIDES if is_embedding else LINEAR_SIDES))
        delta = (b @ a).mul_(one.scaling)
        merged = merged + (delta.t() if is_embedding else delta)
        if MAGNITUDE not in one.parts:
            return merged
        axis = 0 if is_embedding else 1
        scale = self._tensor(one.module, MAGNITUDE) / merged.norm(dim=axis)
        # Rows of a module that its trainer split, where it trained other parts.
        scale = torch.where((scale == 0) & (b == 0).all(1), torch.ones_like(scale), scale)
        return merged * scale.unsqueeze(axis)

    def _bias(self, one: ModuleRecord, bias: torch.Tensor) -> torch.Tensor:
        merged = self._tensor(one.module, BIAS) if BIAS in one.parts else bias.float()
        return merged + one.scaling * self._tensor(one.module, LORA_BIAS) if LORA_BIAS in one.parts else merged

    def _of_experts(self, experts: Experts, names: Mapping[str, object]) -> Iterator[tuple[str, Change]]:
        """Changes of all experts in one tensor, or of each."""
        for parameter, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
            found = [self._records.get(f"{experts.module}.{part}") for part in parts]
            if f"{experts.module}.{parameter}" in names and any(found):
                yield f"{experts.module}.{parameter}", partial(self._packed, found, experts.is_interleaved)
            elif f"{experts.module}.{parameter}" not in names:
                adapted = ((part, one) for part, one in zip(parts, found, strict=True) if one is not None)
                for (part, one), expert in product(adapted, range(experts.num)):
                    yield f"{experts.module}.{expert}.{part}.weight", partial(self._expert, one, expert)

    def _expert(self, one: ModuleRecord, expert: int, weight: torch.Tensor) -> torch.Tensor:
        """[out, in] of one expert; the adapter has A [num * rank, in] and B [out, num * rank]."""
        rows = slice(expert * one.rank, (expert + 1) * one.rank)
        a, b = (self._tensor(one.module, side) for side in LINEAR_SIDES)
        return weight.float() + one.scaling * (b[:, rows] @ a[rows])

    def _packed(self, found: list[ModuleRecord | None], is_interleaved: bool, weight: torch.Tensor) -> torch.Tensor:
        """[num, outputs, in], gate before up; interleaved [num, in, outputs], of gate and up by turns."""
        merged = weight.to(torch.float32, copy=True)
        by_output = merged.transpose(1, 2) if is_interleaved else merged
        for at, one in enumerate(found):
            if one is None:
                continue
            num = by_output.shape[1] // len(found)
            rows = slice(at, None, len(found)) if is_interleaved else slice(at * num, (at + 1) * num)
            for expert in range(one.num_experts):
                part = by_output[expert, rows]
                part.copy_(self._expert(one, expert, part))
        return merged


class _Entry(NamedTuple):
    """A tensor of a file that is written; `read` makes it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * _BYTES[self.dtype]


class _Writer:
    """num_changed  tensors that differ from the base's
    is_untied    the head is no longer the embedding
    """

    def __init__(self, base_dir: Path, base: Checkpoint, layout: BaseLayout, changes: _Changes) -> None:
        spec = model_spec(read_config(base_dir))
        self._base, self._shapes = base, spec.tensors(base)
        self._changes = changes.of(self._shapes)
        self._floats = getattr(torch, spec.checkpoint_dtype or "bfloat16")
        self._embedding = f"{spec.prefix}embed_tokens.weight"
        self.is_untied = layout.ties_head and self._differ()
        self.num_changed = len(self._changes)

    def write(self, out_dir: Path) -> None:
        """Write the files of weights. Raises ModelError."""
        by_file: dict[str, list[_Entry]] = {}
        for name, shape in self._shapes.items():
            file, stored = self._base.file_of(name)
            by_file.setdefault(file, []).append(self._entry(name, stored, shape))
        if self.is_untied and _HEAD not in self._shapes:
            file, shape = self._base.file_of(self._embedding)[0], self._shapes[self._embedding]
            by_file[file].append(self._entry(_HEAD, _HEAD, shape))
        for name in self._base.others(self._shapes):
            file, header, read = self._base.raw(name)
            if header.dtype not in _BYTES:
                raise ModelError(f"tensor {name} in {file} is {header.dtype}, which cannot be written")
            by_file.setdefault(file, []).append(_Entry(name, header.dtype, header.shape, read))
        if len(by_file) == 1:
            by_file = {"model.safetensors": next(iter(by_file.values()))}
        for file, entries in by_file.items():
            _write_file(out_dir / file, entries)
        if len(by_file) > 1:
            weight_map = {entry.name: file for file, entries in by_file.items() for entry in entries}
            total = sum(entry.num_bytes for entries in by_file.values() for entry in entries)
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
            (out_dir / _INDEX).write_text(json.dumps(index, indent=2))

    def _entry(self, name: str, stored: str, shape: tuple[int, ...]) -> _Entry:
        source = name if name in self._shapes else self._embedding
        dtype = self._floats if self._base.is_quantised(source, shape) else getattr(torch, self._base.dtype(source))
        return _Entry(stored, _DTYPES[dtype], shape, lambda: self._merged(name).to(dtype))

    def _merged(self, name: str) -> torch.Tensor:
        """The tensor as the adapter has it; a tied head is made of the embedding."""
        source = name if name in self._shapes else self._embedding
        tensor = self._base.tensor(source, self._shapes[source])
        change = self._changes.get(name)
        return tensor if change is None else change(tensor)

    def _differ(self) -> bool:
        """Whether the head is another matrix than the embedding."""
        if self._changes.keys().isdisjoint((_HEAD, self._embedding)):
            return False
        return not torch.equal(self._merged(_HEAD).float(), self._merged(self._embedding).float())


def _write_file(path: Path, entries: list[_Entry]) -> None:
    """A safetensors file, wide elements first, so that every tensor is aligned."""
    entries = sorted(entries, key=lambda entry: (-_BYTES[entry.dtype], entry.name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in entries:
        start, end = end, end + entry.num_bytes
        header[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for entry in entries:
            tensor = entry.read()
            assert tensor.shape == entry.shape, entry.name
            file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _copy_others(base_dir: Path, out_dir: Path, is_untied: bool, *, is_dequantised: bool) -> None:
    """Everything of the base's directory that is no weight, with a config.json that is true of the new ones."""
    left = (".", "quant_", "quantize_", "hf_quant_") if is_dequantised else (".",)
    for path in sorted(base_dir.iterdir()):
        if path.is_dir() and path.name == TEMPLATES_FOLDER:
            shutil.copytree(path, out_dir / path.name)
        elif path.is_file() and not path.name.lower().endswith(_WEIGHTS) and not path.name.startswith(left):
            shutil.copyfile(path, out_dir / path.name)
    config = json.loads((base_dir / "config.json").read_text(encoding="utf-8"))
    inner = config.get("text_config")
    for part in (config, *([inner] if isinstance(inner, dict) else [])):
        for key in KEYS if is_dequantised else ():
            part.pop(key, None)
        if is_untied:
            part["tie_word_embeddings"] = False
            part |= {"tie_embedding": False} if "tie_embedding" in part else {}
    (out_dir / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False), encoding="utf-8")


def _add_text(out_dir: Path, manifest: Manifest, templates: Mapping[str, str], config: Mapping[str, Any]) -> None:
    """The adapter's chat templates, and its end tokens beside the base's."""
    for name, data in text_files(templates, manifest, None).items():
        if name.endswith(".jinja"):
            (out_dir / name).parent.mkdir(exist_ok=True)
            (out_dir / name).write_bytes(data)
    path = out_dir / "generation_config.json"
    if manifest.eos_token_ids:
        given = config.get("eos_token_id")
        ends = given if isinstance(given, list) else [] if given is None else [given]
        generation = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        generation["eos_token_id"] = list(dict.fromkeys((*ends, *manifest.eos_token_ids)))
        path.write_text(json.dumps(generation, indent=2), encoding="utf-8")

"""PEFT's files of an adapter in the store, the reverse of `binding`: they bind to the same digest again.

The store has an adapter by the base's modules. Where PEFT has another name or form for a tensor it is written in that
one, and a configuration that does not fit the tensors any more is made anew of the manifest.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from adapters.errors import AdapterError, Unsupported
from adapters.files.manifest import Manifest, ModuleRecord
from adapters.files.paths import CONFIG_FILE, DEFAULT_TEMPLATE, LINEAR_SIDES, TEMPLATE_FILE, TENSOR_FILE, stored_name
from adapters.files.safetensors_header import (
    CHUNK_BYTES,
    ELEMENT_BYTES,
    Tensor,
    header_bytes,
    parse_json_object,
    read_chunks,
    read_header,
    widened,
)
from adapters.layout import BaseLayout, Experts
from adapters.peft.binding import bind
from adapters.peft.bound_tensors import BIAS, LORA_BIAS, MAGNITUDE, SCORE, TOKENS, WEIGHT
from adapters.peft.config import HeadFacts, parse_config
from adapters.text.side_files import TEMPLATES_FOLDER
from adapters.text.vocabulary import FILE_OF, BaseText
from adapters.upload.validate import module_reports

# Reads the parameters of experts as they are written here.
_PEFT_VERSION = "0.19.1"
# Settings that tell where an adapter comes from.
_ORIGIN = ("task_type", "base_model_name_or_path", "revision")


class _Entry(NamedTuple):
    """A tensor of the file that is written; `read` begins to read its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], Iterator[bytes]]

    @property
    def tensor(self) -> Tensor:
        """As a header has it, but for the place."""
        return Tensor(self.name, self.dtype, self.shape, 0, math.prod(self.shape) * ELEMENT_BYTES[self.dtype])


class _Target(NamedTuple):
    """A module or parameter with LoRA by the name that a configuration gives it."""

    name: str
    rank: int
    scaling: float
    is_parameter: bool


class PeftForm:
    """The files of the adapter in a directory of the store.

    config     of adapter_config.json: the uploaded bytes where they describe the tensors, else made of the manifest
    num_bytes  size of adapter_model.safetensors

    Raises Malformed and OSError for damaged files, Unsupported for DoRA on some rows of a module, which PEFT has not.
    """

    def __init__(self, directory: Path, manifest: Manifest, layout: BaseLayout) -> None:
        self._path, self._manifest, self._layout = directory / TENSOR_FILE, manifest, layout
        self._records = {one.module: one for one in manifest.modules}
        self._stored = read_header(self._path)
        entries = [*self._renamed(), *(entry for experts in layout.experts for entry in self._of_experts(experts))]
        # As the store sorts them.
        self._entries = sorted(entries, key=lambda entry: (-ELEMENT_BYTES[entry.dtype], entry.name))
        self._header = header_bytes((entry.name, entry.dtype, entry.shape) for entry in self._entries)
        self.num_bytes = len(self._header) + sum(entry.tensor.num_bytes for entry in self._entries)
        uploaded = (directory / CONFIG_FILE).read_bytes()
        # What a config.json beside it said of a score head is said here.
        named = json.dumps(parse_json_object(uploaded, CONFIG_FILE) | self._head_facts(), indent=2).encode()
        described = (config for config in (uploaded, named) if self._is_described_by(config))
        self.config = next(described, None) or self._new_config(uploaded)

    def tensors(self) -> Iterator[bytes]:
        """The bytes of adapter_model.safetensors, in pieces."""
        return chain([self._header], chain.from_iterable(entry.read() for entry in self._entries))

    # ---- tensors

    def _renamed(self) -> Iterator[_Entry]:
        """All but those of experts, by PEFT's names."""
        of_experts = {name for one in self._records.values() if one.num_experts > 1 for name in _sides(one.module)}
        biases = {stored_name(one.module, BIAS) for one in self._records.values() if one.rank and BIAS in one.parts}
        left = {*of_experts, *(stored_name(head, TOKENS) for head in self._tied_tokens())}
        for name, tensor in self._stored.items():
            if name not in left:
                # Of a module with LoRA PEFT has the bias below the layer that it wraps.
                shown = f"{name.removesuffix(BIAS)}base_layer.{BIAS}" if name in biases else name
                yield _Entry(shown, tensor.dtype, tensor.shape, partial(read_chunks, self._path, tensor))

    def _tied_tokens(self) -> list[str]:
        """Heads whose trained tokens are the embedding's, which PEFT has once."""
        if not self._layout.ties_head:
            return []
        trained = [one for one in self._records.values() if TOKENS in one.parts]
        embeddings = {piece.module for p in self._layout.projections if p.kind == "embedding" for piece in p.slices}
        return [
            head.module
            for head in trained
            for one in trained
            if head.module not in embeddings
            and one.module in embeddings
            and head.token_ids == one.token_ids
            and self._bytes(head.module, TOKENS) == self._bytes(one.module, TOKENS)
        ]

    def _bytes(self, module: str, part: str) -> bytes:
        return b"".join(read_chunks(self._path, self._stored[stored_name(module, part)]))

    def _of_experts(self, experts: Experts) -> Iterator[_Entry]:
        """A layer's experts as two parameters; gate and up have each their half of the ranks."""
        parts = self._parts_of(experts)
        for place, modules in enumerate(parts.values()):
            # PEFT wraps a module once for each parameter.
            prefix = f"{experts.module}.base_layer" if place == 0 and len(parts) > 1 else experts.module
            sides = [[self._stored[name] for name in _sides(one.module)] for one in modules]
            dtype = sides[0][0].dtype if len({side.dtype for pair in sides for side in pair}) == 1 else "F32"
            rank, num = modules[0].rank, experts.num
            ranks, in_features = rank * len(modules), sides[0][0].shape[1]
            outputs = sum(b.shape[0] for _, b in sides)
            read_a = partial(self._expert_a, [a for a, _ in sides], dtype, num)
            read_b = partial(self._expert_b, [b for _, b in sides], dtype, num, experts.is_interleaved)
            yield _Entry(stored_name(prefix, LINEAR_SIDES[0]), dtype, (num * ranks, in_features), read_a)
            yield _Entry(stored_name(prefix, LINEAR_SIDES[1]), dtype, (outputs, ranks * num), read_b)

    def _parts_of(self, experts: Experts) -> dict[str, list[ModuleRecord]]:
        """The records of gate and up, and of down, by the parameter's name, where the adapter has them."""
        found: dict[str, list[ModuleRecord]] = {}
        for name, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
            records = [self._records.get(f"{experts.module}.{part}") for part in parts]
            present = [one for one in records if one is not None]
            if present and (len(present) < len(parts) or len({(one.rank, one.scaling) for one in present}) > 1):
                raise Unsupported(
                    f"Gate and up of {experts.module} have different ranks or scalings, and PEFT's parameters have "
                    "one; use the files that were uploaded."
                )
            if present:
                found[name] = present
        return found

    def _expert_a(self, sides: list[Tensor], dtype: str, num: int) -> Iterator[bytes]:
        """[num * ranks, in]: the rows of an expert, gate before up, before those of the next."""
        for expert in range(num):
            for side in sides:
                yield from _cast(read_chunks(self._path, _rows(side, expert, num)), side.dtype, dtype)

    def _expert_b(self, sides: list[Tensor], dtype: str, num: int, is_interleaved: bool) -> Iterator[bytes]:
        """[out, ranks * num], the columns rank after rank: the store has them expert after expert. Rows of gate have
        zeros in the ranks of up, and the other way round."""
        import numpy as np

        at_once = max(CHUNK_BYTES // (4 * sides[0].shape[1] * len(sides)), 1)

        def rows(at: int) -> Iterator[Any]:
            side = sides[at]
            row_bytes = side.shape[1] * ELEMENT_BYTES[side.dtype]
            for piece in _cast(read_chunks(self._path, side, at_once * row_bytes), side.dtype, dtype):
                values = np.frombuffer(piece, f"<u{ELEMENT_BYTES[dtype]}").reshape(-1, num, side.shape[1] // num)
                by_rank = values.transpose(0, 2, 1).reshape(len(values), -1)
                wide = np.zeros((len(values), len(sides), by_rank.shape[1]), values.dtype)
                wide[:, at] = by_rank
                yield wide

        if is_interleaved and len(sides) > 1:
            for gate, up in zip(rows(0), rows(1), strict=True):
                yield np.stack((gate, up), axis=1).tobytes()
        else:
            for at in range(len(sides)):
                yield from (piece.tobytes() for piece in rows(at))

    # ---- the configuration

    def _is_described_by(self, config: bytes) -> bool:
        if any(one.num_experts > 1 for one in self._records.values()):
            return False  # their values tell, and those are not read here
        try:
            binding = bind(self._layout, parse_config(config), {entry.name: entry.tensor for entry in self._entries})
            head = binding.with_head_of(None, CONFIG_FILE).head or HeadFacts()
        except AdapterError:
            return False
        manifest = self._manifest
        own = binding.invocation, binding.classifier_from_token, head
        wanted = manifest.invocation, manifest.classifier_from_token, (manifest.labels, manifest.problem_type)
        return module_reports(binding) == manifest.modules and own == wanted

    def _head_facts(self) -> dict[str, Any]:
        """Settings of a score head, beside those of PEFT."""
        if not self._manifest.labels:
            return {}
        return {
            "id2label": dict(enumerate(self._manifest.labels)),
            "problem_type": self._manifest.problem_type or None,
        }

    def _new_config(self, uploaded: bytes) -> bytes:
        """A configuration that names each module by its whole path."""
        self._refuse_zero_magnitudes()
        targets, records = self._targets(), self._records.values()
        with_part = {part: [one.module for one in records if part in one.parts] for part in _PARTS}
        use_rslora, alphas = _alphas(targets)
        usual = Counter(zip((one.rank for one in targets), alphas, strict=True)).most_common(1)
        rank, alpha = usual[0][0] if usual else (8, 8)
        tied = self._tied_tokens()
        tokens = {one.module: list(one.token_ids) for one in records if one.token_ids and one.module not in tied}
        origin = parse_json_object(uploaded, CONFIG_FILE)
        config = {
            **{name: origin.get(name) for name in _ORIGIN},
            "peft_type": "LORA",
            "peft_version": _PEFT_VERSION,
            "inference_mode": True,
            "r": rank,
            "lora_alpha": alpha,
            "rank_pattern": {one.name: one.rank for one in targets if one.rank != rank},
            "alpha_pattern": {one.name: at for one, at in zip(targets, alphas, strict=True) if at != alpha},
            "use_rslora": use_rslora,
            "target_modules": [one.name for one in targets if not one.is_parameter],
            "target_parameters": [one.name for one in targets if one.is_parameter] or None,
            "bias": "all" if set(with_part[BIAS]) - {SCORE} else "none",
            "use_dora": bool(with_part[MAGNITUDE]),
            "lora_bias": bool(with_part[LORA_BIAS]),
            "modules_to_save": with_part[WEIGHT] or None,
            "trainable_token_indices": tokens or None,
            "alora_invocation_tokens": list(self._manifest.invocation) or None,
            **self._head_facts(),
        }
        if self._manifest.classifier_from_token:
            config["classifier_from_token"] = list(self._manifest.classifier_from_token)
        return json.dumps(config, indent=2).encode()

    def _targets(self) -> list[_Target]:
        routers = {router: f"{router}.{WEIGHT}" for router in self._layout.routers}
        targets = [
            _Target(routers.get(one.module, one.module), one.rank, one.scaling, one.module in routers)
            for one in self._records.values()
            if one.rank and one.num_experts == 1
        ]
        for experts in self._layout.experts:
            for name, modules in self._parts_of(experts).items():
                rank = modules[0].rank * len(modules)
                targets.append(_Target(f"{experts.module}.{name}", rank, modules[0].scaling, True))
        return targets

    def _refuse_zero_magnitudes(self) -> None:
        for one in self._records.values():
            if MAGNITUDE in one.parts:
                dtype = self._stored[stored_name(one.module, MAGNITUDE)].dtype
                if not widened(self._bytes(one.module, MAGNITUDE), dtype).all():
                    raise Unsupported(
                        f"The adapter has DoRA on some rows of {one.module} alone, as its trainer split the module; "
                        "PEFT's form of this base has none such. Use the files that were uploaded."
                    )


def text_files(templates: Mapping[str, str], manifest: Manifest, base: BaseText | None) -> dict[str, bytes]:
    """Chat templates by the names of their files, and special and end tokens as transformers has them."""
    files = {f"{TEMPLATES_FOLDER}/{name}.jinja": text for name, text in templates.items() if name != DEFAULT_TEMPLATE}
    if DEFAULT_TEMPLATE in templates:
        files[TEMPLATE_FILE] = templates[DEFAULT_TEMPLATE]
    base = base or BaseText(lambda _text: None)
    if manifest.special_tokens:
        own = {**base.special_tokens, **manifest.special_tokens}
        files[FILE_OF["special_tokens_map"]] = json.dumps(own, indent=2, ensure_ascii=False)
    if manifest.eos_token_ids:
        ends = [*base.eos_token_ids, *manifest.eos_token_ids]
        files[FILE_OF["generation_config"]] = json.dumps({"eos_token_id": ends}, indent=2)
    return {name: text.encode() for name, text in files.items()}


_PARTS = (BIAS, LORA_BIAS, MAGNITUDE, WEIGHT)


def _sides(module: str) -> tuple[str, str]:
    """Stored names of A and B."""
    return stored_name(module, LINEAR_SIDES[0]), stored_name(module, LINEAR_SIDES[1])


def _rows(tensor: Tensor, part: int, num: int) -> Tensor:
    """One of `num` equal parts of a tensor's rows."""
    num_bytes = tensor.num_bytes // num
    start = tensor.start + part * num_bytes
    return Tensor(tensor.name, tensor.dtype, (tensor.shape[0] // num, *tensor.shape[1:]), start, start + num_bytes)


def _cast(pieces: Iterable[bytes], dtype: str, to: str) -> Iterator[bytes]:
    """Bytes of another dtype, or the same; the only other one is float32."""
    return iter(pieces) if dtype == to else (widened(piece, dtype).tobytes() for piece in pieces)


def _alphas(targets: list[_Target]) -> tuple[bool, list[float]]:
    """Whether rsLoRA's scaling is used, and lora_alpha of each: exact in one of the two ways, or else the nearest."""
    ways: Mapping[bool, Callable[[int], float]] = {False: float, True: math.sqrt}
    found = {use: [_alpha(one.scaling, divisor(one.rank)) for one in targets] for use, divisor in ways.items()}
    use_rslora = not all(is_exact for _, is_exact in found[False]) and all(is_exact for _, is_exact in found[True])
    return use_rslora, [alpha for alpha, _ in found[use_rslora]]


def _alpha(scaling: float, divisor: float) -> tuple[float, bool]:
    """The number that gives the scaling when it is divided, and whether it does exactly."""
    near = scaling * divisor
    for alpha in (near, math.nextafter(near, math.inf), math.nextafter(near, -math.inf)):
        if alpha / divisor == scaling:
            return (int(alpha) if alpha == int(alpha) else alpha), True
    return near, False

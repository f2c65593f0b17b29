"""From a checkpoint's config.json to the projections that an adapter can bind to. Torch-free.

Module names are those of transformers' and PEFT's module tree. Slices that share their input are packed into one
projection, in the order in which the model multiplies them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from adapters.layout import BaseLayout, Group, Projection, Slice
from service.models.config_json import read_config
from service.models.errors import ModelError
from service.models.families import model_spec
from service.models.spec import (
    AttentionSpec,
    FeedForward,
    GatedDeltaSpec,
    Mixer,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    ShortConvSpec,
)

__all__ = ["ModelError", "ModelSpec", "layout_in", "layout_of", "layout_of_spec", "model_spec"]

_NUM_SAMPLES = 32
_SAMPLE_BYTES = 4096


def layout_in(model_dir: Path) -> BaseLayout:
    """Layout of the checkpoint in `model_dir`, with the fingerprint of its weights. Raises ModelError."""
    return replace(layout_of(read_config(model_dir)), weights=weights_fingerprint(model_dir))


def weights_fingerprint(model_dir: Path) -> str:
    """64 hex digits over size, start and evenly spaced samples of each safetensors file.

    Training changes every matrix, so samples tell two trainings apart, at a cost that does not grow with the model.
    """
    digest = hashlib.sha256()
    for path in sorted(model_dir.glob("*.safetensors")):
        num_bytes = path.stat().st_size
        digest.update(f"{path.name} {num_bytes}\n".encode())
        with path.open("rb") as file:
            for index in range(_NUM_SAMPLES):
                file.seek(num_bytes * index // _NUM_SAMPLES)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def layout_of(config: Mapping[str, Any]) -> BaseLayout:
    """Layout of the model that a parsed config.json describes. Raises ModelError."""
    return layout_of_spec(model_spec(config))


def layout_of_spec(spec: ModelSpec) -> BaseLayout:
    """All projections in the order of the forward pass: embedding, layers, head."""
    table = f"{spec.prefix}embed_tokens"
    projections = [Projection(table, -1, "embeddings", "embedding", spec.vocab_size, (Slice(table, spec.hidden_size),))]
    for index, layer in enumerate(spec.layers):
        prefix = f"{spec.layer_prefix}{index}."
        for name, group, in_features, slices in (*_mixer(layer.mixer, spec), *_feed_forward(layer.mlp, spec)):
            pieces = tuple(Slice(prefix + module, size) for module, size in slices.items())
            projections.append(Projection(prefix + name, index, group, "linear", in_features, pieces))
    head = (Slice("lm_head", spec.vocab_size),)
    projections.append(Projection("lm_head", -1, "embeddings", "linear", spec.hidden_size, head))
    unadapted = tuple(
        f"{spec.layer_prefix}{index}.{module}"
        for index, layer in enumerate(spec.layers)
        if isinstance(layer.mlp, MoeSpec)
        for module in layer.mlp.unadapted
    )
    fixed = (
        f"{spec.layer_prefix}{index}.{part}"
        for index, layer in enumerate(spec.layers)
        if not isinstance(layer.mixer, AttentionSpec)
        for part in layer.mixer.fixed
    )
    return BaseLayout(
        spec.model_type,
        spec.num_layers,
        spec.layer_prefix,
        tuple(projections),
        unadapted=unadapted,
        fixed=tuple(fixed),
        outside=spec.unused,
        norms=tuple(_norms(spec)),
        ties_head=spec.tie_word_embeddings,
    )


def _norms(spec: ModelSpec) -> Iterator[Slice]:
    """Of the hidden states, and of the heads of attention."""
    for index, layer in enumerate(spec.layers):
        prefix, mixer = f"{spec.layer_prefix}{index}.", layer.mixer
        for name in (layer.mixer_norm, layer.mixer_end_norm, layer.mlp_norm, layer.mlp_end_norm):
            if name is not None:
                yield Slice(prefix + name, spec.hidden_size)
        if isinstance(mixer, AttentionSpec):
            for name in mixer.head_norms or ():
                yield Slice(f"{prefix}{mixer.name}.{name}", mixer.head_dim)
    yield Slice(f"{spec.prefix}{spec.final_norm}", spec.hidden_size)


# Name, group, width of the input, and widths of the outputs by module, all relative to the layer.
_Linear = tuple[str, Group, int, dict[str, int]]


def _mixer(mixer: Mixer, spec: ModelSpec) -> list[_Linear]:
    if isinstance(mixer, ShortConvSpec):
        into, out = f"{mixer.name}.in_proj", f"{mixer.name}.out_proj"
        return [
            (into, "operator", spec.hidden_size, {into: 3 * mixer.size}),
            (out, "operator", mixer.size, {out: spec.hidden_size}),
        ]
    if isinstance(mixer, GatedDeltaSpec):
        inputs = _packed(mixer.name, mixer.inputs, mixer.input_sizes)
        out = f"{mixer.name}.out_proj"
        return [
            (f"{mixer.name}.in_proj", "operator", spec.hidden_size, inputs),
            (out, "operator", mixer.value_size, {out: spec.hidden_size}),
        ]
    sizes = (mixer.query_size, mixer.kv_size, mixer.kv_size)
    out = f"{mixer.name}.{mixer.output}"
    return [
        (f"{mixer.name}.qkv_proj", "attention", spec.hidden_size, _packed(mixer.name, mixer.inputs, sizes)),
        (out, "attention", mixer.num_heads * mixer.head_dim, {out: spec.hidden_size}),
    ]


def _feed_forward(mlp: FeedForward, spec: ModelSpec) -> list[_Linear]:
    if isinstance(mlp, MoeSpec):
        if mlp.shared is None:
            return []
        gate = f"{mlp.name}.{mlp.shared_gate}"
        return [*_gated(mlp.shared, spec), (gate, "mlp", spec.hidden_size, {gate: 1})]
    return _gated(mlp, spec)


def _gated(mlp: MlpSpec, spec: ModelSpec) -> list[_Linear]:
    down = f"{mlp.name}.{mlp.output}"
    gate_up = _packed(mlp.name, mlp.inputs, (mlp.size, mlp.size))
    return [
        (f"{mlp.name}.{mlp.packed}", "mlp", spec.hidden_size, gate_up),
        (down, "mlp", mlp.size, {down: spec.hidden_size}),
    ]


def _packed(parent: str, modules: tuple[str, ...], sizes: tuple[int, ...]) -> dict[str, int]:
    """Output widths by module: one for each size, or one module for all of them."""
    if len(modules) == 1:
        return {f"{parent}.{modules[0]}": sum(sizes)}
    return {f"{parent}.{module}": size for module, size in zip(modules, sizes, strict=True)}

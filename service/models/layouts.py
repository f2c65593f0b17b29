"""From a checkpoint's config.json to the projections that an adapter can bind to. Torch-free.

Module names are those of transformers' and PEFT's module tree. Slices that share their input are packed into one
projection, in the order in which the model multiplies them.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from adapters.layout import BaseLayout, Group, Projection, Slice
from service.models.errors import ModelError
from service.models.facts import ModelFacts, model_facts, read_config

__all__ = ["ModelError", "ModelFacts", "layout_in", "layout_of", "layout_of_facts", "model_facts"]

LAYER_PREFIX = "model.layers."

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


def layout_of(config: dict[str, Any]) -> BaseLayout:
    """Layout of the model that a parsed config.json describes. Raises ModelError."""
    return layout_of_facts(model_facts(config))


def layout_of_facts(facts: ModelFacts) -> BaseLayout:
    """All projections in the order of the forward pass: embedding, layers, head."""
    embedding_slices = (Slice("model.embed_tokens", facts.hidden_size),)
    projections = [Projection("model.embed_tokens", -1, "embeddings", "embedding", facts.vocab_size, embedding_slices)]
    for layer in range(facts.num_layers):
        projections += _mixer(facts, layer) + _feed_forward(facts, layer)
    projections.append(_linear("lm_head", -1, "embeddings", facts.hidden_size, {"lm_head": facts.vocab_size}))
    return BaseLayout(facts.model_type, facts.num_layers, LAYER_PREFIX, tuple(projections))


def _mixer(facts: ModelFacts, layer: int) -> list[Projection]:
    """What mixes the tokens of a layer: attention or a short convolution."""
    hidden_size = facts.hidden_size
    if facts.layer_kinds[layer] == "conv":
        prefix = f"{LAYER_PREFIX}{layer}.conv"
        return [
            _linear(f"{prefix}.in_proj", layer, "operator", hidden_size, {f"{prefix}.in_proj": 3 * hidden_size}),
            _linear(f"{prefix}.out_proj", layer, "operator", hidden_size, {f"{prefix}.out_proj": hidden_size}),
        ]
    prefix = f"{LAYER_PREFIX}{layer}.self_attn"
    query_size, kv_size = facts.num_heads * facts.head_dim, facts.num_kv_heads * facts.head_dim
    packed = {f"{prefix}.q_proj": query_size, f"{prefix}.k_proj": kv_size, f"{prefix}.v_proj": kv_size}
    out = f"{prefix}.out_proj" if facts.model_type == "lfm2" else f"{prefix}.o_proj"
    return [
        _linear(f"{prefix}.qkv_proj", layer, "attention", hidden_size, packed),
        _linear(out, layer, "attention", query_size, {out: hidden_size}),
    ]


def _feed_forward(facts: ModelFacts, layer: int) -> list[Projection]:
    hidden_size, intermediate_size = facts.hidden_size, facts.intermediate_size
    if facts.model_type == "lfm2":
        prefix, names, packed = f"{LAYER_PREFIX}{layer}.feed_forward", ("w1", "w3", "w2"), "w13"
    else:
        prefix, names, packed = f"{LAYER_PREFIX}{layer}.mlp", ("gate_proj", "up_proj", "down_proj"), "gate_up_proj"
    gate, up, down = (f"{prefix}.{name}" for name in names)
    return [
        _linear(f"{prefix}.{packed}", layer, "mlp", hidden_size, {gate: intermediate_size, up: intermediate_size}),
        _linear(down, layer, "mlp", intermediate_size, {down: hidden_size}),
    ]


def _linear(name: str, layer: int, group: Group, in_features: int, slices: dict[str, int]) -> Projection:
    """`slices` maps module paths to output widths, in order."""
    return Projection(name, layer, group, "linear", in_features, tuple(Slice(*item) for item in slices.items()))

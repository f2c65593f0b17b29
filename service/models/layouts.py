"""From a checkpoint's config.json to the projections that an adapter can bind to. Torch-free.

Module names are those of transformers' and PEFT's module tree. Slices that share their input are packed into one
projection, in the order in which the model multiplies them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from adapters.layout import BaseLayout, Experts, ProjectionSpec, Slice, SplitModule
from service.models.families import model_spec
from service.models.gguf_file import LINK, parts_of
from service.models.spec.config_json import ModelError, read_config
from service.models.spec.model_spec import ModelSpec, MoeSpec

__all__ = ["ModelError", "ModelSpec", "layout_in", "layout_of", "layout_of_spec", "model_spec", "weight_files"]

_NUM_SAMPLES = 32
_SAMPLE_BYTES = 4096


def layout_in(model_dir: Path) -> BaseLayout:
    """Layout of the checkpoint in `model_dir`, with the fingerprint of its weights. Raises ModelError."""
    return replace(layout_of(read_config(model_dir)), weights=weights_fingerprint(model_dir))


def weights_fingerprint(model_dir: Path) -> str:
    """64 hex digits over size, start and evenly spaced samples of each file of weights.

    Training changes every matrix, so samples tell two trainings apart, at a cost that does not grow with the model.
    """
    digest = hashlib.sha256()
    for path in weight_files(model_dir):
        num_bytes = path.stat().st_size
        digest.update(f"{path.name} {num_bytes}\n".encode())
        with path.open("rb") as file:
            for index in range(_NUM_SAMPLES):
                file.seek(num_bytes * index // _NUM_SAMPLES)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def weight_files(model_dir: Path) -> list[Path]:
    """Files with weights, in order."""
    in_gguf = [part for link in model_dir.glob(LINK) for part in parts_of(link)]
    return sorted([*model_dir.glob("*.safetensors"), *in_gguf])


def layout_of(config: Mapping[str, Any]) -> BaseLayout:
    """Layout of the model that a parsed config.json describes. Raises ModelError."""
    return layout_of_spec(model_spec(config))


def layout_of_spec(spec: ModelSpec) -> BaseLayout:
    """All projections in the order of the forward pass: embedding, layers, head."""
    table = f"{spec.prefix}embed_tokens"
    projections = [
        ProjectionSpec(table, -1, "embeddings", "embedding", spec.vocab_size, (Slice(table, spec.hidden_size),))
    ]
    experts: list[Experts] = []
    if spec.layer_inputs is not None:
        of_all = spec.layer_inputs.model_linear(spec.hidden_size, spec.num_layers)
        pieces, name = _slices(spec.prefix, of_all.slices), spec.prefix + of_all.name
        projections.append(ProjectionSpec(name, -1, of_all.group, "linear", of_all.in_features, pieces))
    of_inputs = {} if spec.layer_inputs is None else spec.layer_inputs.model_tensors(spec.num_layers)
    fixed = [spec.prefix + name for name in of_inputs]
    norms: list[Slice] = []
    splits: list[SplitModule] = []
    for index, layer in enumerate(spec.layers):
        prefix = f"{spec.layer_prefix}{index}."
        for linear in layer.linears(spec.hidden_size):
            pieces = _slices(prefix, linear.slices)
            name = prefix + linear.name
            projections.append(ProjectionSpec(name, index, linear.group, "linear", linear.in_features, pieces))
            splits += (SplitModule(prefix + module, _slices(prefix, parts)) for module, parts in linear.splits.items())
        if isinstance(layer.mlp, MoeSpec):
            of_layer = layer.mlp.expert_linears(spec.hidden_size)
            for linear in of_layer:
                pieces = _slices(prefix, linear.slices)
                name = prefix + linear.name
                projections.append(ProjectionSpec(name, index, "experts", "experts", linear.in_features, pieces))
            modules = (layer.mlp.experts, layer.mlp.router, *(linear.name for linear in of_layer))
            module, router, gate_up, down = (prefix + name for name in modules)
            experts.append(
                Experts(module, router, layer.mlp.num_experts, gate_up, down, is_interleaved=layer.mlp.interleaved)
            )
            if (stream := layer.mlp.stream) is not None:
                fixed += (prefix + stream.router_scale, prefix + stream.expert_scales)
        replaced = {f"{norm}.weight" for norm in layer.mixer.norms}
        fixed += (prefix + tensor for tensor in layer.mixer.tensors if tensor not in replaced)
        fixed += () if layer.scalar is None else (prefix + layer.scalar,)
        norms += (Slice(prefix + norm, spec.hidden_size) for norm in layer.norms)
        norms += (Slice(prefix + norm, size) for norm, size in layer.mixer.norms.items())
    norms.append(Slice(f"{spec.prefix}{spec.final_norm}", spec.hidden_size))
    head = (Slice("lm_head", spec.vocab_size),)
    projections.append(ProjectionSpec("lm_head", -1, "embeddings", "linear", spec.hidden_size, head))
    return BaseLayout(
        spec.model_type,
        spec.num_layers,
        spec.layer_prefix,
        tuple(projections),
        experts=tuple(experts),
        fixed=tuple(fixed),
        norms=tuple(norms),
        splits=tuple(splits),
        ties_head=spec.tie_word_embeddings,
    )


def _slices(prefix: str, widths: Mapping[str, int]) -> tuple[Slice, ...]:
    return tuple(Slice(prefix + module, size) for module, size in widths.items())

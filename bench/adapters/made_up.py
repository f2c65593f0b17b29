"""Small adapters for the bundled model, each of another content, made without training."""

from __future__ import annotations

import json

import numpy as np

RANK = 2
_HIDDEN, _MODULES = 256, [f"model.layers.{layer}.self_attn.q_proj" for layer in (1, 3)]
_CONFIG = {"peft_type": "LORA", "r": RANK, "lora_alpha": 4, "target_modules": ["q_proj"]}

Files = list[tuple[str, tuple[str, bytes]]]


def adapter_files(seed: int) -> Files:
    """`files=` for httpx: an adapter of rank 2 on the q_proj of both attention layers; the same for the same seed."""
    generator = np.random.default_rng(seed)
    header, parts, offset = {}, [], 0
    for module in _MODULES:
        for side, shape in (("A", (RANK, _HIDDEN)), ("B", (_HIDDEN, RANK))):
            data = generator.normal(0, 0.01, shape).astype("<f4").tobytes()
            header[f"base_model.model.{module}.lora_{side}.weight"] = {
                "dtype": "F32",
                "shape": shape,
                "data_offsets": [offset, offset + len(data)],
            }
            parts.append(data)
            offset += len(data)
    text = json.dumps(header).encode()
    tensors = len(text).to_bytes(8, "little") + text + b"".join(parts)
    named = {"adapter_config.json": json.dumps(_CONFIG).encode(), "adapter_model.safetensors": tensors}
    return [("file", named_part) for named_part in named.items()]

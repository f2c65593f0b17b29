"""The files beside an adapter's config and tensors: used, ignored, or refused by name."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Literal

from adapters.errors import Malformed, Unsupported
from adapters.files.paths import CONFIG_FILE, MODEL_CONFIG_FILE, TEMPLATE_FILE, TENSOR_FILE
from adapters.files.safetensors_header import INDEX_NAME, SHARD_NAME

Role = Literal[
    "config",
    "model_config",
    "tensors",
    "shard",
    "index",
    "archive",
    "template",
    "named_template",
    "processor_template",
    "tokenizer_config",
    "special_tokens_map",
    "added_tokens",
    "tokenizer",
    "generation_config",
    "ignored",
]
# The files that an upload without its tokenizer leaves out.
TOKENIZER_ROLES: frozenset[Role] = frozenset({"tokenizer_config", "special_tokens_map", "added_tokens", "tokenizer"})
# Files that define how prompts are written and where answers end.
TEXT_ROLES: frozenset[Role] = TOKENIZER_ROLES | {"template", "processor_template", "generation_config"}
# Where transformers saves the chat templates beside the default one, each as NAME.jinja.
TEMPLATES_FOLDER = "additional_chat_templates"

# Most bytes of a file that are kept; for config files more is an error, of a tokenizer only its beginning matters.
KEPT_BYTES: dict[Role, int] = {
    "config": 1 << 20,
    "model_config": 1 << 20,
    "template": 1 << 20,
    "named_template": 1 << 20,
    "processor_template": 8 << 20,
    "index": 8 << 20,
    "tokenizer_config": 8 << 20,
    "special_tokens_map": 8 << 20,
    "generation_config": 1 << 20,
    "added_tokens": 8 << 20,
    "tokenizer": 8 << 20,
    "ignored": 0,
}
_BY_NAME: dict[str, Role] = {
    CONFIG_FILE: "config",
    MODEL_CONFIG_FILE: "model_config",
    TENSOR_FILE: "tensors",
    INDEX_NAME: "index",
    TEMPLATE_FILE: "template",
    "chat_template.json": "processor_template",
    "tokenizer_config.json": "tokenizer_config",
    "special_tokens_map.json": "special_tokens_map",
    "generation_config.json": "generation_config",
    "added_tokens.json": "added_tokens",
    "tokenizer.json": "tokenizer",
}
_BY_PART: dict[str, Role] = {
    "adapter_config": "config",
    "adapter_model": "tensors",
    "archive": "archive",
    "chat_template": "template",
}
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".npy", ".npz", ".joblib")
# Files of trainers, accelerate and DeepSpeed to resume training with: never opened.
_TRAINING_STATE = re.compile(
    r"(training_args|(optimizer|scheduler|sampler|scaler|rng_state|pytorch_model_fsdp)(_\d+)?)\.(bin|pt|pth)"
    r"|random_states_\d+\.pkl"
    r"|((bf16_|fp16_)?zero_pp_rank_\d+_)?mp_rank_\d+_(model|optim)_states\.pt"
)
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".gguf", ".onnx", ".h5", ".msgpack", ".ggml")
_ARCHIVES = (".tar.gz", ".tgz", ".zip")


def role_of(file_name: str) -> Role:
    """The role of a file in an adapter's directory. Raises Unsupported for pickles and for other weight files."""
    if template_name(file_name) is not None:
        return "named_template"
    name = PurePosixPath(file_name).name
    if _TRAINING_STATE.fullmatch(name):
        return "ignored"
    _refuse_pickle(name)
    if SHARD_NAME.fullmatch(name):
        return "shard"
    role = _BY_NAME.get(name)
    if role is not None:
        return role
    if name == "adapters.safetensors":
        raise Unsupported(
            "The file 'adapters.safetensors' holds an adapter of MLX (mlx_lm.lora), whose tensors have other names and "
            "are transposed; convert it to PEFT's form (docs/adapters.md)."
        )
    if name.lower().endswith(_WEIGHTS):
        raise Unsupported(f"The file {name[:200]!r} holds weights that are not applied; upload only {TENSOR_FILE}.")
    return "ignored"


def template_name(file_name: str) -> str | None:
    """NAME of a path that ends with TEMPLATES_FOLDER/NAME.jinja, None for any other."""
    path = PurePosixPath(file_name)
    return path.stem if path.parent.name == TEMPLATES_FOLDER and path.suffix == ".jinja" else None


def role_of_part(part_name: str, file_name: str | None) -> Role:
    """The role of an uploaded part, by its part name or else by its file name. Raises Unsupported, and Malformed for
    neither."""
    if template_name(file_name or "") is not None or template_name(part_name) is not None:
        return "named_template"
    name = PurePosixPath(file_name or part_name).name
    _refuse_pickle(name)
    if _BY_NAME.get(name) == "processor_template":
        return "processor_template"
    role = _BY_PART.get(part_name.removesuffix(".json").removesuffix(".safetensors"))
    if role == "tensors" and SHARD_NAME.fullmatch(name):
        return "shard"
    if role is not None:
        return role
    if name.lower().endswith(_ARCHIVES):
        return "archive"
    if SHARD_NAME.fullmatch(name):
        return "shard"
    if name.lower().endswith(".safetensors"):
        return "tensors"
    role = role_of(name)
    if role == "ignored":
        raise Malformed(
            f"The part {part_name[:100]!r} (file {name[:100]!r}) is not known; parts are adapter_config, "
            "adapter_model, archive and chat_template."
        )
    return role


def _refuse_pickle(name: str) -> None:
    if name == "adapter_model.bin":
        raise Unsupported(
            f"The file {name!r} is a pickle, which can run code; leave it out. Where it holds the only weights, and "
            f"you trust it, convert it first: {_CONVERT}"
        )
    if name.lower().endswith(_PICKLES):
        raise Unsupported(
            f"The file {name[:200]!r} is a pickle or in another format that can run code; upload {TENSOR_FILE} instead."
        )


# Run in the adapter's directory.
_CONVERT = (
    'python -c "import torch; from safetensors.torch import save_file; '
    "save_file({k: v.contiguous().clone() for k, v in "  # tensors that share memory, as tied weights do, are refused
    "torch.load('adapter_model.bin', map_location='cpu', weights_only=True).items()}, 'adapter_model.safetensors')\""
)

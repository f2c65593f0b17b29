"""The files beside an adapter's config and tensors: which are taken, which are left out, which are refused by name.

Also what the tokenizer files say: a chat template is kept, a changed vocabulary is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath
from typing import Any, Literal

from adapters.errors import Malformed, Unsupported
from adapters.format import parse_json_object, refuse_surrogates
from adapters.paths import CONFIG_FILE, TEMPLATE_FILE, TENSOR_FILE
from adapters.shards import INDEX_NAME, SHARD_NAME

Role = Literal[
    "config",
    "tensors",
    "shard",
    "index",
    "archive",
    "template",
    "tokenizer_config",
    "added_tokens",
    "tokenizer",
    "ignored",
]

# Most bytes of a file that are kept; for config files more is an error, of a tokenizer only its beginning matters.
KEPT_BYTES: dict[Role, int] = {
    "config": 1 << 20,
    "template": 1 << 20,
    "index": 8 << 20,
    "tokenizer_config": 8 << 20,
    "added_tokens": 8 << 20,
    "tokenizer": 8 << 20,
    "ignored": 0,
}
# Of a tokenizer.json: far more than models have, thousands, of a hundred characters or two each.
_MAX_ADDED_TOKENS, _MAX_ENTRY_CHARS = 1 << 14, 1 << 13
_ADDED_TOKENS = re.compile(r'"added_tokens"\s*:\s*\[')
_SPACE = re.compile(r"[ \t\n\r]*")
_BY_NAME: dict[str, Role] = {
    CONFIG_FILE: "config",
    TENSOR_FILE: "tensors",
    INDEX_NAME: "index",
    TEMPLATE_FILE: "template",
    "tokenizer_config.json": "tokenizer_config",
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
# What trainers leave beside an adapter to go on with, by themselves, by accelerate and by DeepSpeed: never opened.
_TRAINING_STATE = re.compile(
    r"(training_args|(optimizer|scheduler|sampler|scaler|rng_state|pytorch_model_fsdp)(_\d+)?)\.(bin|pt|pth)"
    r"|random_states_\d+\.pkl"
    r"|((bf16_|fp16_)?zero_pp_rank_\d+_)?mp_rank_\d+_(model|optim)_states\.pt"
)
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".gguf", ".onnx", ".h5", ".msgpack", ".ggml")
_ARCHIVES = (".tar.gz", ".tgz", ".zip")


def role_of(file_name: str) -> Role:
    """What a file of an adapter's directory is for. Raises Unsupported for pickles and for other weight files."""
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


def role_of_part(part_name: str, file_name: str | None) -> Role:
    """What an uploaded part is for: by its part name, or else by its file name. Raises Unsupported, and Malformed for
    what is neither."""
    name = PurePosixPath(file_name or part_name).name
    _refuse_pickle(name)
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


def chat_template(template: bytes | None, tokenizer_config: bytes | None) -> str | None:
    """The adapter's own chat template: the file, or else what tokenizer_config.json holds. Raises Malformed."""
    if template is not None:
        try:
            return template.decode("utf-8")
        except UnicodeDecodeError:
            raise Malformed(f"{TEMPLATE_FILE} is not UTF-8 text.") from None
    if tokenizer_config is None:
        return None
    found = parse_json_object(tokenizer_config, "tokenizer_config.json").get("chat_template")
    if isinstance(found, list):  # several named templates: the default one
        found = next((e.get("template") for e in found if isinstance(e, dict) and e.get("name") == "default"), None)
    if not isinstance(found, str | None):
        raise Malformed("tokenizer_config.json: chat_template must be text or a list of named templates.")
    return found


def check_vocabulary(
    added_tokens: bytes | None,
    tokenizer_config: bytes | None,
    tokenizer: bytes | None,
    vocab_size: int | None,
    base_token_id: Callable[[str], int | None] | None,
) -> None:
    """Refuse an adapter whose tokenizer has tokens that the base's has not: its prompts would be read differently.

    Raises Unsupported, or Malformed for files that cannot be read.
    """
    tokens: dict[str, Any] = {}
    if added_tokens is not None:
        tokens |= parse_json_object(added_tokens, "added_tokens.json")
    if tokenizer_config is not None:
        decoder = parse_json_object(tokenizer_config, "tokenizer_config.json").get("added_tokens_decoder") or {}
        entries = decoder.items() if isinstance(decoder, dict) else ()
        tokens |= {e["content"]: int(i) for i, e in entries if i.isdecimal() and len(i) < 12 and _has_content(e)}
    if tokenizer is not None:
        tokens |= {e["content"]: e.get("id") for e in _added_in(tokenizer) if _has_content(e)}
    for token, token_id in tokens.items():
        outside = not isinstance(token_id, int) or (vocab_size is not None and token_id >= vocab_size)
        if outside or (base_token_id is not None and base_token_id(token) != token_id):
            raise Unsupported(
                f"The adapter's tokenizer adds the token {token[:100]!r}, which the base model's does not have; an "
                "adapter that changes the vocabulary is not supported."
            )


def _has_content(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("content"), str)


def _added_in(tokenizer: bytes) -> list[Any]:
    """The list "added_tokens" of a tokenizer.json, which stands at its beginning."""
    text = tokenizer.decode("utf-8", errors="replace")
    begin = _ADDED_TOKENS.search(text)
    if begin is None:
        return []
    try:
        found = list(_entries(text, begin.end()))
        refuse_surrogates(found)
    except (ValueError, RecursionError) as error:
        reason = error if isinstance(error, Malformed) else "its list of added tokens is broken."
        raise Malformed(f"tokenizer.json cannot be read: {reason}") from None
    return found


def _entries(text: str, at: int) -> Iterator[Any]:
    """Of a JSON list whose bracket stands before `at`, each parsed by itself, so that whatever they are other threads
    have their turns. ValueError for what is no such list, or has too many or too long ones."""
    decoder = json.JSONDecoder()
    at = _behind_space(text, at)
    if text[at : at + 1] == "]":
        return
    for _ in range(_MAX_ADDED_TOKENS):
        entry, length = decoder.raw_decode(text[at : at + _MAX_ENTRY_CHARS])
        yield entry
        at = _behind_space(text, at + length)
        mark = text[at : at + 1]
        if mark == "]":
            return
        if mark != ",":
            break
        at = _behind_space(text, at + 1)
    else:
        raise Malformed(f"it has more than {_MAX_ADDED_TOKENS} added tokens.")
    raise ValueError("no comma and no end")


def _behind_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found is not None, "it may be empty"
    return found.end()

"""A GGUF file as a model directory: config.json, tokenizer and template beside a link to the file. Torch-free.

The weights stay in the file. What the metadata cannot say exactly is refused by name.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from adapters.files.durable_files import whole_directory
from adapters.files.git_lfs import is_lfs_pointer
from service.models.families import PRE_TOKENIZERS, config_of_gguf
from service.models.gguf_file import CONTROL_TOKEN, LINK, USER_TOKEN, GgufFile, parts_of, read_gguf
from service.models.spec.config_json import ModelError


def model_directory(path: Path, root: Path) -> Path:
    """The model directory of the GGUF file at `path`, written below `root` unless it is there; a directory as it is.
    Raises ModelError."""
    if not path.is_file():
        _refuse_gguf_files(path)
        return path
    parts = parts_of(path.absolute())
    for part in parts:
        if part.is_file() and is_lfs_pointer(part):
            raise ModelError(f"{part} is a Git LFS pointer and not the file: run `git lfs pull`, or `hf download`")
    file = read_gguf(parts[0])
    try:
        texts: dict[str, Any] = {"config.json": config_of_gguf(file), **_tokenizer(file)}
    except ModelError:
        raise
    except (ValueError, TypeError, AttributeError, IndexError) as error:  # such as a list for a number
        raise ModelError(f"the metadata of {path} has a value of another kind: {error}: convert it anew") from error
    template = file.facts.get("tokenizer.chat_template")
    # By what is written, too: another version of this server may write other files.
    stats = [(str(part), part.stat().st_size, part.stat().st_mtime_ns) for part in parts]
    source = json.dumps([stats, texts, str(template)])
    directory = root / hashlib.sha256(source.encode()).hexdigest()[:16] / parts[0].stem
    if directory.is_dir():
        return directory
    with suppress(FileExistsError), whole_directory(directory) as written:  # another process may be first
        for name, content in texts.items():
            (written / name).write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        if isinstance(template, str):
            (written / "chat_template.jinja").write_text(template, encoding="utf-8")
        (written / LINK).symlink_to(parts[0])
    return directory


def _refuse_gguf_files(directory: Path) -> None:
    """Raises ModelError for a directory whose weights are GGUF files, which may have a config.json beside them."""
    files = sorted(directory.glob("*.gguf"))
    is_written = files == [directory / LINK] and (directory / "config.json").exists()
    if files and not is_written and not any(directory.glob("*.safetensors*")):
        raise ModelError(f"{directory} has GGUF files and no safetensors: name one of them, such as {files[0]}")


def _tokenizer(file: GgufFile) -> dict[str, Any]:
    """tokenizer.json and tokenizer_config.json."""
    kind, cut = file.fact("tokenizer.ggml.model"), file.facts.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2" or cut not in PRE_TOKENIZERS:
        raise ModelError(
            f"the GGUF file's tokenizer is {kind!r} with the pre-tokenizer {cut!r}; served are gpt2 with "
            f"{', '.join(PRE_TOKENIZERS)}: give the model's Hugging Face directory"
        )
    texts, kinds = file.fact("tokenizer.ggml.tokens"), file.fact("tokenizer.ggml.token_type")
    merges = [merge.split(" ", 1) for merge in file.fact("tokenizer.ggml.merges")]
    added = [
        {
            "id": at,
            "content": text,
            "special": token == CONTROL_TOKEN,
            **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
        }
        for at, (text, token) in enumerate(zip(texts, kinds, strict=True))
        if token in (CONTROL_TOKEN, USER_TOKEN)
    ]
    pre, bytes_ = PRE_TOKENIZERS[cut], {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    first = {"type": "Digits", "individual_digits": True}
    if pre.pattern is not None:
        first = {"type": "Split", "pattern": {"Regex": pre.pattern}, "behavior": "Isolated", "invert": False}
    bpe: dict[str, Any] = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None}
    bpe |= {"end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False}
    bpe |= {"ignore_merges": pre.ignores_merges, "vocab": {text: at for at, text in enumerate(texts)}}
    ids = {name: file.facts.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "padding", "unknown")}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None if pre.normalizer is None else {"type": pre.normalizer},
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [first, {**bytes_, "use_regex": pre.pattern is None}],
        },
        "post_processor": _post_processor(file, texts, adds_bos=pre.adds_bos) or {**bytes_, "use_regex": True},
        "decoder": {**bytes_, "use_regex": True},
        "model": {**bpe, "merges": merges},
    }
    names = {"bos": "bos", "eos": "eos", "padding": "pad", "unknown": "unk"}
    config = {f"{names[name]}_token": texts[at] for name, at in ids.items() if at is not None and at < len(texts)}
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": config}


def _post_processor(file: GgufFile, texts: list[str], *, adds_bos: bool) -> dict[str, Any] | None:
    """Puts the tokens that every text has before and behind it; None where there are none.

    adds_bos  where the file does not say
    """
    special: dict[str, Any] = {}
    around: dict[str, list[Any]] = {"bos": [], "eos": []}
    for name, is_added in (("bos", adds_bos), ("eos", False)):
        at = file.facts.get(f"tokenizer.ggml.{name}_token_id")
        if file.facts.get(f"tokenizer.ggml.add_{name}_token", is_added) and at is not None:
            special[texts[at]] = {"id": texts[at], "ids": [at], "tokens": [texts[at]]}
            around[name] = [{"SpecialToken": {"id": texts[at], "type_id": 0}}]
    first, second = ({"Sequence": {"id": name, "type_id": kind}} for name, kind in (("A", 0), ("B", 1)))
    single, pair = ([*around["bos"], *texts_, *around["eos"]] for texts_ in ([first], [first, second]))
    template = {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}
    return template if special else None

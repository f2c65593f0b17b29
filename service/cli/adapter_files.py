"""The files of an adapter on this machine that an upload of it has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

from service.cli.client import ClientError

# Said here again, since the store's modules take 0.1 s to import; a test compares them.
CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_SHARDS, _INDEX = "adapter_model-*-of-*.safetensors", "adapter_model.safetensors.index.json"
# The file of older versions of PEFT: a pickle, whose reading can run code; `weights_only` keeps to tensors.
_PICKLE = "adapter_model.bin"
_MLX = "adapters.safetensors"
_CONVERT = """\
import sys, torch
from safetensors.torch import save_file
tensors = torch.load(sys.argv[1], map_location="cpu", weights_only=True)
save_file({name: one.clone().contiguous() for name, one in tensors.items()}, sys.argv[2])
"""
# Other files that the server reads: chat templates, end tokens, tokens that the base has not.
_BESIDE = (
    *("chat_template.jinja", "chat_template.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "tokenizer.json", "generation_config.json"),
)
_TEMPLATES = "additional_chat_templates"
_ARCHIVES = (".tar.gz", ".tgz", ".zip")


@contextmanager
def adapter_files(path: Path) -> Iterator[list[tuple[str, str, BinaryIO]]]:
    """Part name, file name and open file of each file of a PEFT directory, or of an archive of one. ClientError for
    another path, and for files that cannot be read."""
    with _readable(path), ExitStack() as opened:
        files = _files_of(path).items()
        yield [(part, sendable(file), opened.enter_context(file.open("rb"))) for part, file in files]


def sendable(path: Path) -> str:
    """The name of a file, with `?` for what is not UTF-8: the server then says which names there are."""
    return path.name.encode(errors="replace").decode()


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn what the operating system says of the files below `path` into ClientError."""
    try:
        yield
    except OSError as error:
        raise ClientError(f"{error.filename or path} cannot be read: {error.strerror or error}.") from error


def _files_of(path: Path) -> dict[str, Path]:
    """Part name to file. ClientError if the path is neither a PEFT directory nor an archive."""
    if path.is_file() and path.name.endswith(_ARCHIVES):
        return {"archive": path}
    if not path.exists():
        raise ClientError(f"There is no {path} on this machine.")
    if not path.is_dir():
        raise ClientError(f"{path} is neither a directory nor an archive ({', '.join(_ARCHIVES)}).")
    if (path / _PICKLE).is_file() and not (path / TENSORS).is_file():
        import shlex

        command = shlex.join(["python", "-c", _CONVERT, str(path / _PICKLE), str(path / TENSORS)])
        raise ClientError(
            f"{path} has its weights in {_PICKLE}, a pickle, which no server takes; make {TENSORS} of it, where torch "
            f"and safetensors are installed, and upload again:\n{command}"
        )
    if (path / _MLX).is_file() and not (path / TENSORS).is_file():
        raise ClientError(
            f"{path} has its weights in {_MLX}: an adapter of MLX (mlx_lm.lora), whose tensors have other names and "
            f"are transposed; convert it to PEFT's form, {TENSORS} (docs/adapters.md)."
        )
    shards = sorted(file.name for file in path.glob(_SHARDS)) if not (path / TENSORS).is_file() else []
    weights = [*shards, _INDEX] if shards else [TENSORS]
    missing = [name for name in (CONFIG, *weights) if name != _INDEX and not (path / name).is_file()]
    if missing:
        # Checkpoints of a trainer, and snapshots of a repository in Hugging Face's cache.
        below = [str(found.parent) for pattern in ("*", "snapshots/*") for found in path.glob(f"{pattern}/{CONFIG}")]
        others = f"one of those below it: {', '.join(sorted(below)[:5])}"
        advice = others if below else "a directory that PEFT's save_pretrained wrote"
        raise ClientError(f"{path} has no {' and no '.join(missing)}; give {advice}.")
    templates = sorted(f"{_TEMPLATES}/{file.name}" for file in (path / _TEMPLATES).glob("*.jinja"))
    # The tensors last: the server hashes them as they come, once it has what the digest covers besides.
    return {name: path / name for name in (CONFIG, *_BESIDE, *templates, *weights) if (path / name).is_file()}

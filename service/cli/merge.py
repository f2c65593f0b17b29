"""`multilora merge`: an adapter into its base's directory, for servers that take no adapters."""

from __future__ import annotations

import argparse
from pathlib import Path

from adapters.errors import AdapterError
from adapters.files.durable_files import whole_directory
from service.cli.client import ClientError


def merge(arguments: argparse.Namespace) -> int:
    """Write the directory, whole or not at all."""
    from service.models.merging import merge as merge_into
    from service.models.spec.config_json import ModelError

    base: Path = arguments.base
    adapter: Path = arguments.adapter
    for path, file in ((base, "config.json"), (adapter, "adapter_config.json")):
        if not (path / file).is_file():
            raise ClientError(f"{path} has no {file}; give the directory that holds it.")
    try:
        with whole_directory(arguments.out) as directory:
            scratch = directory.parent / "adapter"
            merged = merge_into(base, adapter, directory, scratch, dequantise=arguments.dequantise)
    except FileExistsError as error:
        raise ClientError(f"{arguments.out} is there already; give another directory.") from error
    except (AdapterError, ModelError) as error:
        problems = "".join(f"\n  {name}: {reason}" for name, reason in getattr(error, "problems", ()))
        raise ClientError(f"{error}{problems}") from error
    except OSError as error:
        raise ClientError(f"{error.filename or arguments.out}: {error.strerror or error}.") from error
    print(f"{arguments.out} is {base} with {adapter}: {merged.num_changed} tensors changed")
    if merged.is_untied:
        print("  The head is no longer the embedding; config.json says so (tie_word_embeddings).")
    for note in merged.notes:
        print(f"  {note}")
    return 0

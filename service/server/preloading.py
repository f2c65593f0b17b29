"""Preloading: the operator's directory of adapters goes into the store at the start."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import adapters.errors as store_errors
from adapters.files.name_versions import Change
from adapters.files.paths import CONFIG_FILE, join
from service.api.state import Services
from service.logs import LOGGER, audit
from service.start_check import StartError


def preload(services: Services) -> None:
    """Put the operator's adapters into the store under the names of `_adapters_in`. A name that clients have given to
    other content since is left as it is, and a full disk ends no start: the server is what one deletes adapters with.
    Raises StartError."""
    directory, store = services.settings.preload_dir, services.store
    if directory is None or store is None:
        return
    if not directory.is_dir():
        raise StartError(f"--preload-adapters-dir {directory} is not a directory.")
    for name, path in sorted(_adapters_in(directory)):
        try:
            with store.begin() as upload:
                upload.add_directory(path, _links_below(path.resolve(), directory))
                record, created = upload.finish(join("", name), Change(by="preload", root=str(path)))
                if created:
                    audit("preload", adapter=name, version=record.version.number, digest=record.digest)
        except store_errors.Conflict as error:
            LOGGER.warning("Not preloaded: %s", error)
            continue
        except store_errors.StorageFull as error:
            LOGGER.warning(
                "Not preloaded: the adapter %r; what the store holds of that name is left as it is. %s The floor is "
                "--min-free-disk-bytes (MULTILORA_MIN_FREE_DISK_BYTES).",
                name,
                error,
            )
            continue
        except store_errors.AdapterError as error:
            raise StartError(f"The adapter {name!r} in {directory} cannot be loaded: {error}") from error
        services.metrics.by_adapter.know(record.name)
        LOGGER.info("adapter %s %s", name, "preloaded" if created else "is there already")


def _links_below(path: Path, directory: Path) -> Path:
    """Where links of the files in `path` may lead: of a snapshot in Hugging Face's cache to all of its repository."""
    return path.parents[1] if path.parent.name == "snapshots" else directory


def _adapters_in(directory: Path) -> Iterator[tuple[str, Path]]:
    """Name and path of each adapter there: a folder, or one in a folder that is none, which is called `org/name`."""
    for path in directory.iterdir():
        if _is_adapter(path):
            yield path.name, path
        elif path.is_dir() and not path.name.startswith(".") and os.access(path, os.R_OK | os.X_OK):
            yield from ((f"{path.name}/{one.name}", one) for one in path.iterdir() if _is_adapter(one))


def _is_adapter(path: Path) -> bool:
    """By the file, or a link that leads nowhere; False also where this user may not look, as in lost+found."""
    config = path / CONFIG_FILE
    return os.path.isfile(config) or os.path.islink(config)

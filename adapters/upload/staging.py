"""An upload's staging directory: parts are written below the store's staging directory, within limits, then checked."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Generator, Sequence
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple

from adapters.errors import Malformed, Unsupported
from adapters.files.durable_files import store_faults_are_ours
from adapters.files.git_lfs import is_lfs_pointer
from adapters.files.memory_files import MemoryFiles
from adapters.files.paths import CONFIG_FILE, TENSOR_FILE
from adapters.files.safetensors_header import join_shards, parse_json_object, printable
from adapters.peft.bound_tensors import Binding
from adapters.peft.canonical_file import Scan
from adapters.peft.config import parse_config
from adapters.text.side_files import (
    TEMPLATES_FOLDER,
    TOKENIZER_ROLES,
    Role,
    role_of,
    role_of_part,
    template_name,
)
from adapters.upload.archives import adapter_folders, unpack
from adapters.upload.staging_bytes import Budget, HeldBytes, StoreLimits, UploadPart

COPY_BYTES = 1 << 18
# Transformers' trainer calls its checkpoints so. What their configurations say matters if they are the adapter.
_CHECKPOINT = re.compile(r"checkpoint-\d+")


class Followed(NamedTuple):
    """The tensors of an upload as they were bound and read while they came; the file has `num_bytes`."""

    binding: Binding
    scan: Scan
    num_bytes: int


# Makes the steps of `UploadPart.follow`, of the file of tensors at a path and what flushes it.
Follow = Callable[["Staging", Path, Callable[[], None]], Generator[None, bytes | memoryview, None]]


class Staging:
    """The files of one upload, by role, in a directory of their own.

    follow    makes steps (see `UploadPart.follow`) for the tensors' file of parts
    followed  what these steps found, once they are through
    memory    where the tensors of an ephemeral version go; None: to the disk
    """

    def __init__(
        self,
        directory: Path,
        limits: StoreLimits,
        held: HeldBytes | None = None,
        follow: Follow | None = None,
        memory: MemoryFiles | None = None,
    ) -> None:
        directory.mkdir()
        self._memory = memory
        self.directory = directory
        self.limits = limits
        self._held = held or HeldBytes(None, "")
        self.budget = Budget(directory, limits, self._held)
        self.files: dict[Role, Path] = {}
        self.named_templates: dict[str, Path] = {}
        self.left_out: list[str] = []  # sentences
        self.followed: Followed | None = None
        self._follow = follow
        self.without_tokenizer = False  # whether files of the tokenizer are left out
        self.expert_b_order: str | None = None  # what the configuration is to say of it
        self._shards: dict[str, Path] = {}

    def open(self, role: Role, shown_name: str) -> UploadPart:
        """Raises Malformed when the role is taken, TooLarge for too many files."""
        self.budget.count_file()
        if self._leaves_out(role):
            self._ignore(shown_name, role=role)
            return UploadPart(None, "ignored", self.budget)
        several: dict[Role, int] = {"shard": len(self._shards), "named_template": len(self.named_templates)}
        path = self.directory / (f"part-{role}-{several[role]}" if role in several else f"part-{role}")
        self._assign(role, path, shown_name)
        if role == "tensors":
            self.place(path)
        return UploadPart(path, role, self.budget)

    def _leaves_out(self, role: Role) -> bool:
        return role == "ignored" or (self.without_tokenizer and role in TOKENIZER_ROLES)

    def _ignore(self, shown_name: str, kind: str = "file", role: Role = "ignored") -> None:
        name = printable(shown_name[:200])
        if role in TOKENIZER_ROLES:
            self.left_out.append(f"The file {name} was left out as asked, with whatever it says.")
        else:
            self.left_out.append(f"The {kind} {name} is not needed and was left out.")

    def _assign(self, role: Role, path: Path, shown_name: str) -> None:
        if role == "shard" and (name := PurePosixPath(shown_name).name) not in self._shards:
            self._shards[name] = path
            return
        template = template_name(shown_name) if role == "named_template" else None
        if template is not None and template not in self.named_templates:
            self.named_templates[template] = path
            return
        if role in self.files or role in ("shard", "named_template"):
            raise Malformed(
                f"The upload holds two files for the same purpose ({role}), the second {shown_name[:200]!r}."
            )
        self.files[role] = path

    def open_part(self, part_name: str, file_name: str | None) -> UploadPart:
        role = role_of_part(part_name, file_name)
        if role == "named_template" and template_name(part_name) is not None:
            return self.open(role, part_name)
        part = self.open(role, file_name or part_name)
        if part.role == "tensors" and self._follow is not None:
            part.follow(self._follow(self, self.files["tensors"], part.flush))
        return part

    def add_directory(self, directory: Path, links_below: Path | None = None) -> None:
        """Copy the files of a PEFT directory that have a role, named templates in their folder among them; what else is
        there is left out. Links may lead to files below `links_below` and below the directory itself, both resolved.
        Raises Malformed, Unsupported, and what the role's limits raise."""
        try:
            entries = sorted(directory.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            raise Malformed("There is no such adapter directory.") from None
        if not (directory / CONFIG_FILE).exists() and (directory / "snapshots").is_dir():
            raise Malformed(
                "The directory is a repository in Hugging Face's cache; name the one below its snapshots that holds "
                f"{CONFIG_FILE}."
            )
        allowed = [directory.resolve(), *([] if links_below is None else [links_below.resolve()])]
        self._add_files(entries, allowed)

    def _add_files(self, entries: Sequence[Path], allowed: Sequence[Path], folder: str = "") -> None:
        for entry in entries:
            if entry.is_dir():
                if entry.name == TEMPLATES_FOLDER and not folder and not entry.is_symlink():
                    self._add_files(sorted(entry.iterdir()), allowed, f"{TEMPLATES_FOLDER}/")
                else:
                    self._ignore(folder + entry.name, "folder")
                continue
            role = role_of(folder + entry.name)
            if role == "ignored" or (folder and role != "named_template"):
                with self.open("ignored", folder + entry.name):
                    continue
            with _open_plain(entry, allowed) as source, self.open(role, folder + entry.name) as part:
                _copy(source, part.write)

    def unpack_archive(self) -> None:
        """Replace an uploaded archive by its files. Raises what `unpack` raises."""
        archive = self.files.pop("archive", None)
        if archive is None:
            return
        if self.files or self._shards or self.named_templates:
            raise Malformed("The upload holds an archive and single files; send either.")
        inner = Budget(self.directory, self.limits, self._held)
        members: list[tuple[PurePosixPath, Role, Path | None]] = []

        def sink(path: PurePosixPath, data: IO[bytes]) -> None:
            role = role_of(str(path))
            target = None if self._leaves_out(role) else self.directory / f"member-{len(members)}"
            members.append((path, role, target))
            with UploadPart(target, role if target is not None else "ignored", inner) as part:
                _copy(data, part.write)
            if role == "config" and target is not None and not _CHECKPOINT.fullmatch(path.parent.name):
                _check_member(path, target)  # refused before gigabytes are unpacked, if it comes before them

        unpack(archive, sink, max_files=self.limits.max_files, max_bytes=self.limits.max_upload_bytes)
        archive.unlink()
        root, below = adapter_folders([path for path, _, _ in members])
        for path, role, target in members:
            if any(path.is_relative_to(folder) for folder in below):
                continue
            folder = root / TEMPLATES_FOLDER if role == "named_template" else root
            if target is None or path.parent != folder:
                self._leave_out(path, role)
            else:
                self._assign(role, target, str(path))
        for folder in below:
            if not any(folder != other and folder.is_relative_to(other) for other in below):
                self._ignore(str(folder), "folder")

    def _leave_out(self, path: PurePosixPath, role: Role) -> None:
        if role in ("tensors", "shard"):
            raise Malformed(f"The archive holds tensors apart from their {CONFIG_FILE}: {str(path)[:200]!r}.")
        self._ignore(str(path), role=role if self._leaves_out(role) else "ignored")

    def check_config(self) -> None:
        """Raises what `parse_config` raises, if a configuration is there, written and closed."""
        config = self.read("config")
        if config is not None:
            parse_config(config)

    def read_named_templates(self) -> dict[str, bytes]:
        """By name. Raises Malformed for what is none."""
        for name, path in self.named_templates.items():
            _refuse_lfs_pointer(path, f"chat template {name}")
        return {name: path.read_bytes() for name, path in self.named_templates.items()}

    def read(self, role: Role) -> bytes | None:
        path = self.files.get(role)
        if path is None:
            return None
        _refuse_lfs_pointer(path, role)
        if role == "config" and self.expert_b_order is not None:
            return _with_expert_order(path.read_bytes(), self.expert_b_order)
        return path.read_bytes()

    def require(self) -> tuple[bytes, Path]:
        """The config's text and the tensor file's path, shards put together. Raises Malformed naming what is missing,
        and what `join_shards` raises."""
        self._join_shards()
        config, tensors = self.read("config"), self.files.get("tensors")
        if config is None or tensors is None:
            missing = CONFIG_FILE if config is None else TENSOR_FILE
            raise Malformed(f"The upload has no {missing}; send both {CONFIG_FILE} and {TENSOR_FILE}.")
        _refuse_lfs_pointer(tensors, "tensors")
        return config, tensors

    def _join_shards(self) -> None:
        if not self._shards:
            return
        if "tensors" in self.files:
            raise Malformed(f"The upload holds {TENSOR_FILE} and shards of it; send either.")
        for name, path in self._shards.items():
            _refuse_lfs_pointer(path, name)
        target = self.directory / "part-tensors"
        self.reserve(sum(path.stat().st_size for path in self._shards.values()))
        with store_faults_are_ours():
            join_shards(self._shards, self.read("index"), target)
        self.files["tensors"] = target
        self._shards = {}

    def reserve(self, num_bytes: int) -> None:
        """Reserve bytes to be written beside the parts, on the disk. Raises StorageFull, StagingFull."""
        self._held.take(num_bytes)
        self.budget.check_disk(num_bytes)

    @property
    def is_ephemeral(self) -> bool:
        """Whether the tensors are to be in memory alone."""
        return self._memory is not None

    def reserve_tensors(self, num_bytes: int) -> None:
        """The same for tensors that lie where `place` puts them."""
        if self.is_ephemeral:
            self._held.take(num_bytes)
        else:
            self.reserve(num_bytes)

    def place(self, path: Path) -> None:
        """Make the file of tensors at this path one in memory, if they are to be there."""
        if self._memory is not None:
            self._memory.create(path, self._held.owner, self._held.keep)

    def remove(self) -> None:
        if self._memory is not None:
            self._memory.close_below(self.directory)
            shutil.rmtree(self.directory, ignore_errors=True)
            self._memory.settle(self._held.keep)
            return
        shutil.rmtree(self.directory, ignore_errors=True)
        self._held.keep(0)


def _check_member(path: PurePosixPath, config: Path) -> None:
    """Raises what `parse_config` raises for an archive's configuration; it says which one it is where there may be
    others."""
    try:
        _refuse_lfs_pointer(config, "config")
        parse_config(config.read_bytes())
    except (Malformed, Unsupported) as error:
        if not path.parent.parts:
            raise
        shown = printable(str(path)[:200])
        raise type(error)(
            f"{error} That is the archive's {shown!r}; if it is not the adapter that you want, pack without its folder."
        ) from None


def _with_expert_order(text: bytes, order: str) -> bytes:
    """adapter_config.json that says in which order lora_B of experts is. Raises Malformed where it says another."""
    fields = parse_json_object(text, CONFIG_FILE)
    if (given := fields.get("lora_B_layout")) not in (None, order):
        raise Malformed(
            f"{CONFIG_FILE}: lora_B_layout is {printable(str(given)[:100])!r}, and expert_b_order {order!r}; send one "
            "of them, or both alike."
        )
    return json.dumps({**fields, "lora_B_layout": order}).encode()


def _refuse_lfs_pointer(path: Path, what: str) -> None:
    """Raises Malformed for what `git clone` leaves where Git LFS is not installed."""
    if is_lfs_pointer(path):
        raise Malformed(
            f"The file for the {printable(what[:200]).replace('_', ' ')} is a Git LFS pointer and not the file: "
            "run `git lfs pull` where it was cloned, or `hf download`, and upload what that brings."
        )


def _open_plain(entry: Path, allowed: Sequence[Path]) -> IO[bytes]:
    """The file, or the one that a link leads to. Raises Malformed for a link to nothing, Unsupported for one that leads
    elsewhere and for what is no file, OSError with the entry's name."""
    shown = printable(entry.name[:200])
    try:
        path = entry.resolve()
        exists, is_file = path.exists(), path.is_file()
    except RuntimeError:  # links in a circle
        path, exists, is_file = entry, False, False
    if exists and not any(path.is_relative_to(one) for one in allowed):
        raise Unsupported(
            f"The file {shown!r} is a link that leads out of the directory; copy the adapter with its links followed "
            "(cp -rL), and load the copy."
        )
    if not exists:
        raise Malformed(f"The file {shown!r} is a link to a file that is not there; download the adapter again.")
    if not is_file:
        raise Unsupported(f"The file {shown!r} is a device; only plain files are read.")
    try:
        return path.open("rb")
    except OSError as error:
        error.filename = str(entry)
        raise


def _copy(source: IO[bytes], write: Callable[[bytes], int]) -> None:
    while chunk := source.read(COPY_BYTES):
        write(chunk)

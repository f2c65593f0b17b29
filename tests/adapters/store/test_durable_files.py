"""Directories that become whole by one rename, whoever else makes them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from adapters.files.durable_files import whole_directory


@pytest.mark.parametrize("is_seen", [True, False], ids=["before the rename", "by the rename"])
def test_a_directory_that_another_process_made_first_stays(
    is_seen: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "target"

    def make() -> None:
        with whole_directory(target) as new:
            (new / "file").write_text("mine")
            target.mkdir()
            (target / "file").write_text("theirs")
            if not is_seen:  # it came between the last look and the rename
                monkeypatch.setattr(os.path, "lexists", lambda _path: False)

    with pytest.raises(FileExistsError):
        make()
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["target"]
    assert (target / "file").read_text() == "theirs"


def test_files_that_links_lead_to_are_not_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link may lead to a model of gigabytes that was just downloaded."""
    (tmp_path / "model").write_text("large")
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    with whole_directory(tmp_path / "target") as new:
        (new / "file").write_text("small")
        (new / "link").symlink_to(tmp_path / "model")
    assert {Path(path).name for path in synced} == {"file", "new", tmp_path.name}

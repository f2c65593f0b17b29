"""Numbers of deleted names are kept, in little room, and those of many together."""

from __future__ import annotations

import errno
from pathlib import Path

import msgspec
import pytest

from adapters.files.name_versions import NameRecord, Version
from adapters.files.tombstones import Tombstones


def retire(retired: Tombstones, directory: Path, name: str, number: int) -> None:
    path = directory / name
    path.write_bytes(msgspec.json.encode(NameRecord((Version(number, "0" * 64, 0.0),))))
    retired.move_in(path)
    assert not path.exists()


def test_of_many_names_the_older_ones_leave_the_largest_number(tmp_path: Path) -> None:
    retired = Tombstones(tmp_path / "retired", max_files=3)
    assert retired.first_number("a") == 1
    for name, number in (("a", 7), ("b", 2), ("c", 1)):
        retire(retired, tmp_path, name, number)
    assert [retired.first_number(name) for name in "abcd"] == [8, 3, 2, 1]
    retire(retired, tmp_path, "d", 9)
    assert sorted(path.name for path in (tmp_path / "retired").iterdir()) == [".floor", "c", "d"]
    for reopened in (retired, Tombstones(tmp_path / "retired")):
        assert [reopened.first_number(name) for name in "abcde"] == [8, 8, 8, 10, 8]


def test_a_name_that_is_deleted_again_keeps_its_newest_number(tmp_path: Path) -> None:
    retired = Tombstones(tmp_path / "retired")
    for number in (3, 5):
        retire(retired, tmp_path, "a", number)
    assert retired.first_number("a") == 6


def test_what_cannot_be_kept_is_deleted_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    retired = Tombstones(tmp_path / "retired")

    def refuse(_path: Path, _target: Path) -> None:
        raise OSError(errno.ENOSPC, "no room for another entry")

    monkeypatch.setattr(Path, "rename", refuse)
    retire(retired, tmp_path, "a", 3)
    assert retired.first_number("a") == 1
    retired.move_in(tmp_path / "not there")


@pytest.mark.parametrize("name", ["a", ".floor"])
def test_a_damaged_file_is_named_and_refuses_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    retired = Tombstones(tmp_path / "retired")
    (tmp_path / "retired" / name).write_bytes(b"\xff")
    assert retired.first_number("a") == 1
    assert f"retired/{name} is ignored" in caplog.text

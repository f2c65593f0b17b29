"""Tensors are stored in one form, which what PEFT saves has already, and on disk before anybody is told of them."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from adapters.errors import Malformed, StoreUnreachable, TooLarge
from adapters.store.store import AdapterStore, StoreLimits
from tests.support.adapter_files import config_bytes, lora_tensors, modules_ending, small_layout, upload_bytes

LAYOUT = small_layout()
TENSORS = lora_tensors(LAYOUT, modules_ending(LAYOUT, "q_proj"), 64)
CONFIG = config_bytes(r=64)
# As PEFT saves them: by this library, which sorts them by name.
SAVED = save(TENSORS, {"format": "pt"})


@pytest.fixture
def store(tmp_path: Path) -> Iterator[AdapterStore]:
    """One payer may hold half as much again as the tensors until they are stored."""
    limits = StoreLimits(free_disk_floor_bytes=0, max_staging_bytes=3 * len(SAVED))
    opened = AdapterStore(tmp_path / "store", LAYOUT, limits, base_name="base")
    yield opened
    opened.close()


def stored(store: AdapterStore, digest: str) -> Path:
    return store.path_of(digest) / "adapter_model.safetensors"


def test_what_peft_saves_is_stored_as_it_came_without_a_copy(store: AdapterStore) -> None:
    record, _ = upload_bytes(store, "mine", CONFIG, SAVED)
    assert stored(store, record.digest).read_bytes() == SAVED


@pytest.mark.parametrize(
    "content",
    [
        save(TENSORS, {"format": "pt", "by": "someone"}),
        save(TENSORS),
        save({name.replace(".weight", ".default.weight"): data for name, data in TENSORS.items()}, {"format": "pt"}),
    ],
    ids=["other metadata", "no metadata", "other names"],
)
def test_what_has_another_form_is_written_anew_and_paid_for(
    store: AdapterStore, tmp_path: Path, content: bytes
) -> None:
    with pytest.raises(TooLarge, match="half of --max-staging-bytes"):
        upload_bytes(store, "mine", CONFIG, content)
    wide = AdapterStore(tmp_path / "wide", LAYOUT, StoreLimits(free_disk_floor_bytes=0), base_name="base")
    record, _ = upload_bytes(wide, "mine", CONFIG, content)
    assert stored(wide, record.digest).read_bytes() == SAVED
    assert upload_bytes(wide, "twin", CONFIG, SAVED)[0].digest == record.digest
    wide.close()


@pytest.mark.parametrize("content", [SAVED, save(TENSORS)], ids=["as it came", "written anew"])
def test_tensors_are_on_disk_before_the_name_stands_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    store = AdapterStore(tmp_path, LAYOUT, StoreLimits(free_disk_floor_bytes=0), base_name="base")
    sync, synced = os.fsync, list[int]()

    def note(descriptor: int) -> None:
        sync(descriptor)
        synced.append(os.fstat(descriptor).st_ino)

    monkeypatch.setattr(os, "fsync", note)
    record, _ = upload_bytes(store, "mine", CONFIG, content)
    (name,) = tmp_path.glob("*/names/mine")
    assert synced.index(stored(store, record.digest).stat().st_ino) < synced.index(name.stat().st_ino)
    store.close()


def test_tensors_that_cannot_be_synced_are_not_stored(store: AdapterStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail)
        with pytest.raises(StoreUnreachable):
            upload_bytes(store, "mine", CONFIG, SAVED)
    assert not store.has("mine")
    assert upload_bytes(store, "mine", CONFIG, SAVED)[1]
    store.check_integrity()


def test_a_tensor_that_is_no_number_is_named_as_it_was_sent(store: AdapterStore) -> None:
    name = list(TENSORS)[-1]
    broken = {**TENSORS, name: np.full_like(TENSORS[name], np.nan)}
    with pytest.raises(Malformed, match=f"{name}.*NaN"):
        upload_bytes(store, "mine", CONFIG, save(broken, {"format": "pt"}))
    assert store.staging_bytes is not None
    assert store.staging_bytes.num_bytes == 0


def with_idle_rows(part: str, data: np.ndarray) -> bytes:
    """A file whose lora_B is zero, and what each module has beside it."""
    modules = modules_ending(LAYOUT, "q_proj")
    rows = {name: data * ("lora_A" in name) for name, data in lora_tensors(LAYOUT, modules, 4).items()}
    others = {f"base_model.model.{module}.{part}": data for module in modules}
    return save(rows | others, {"format": "pt"})


IDLE, MAYBE, NOTHING = "The adapter changes nothing", "may change nothing; upload it with ?probe=true", ""


@pytest.mark.parametrize(
    ("settings", "part", "data", "says"),
    [
        ({"use_dora": True}, "lora_magnitude_vector", np.ones(8, "<f4"), MAYBE),
        ({"lora_bias": True}, "lora_B.bias", np.zeros(8, "<f4"), IDLE),
        ({"lora_bias": True}, "lora_B.bias", np.full(8, 1e-3, "<f4"), NOTHING),
        ({"bias": "all"}, "bias", np.ones(8, "<f4"), NOTHING),
    ],
    ids=["magnitudes that may be the base's", "biases of zeros", "biases", "the base's biases, changed"],
)
def test_an_adapter_whose_rows_are_zero_is_warned_of_by_what_it_has_beside_them(
    store: AdapterStore, settings: dict[str, Any], part: str, data: np.ndarray, says: str
) -> None:
    record, _ = upload_bytes(store, "mine", config_bytes(**settings), with_idle_rows(part, data))
    assert [says in note for note in record.manifest.notes] == [True] * (says != NOTHING)


@pytest.mark.parametrize(("alpha", "is_told"), [(1e-15, True), (1e-3, False)])
def test_a_delta_that_every_weight_swallows_is_warned_of(store: AdapterStore, alpha: float, is_told: bool) -> None:
    record, _ = upload_bytes(store, "mine", config_bytes(r=64, lora_alpha=alpha), SAVED)
    assert [MAYBE in note for note in record.manifest.notes] == [True] * is_told

"""The host tier: what the store holds, in the engine's dtype and orientation, within a byte budget."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from adapters.errors import Malformed, NotFound, Unsupported
from adapters.memory.host_tier import HostTier, pageable, read_adapter
from adapters.memory.slab import ALIGNMENT_BYTES, PageableMemory, SlabMemory
from adapters.store.store import AdapterStore, StoreLimits
from tests.support.adapter_files import (
    HIDDEN,
    VOCAB,
    config_bytes,
    lora_tensors,
    modules_ending,
    safetensors_bytes,
    small_layout,
    upload_bytes,
    upload_small,
)

LAYOUT = small_layout()
MODULES = [*modules_ending(LAYOUT, "q_proj", "down_proj"), "model.embed_tokens", "lm_head"]
TARGETS = ["q_proj", "down_proj", "embed_tokens", "lm_head"]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[AdapterStore]:
    opened = AdapterStore(tmp_path, LAYOUT, StoreLimits(free_disk_floor_bytes=0), base_name="base")
    yield opened
    opened.close()


@pytest.mark.parametrize("stored", ["<f4", "<f2", "<u2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_rows_are_the_files_values_in_the_engines_dtype(
    store: AdapterStore, tmp_path: Path, stored: str, dtype: torch.dtype, num_threads: int
) -> None:
    tensors = lora_tensors(LAYOUT, MODULES, 3, dtype=stored)
    record, _ = upload_bytes(store, "x", config_bytes(r=3, target_modules=TARGETS), safetensors_bytes(tensors))
    adapter = HostTier(tmp_path, LAYOUT, 1 << 20, dtype=dtype, num_threads=num_threads).get(record.digest)
    assert list(adapter.slices) == [report.module for report in record.manifest.modules]
    assert adapter.rows == {"attention": 3, "mlp": 3, "embeddings": 3}
    for module, held in adapter.slices.items():
        is_embedding = module == "model.embed_tokens"
        names = ("lora_embedding_A", "lora_embedding_B") if is_embedding else ("lora_A.weight", "lora_B.weight")
        a, b = (torch.from_numpy(tensors[f"base_model.model.{module}.{name}"]) for name in names)
        if stored == "<u2":
            a, b = (tensor.view(torch.int16).view(torch.bfloat16) for tensor in (a, b))
        assert torch.equal(held.a, a.to(dtype))
        assert torch.equal(held.b, b.to(dtype).t())
        assert held.a.is_contiguous()
        assert held.b.is_contiguous()
        assert (held.rank, held.scaling) == (3, 8 / 3)
    assert adapter.slices["model.embed_tokens"].a.shape == (3, VOCAB)
    assert adapter.slices["lm_head"].b.shape == (3, VOCAB)
    num_numbers = sum(3 * w for w in (2 * (HIDDEN + 8), 2 * (10 + HIDDEN), 2 * (VOCAB + HIDDEN)))
    num_tensors = 2 * len(adapter.slices)
    assert adapter.num_bytes == adapter.slab.nbytes >= num_numbers * dtype.itemsize
    assert adapter.tables_start < num_numbers * dtype.itemsize + num_tensors * ALIGNMENT_BYTES


def test_mixed_dtypes_in_one_file_are_read(store: AdapterStore, tmp_path: Path) -> None:
    tensors = lora_tensors(LAYOUT, modules_ending(LAYOUT, "q_proj"), 3)
    first = next(iter(tensors))
    tensors[first] = tensors[first].astype("<f2")
    record, _ = upload_bytes(store, "x", config_bytes(r=3), safetensors_bytes(tensors))
    held = read_adapter(tmp_path, LAYOUT, record.digest, torch.float32).slices["model.layers.0.self_attn.q_proj"]
    assert torch.equal(held.a, torch.from_numpy(tensors[first]).float())


def test_the_least_recently_used_leaves_when_the_budget_is_full(store: AdapterStore, tmp_path: Path) -> None:
    digests = [upload_small(store, LAYOUT, f"n{seed}", seed=seed)[0].digest for seed in range(4)]
    size = read_adapter(tmp_path, LAYOUT, digests[0], torch.float32).num_bytes
    tier = HostTier(tmp_path, LAYOUT, 2 * size + size // 2)
    first, second = tier.get(digests[0]), tier.get(digests[1])
    assert tier.get(digests[0]) is first
    tier.get(digests[2])
    assert tier.resident() == (digests[0], digests[2])
    assert tier.used_bytes == 2 * size
    assert tier.get(digests[1]) is not second
    tier.check_integrity()
    tier.drop(digests[1])
    tier.drop("unknown")
    assert tier.resident() == (digests[2],)
    tier.check_integrity()


def test_a_budget_of_zero_keeps_nothing(store: AdapterStore, tmp_path: Path) -> None:
    digest = upload_small(store, LAYOUT, "x")[0].digest
    tier = HostTier(tmp_path, LAYOUT, 0)
    assert tier.get(digest) is not tier.get(digest)
    assert tier.resident() == ()
    tier.check_integrity()


def test_an_adapter_larger_than_the_budget_drives_nobody_out(store: AdapterStore, tmp_path: Path) -> None:
    small = upload_small(store, LAYOUT, "small", rank=2)[0].digest
    large = upload_small(store, LAYOUT, "large", rank=40)[0].digest
    tier = HostTier(tmp_path, LAYOUT, read_adapter(tmp_path, LAYOUT, small, torch.float32).num_bytes)
    tier.get(small)
    assert tier.get(large).rows == {"attention": 40}
    assert tier.resident() == (small,)


def test_an_adapter_lives_on_after_its_files_are_gone(store: AdapterStore, tmp_path: Path) -> None:
    digest = upload_small(store, LAYOUT, "x")[0].digest
    tier = HostTier(tmp_path, LAYOUT, 1 << 20)
    held = tier.get(digest)
    before = held.slices["model.layers.0.self_attn.q_proj"].a.clone()
    store.delete("x")
    assert torch.equal(tier.get(digest).slices["model.layers.0.self_attn.q_proj"].a, before)
    tier.drop(digest)
    with pytest.raises(NotFound):
        tier.get(digest)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_weights_beyond_float16_are_refused_there(store: AdapterStore, tmp_path: Path, num_threads: int) -> None:
    tensors = lora_tensors(LAYOUT, modules_ending(LAYOUT, "q_proj"), 4)
    next(iter(tensors.values()))[0, 0] = np.float32(1e6)
    record, _ = upload_bytes(store, "x", config_bytes(), safetensors_bytes(tensors))
    slabs: list[weakref.ref[torch.Tensor]] = []

    def noted(num_bytes: int) -> tuple[torch.Tensor, SlabMemory]:
        slab, memory = pageable(num_bytes)
        slabs.append(weakref.ref(slab))
        return slab, memory

    gc.disable()
    try:
        with pytest.raises(Unsupported, match="float16"):
            read_adapter(tmp_path, LAYOUT, record.digest, torch.float16, noted, num_threads=num_threads)
        assert slabs[0]() is None, "its memory is free at once"
    finally:
        gc.enable()
    assert read_adapter(tmp_path, LAYOUT, record.digest, torch.bfloat16)


def test_a_manifest_that_disagrees_with_its_tensors_is_damage(store: AdapterStore, tmp_path: Path) -> None:
    record, _ = upload_small(store, LAYOUT, "x", rank=4)
    path = store.path_of(record.digest) / "manifest.json"
    whole = path.read_bytes()
    for field in (b'"rank":', rb'"attention":'):
        assert field + b"4" in whole
        path.write_bytes(whole.replace(field + b"4", field + b"5"))
        with pytest.raises(Malformed, match="damaged"):
            read_adapter(tmp_path, LAYOUT, record.digest, torch.float32)


@pytest.mark.parametrize("file_name", ["manifest.json", "adapter_model.safetensors"])
def test_damage_on_disk_is_an_error_of_ours(store: AdapterStore, tmp_path: Path, file_name: str) -> None:
    record, _ = upload_small(store, LAYOUT, "x")
    path = store.path_of(record.digest) / file_name
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(Malformed):
        read_adapter(tmp_path, LAYOUT, record.digest, torch.float32)


def test_the_api_side_of_the_package_imports_no_torch() -> None:
    code = "import sys, adapters.store.store, adapters.row_plan; sys.exit(bool({'torch', 'numpy'} & {*sys.modules}))"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[3], check=False).returncode == 0


def test_what_depends_on_the_layout_alone_is_derived_once(
    store: AdapterStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads run beside the steps, and share the interpreter with them."""
    digest = upload_small(store, LAYOUT, "once")[0].digest
    first = read_adapter(tmp_path, LAYOUT, digest, torch.float32)

    def derived_again(_layout: object) -> None:
        raise AssertionError("the layout was walked for a read")

    monkeypatch.setattr("adapters.files.paths.asdict", derived_again)
    again = read_adapter(tmp_path, LAYOUT, digest, torch.float32)
    assert again.shape_key == first.shape_key


def test_large_slabs_are_of_huge_pages() -> None:
    """Small pages of one cost more time than the copy into it."""
    if not Path("/sys/kernel/mm/transparent_hugepage").is_dir():
        pytest.skip("NOT RUN: this system has no huge pages")
    slab = PageableMemory().allocate(32 << 20)
    middle = slab.data_ptr() + slab.nbytes // 2
    inside, flags = False, ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split(" ", 1)[0]
        if "-" in head:
            first, last = (int(one, 16) for one in head.split("-"))
            inside = first <= middle < last
        elif inside and line.startswith("VmFlags:"):
            flags = line
    assert "hg" in flags.split(), flags

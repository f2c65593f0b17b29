"""The store: uploads in, by content; names as aliases; leases; limits. Real files, real threads."""

from __future__ import annotations

import errno
import gc
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext
from itertools import count, permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from adapters.errors import (
    AdapterError,
    BindingError,
    Conflict,
    Damaged,
    InvalidName,
    Malformed,
    NotFound,
    RowsExceeded,
    StorageFull,
    StoreBusy,
    StoreUnreachable,
    TooLarge,
    Unsupported,
)
from adapters.files import name_versions as rules
from adapters.files.disk import StoreFiles
from adapters.files.manifest import Manifest
from adapters.files.paths import CONFIG_FILE, TENSOR_FILE
from adapters.peft import canonical_file
from adapters.row_plan import plan_rows
from adapters.store import catalog as catalog_module
from adapters.store.store import AdapterStore, StoreLimits, Upload
from adapters.text.vocabulary import BaseText
from adapters.upload import staging_bytes as upload_module
from tests.support.adapter_files import (
    HIDDEN,
    VOCAB,
    config_bytes,
    hub_snapshot,
    lora_tensors,
    modules_ending,
    safetensors_bytes,
    small_layout,
    upload_bytes,
    upload_small,
    write_peft_directory,
)
from tests.support.limits import LIMIT_SECONDS

LAYOUT = small_layout()
Q = modules_ending(LAYOUT, "q_proj")
LIMITS = StoreLimits(max_upload_bytes=200_000, max_files=20, free_disk_floor_bytes=0)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[AdapterStore]:
    opened = AdapterStore(tmp_path / "store", LAYOUT, LIMITS, base_name="base")
    yield opened
    opened.check_integrity()
    assert staged(tmp_path) == [], "an upload left something behind"
    opened.close()


def staged(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "store").glob("*/staging/*"))


def publishing_waits(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Uploads wait where their files are published, which is a change of the disk: (one is there, it may go on)."""
    publish, entered, may_publish = StoreFiles.publish, threading.Event(), threading.Event()

    def held(files: StoreFiles, ready: Path, digest: str) -> None:
        entered.set()
        assert may_publish.wait(LIMIT_SECONDS)
        publish(files, ready, digest)

    monkeypatch.setattr(StoreFiles, "publish", held)
    return entered, may_publish


NAN = np.float32("nan").tobytes()


def good_tensors(seed: int = 0) -> dict[str, np.ndarray]:
    return lora_tensors(LAYOUT, Q, 4, seed=seed)


# ---- content


def test_an_upload_is_published_as_a_peft_directory(store: AdapterStore) -> None:
    tensors = good_tensors()
    record, created = upload_bytes(store, "mine", config_bytes(), safetensors_bytes(tensors))
    assert created
    directory = store.path_of(record.digest)
    assert (directory / "adapter_config.json").read_bytes() == config_bytes()
    with safe_open(directory / "adapter_model.safetensors", framework="numpy") as opened:
        assert set(opened.keys()) == set(tensors)
        assert all((opened.get_tensor(name) == data).all() for name, data in tensors.items())


def test_the_load_report_says_rank_scaling_and_bytes_per_module(store: AdapterStore) -> None:
    record, _ = upload_bytes(store, "mine", config_bytes(), safetensors_bytes(good_tensors()))
    num_bytes = 4 * 4 * (HIDDEN + 8)
    assert [(m.module, m.rank, m.scaling, m.num_bytes) for m in record.manifest.modules] == [
        (module, 4, 2.0, num_bytes) for module in Q
    ]
    assert record.manifest.num_bytes == 2 * num_bytes
    assert record.manifest.rows == {"attention": 4}
    assert store.get("mine") == record


def test_the_digest_ignores_what_changes_no_answer(store: AdapterStore) -> None:
    tensors = good_tensors()
    first, _ = upload_bytes(store, "a", config_bytes(), safetensors_bytes(tensors))
    reordered = safetensors_bytes(dict(reversed(tensors.items())), {"format": "pt", "by": "someone"})
    config = json.dumps(
        {"inference_mode": True, "target_modules": ["q_proj"], "lora_dropout": 0.1, "lora_alpha": 8, "r": 4}
        | {"peft_type": "LORA", "base_model_name_or_path": "elsewhere"},
        indent=3,
    ).encode()
    renamed = {name.replace(".weight", ".default.weight"): data for name, data in tensors.items()}
    for index, content in enumerate((reordered, safetensors_bytes(renamed))):
        record, created = upload_bytes(store, f"b{index}", config, content)
        assert record.digest == first.digest
        assert created  # the name is new, the content is not
    assert upload_bytes(store, "a", config, reordered) == (first, False)


def test_the_digest_changes_with_whatever_changes_an_answer(store: AdapterStore) -> None:
    tensors = good_tensors()
    other_data = {name: data.copy() for name, data in tensors.items()}
    next(iter(other_data.values()))[0, 0] += 1
    half = {name: data.astype("<f2") for name, data in tensors.items()}
    swapped = dict(zip(tensors, [*list(tensors.values())[2:], *list(tensors.values())[:2]], strict=True))
    variants = [
        (config_bytes(), tensors),
        (config_bytes(lora_alpha=9), tensors),
        (config_bytes(use_rslora=True), tensors),
        (config_bytes(alpha_pattern={"layers.1.self_attn.q_proj": 1}), tensors),
        (config_bytes(), other_data),
        (config_bytes(), half),
        (config_bytes(), swapped),
        (config_bytes(layers_to_transform=[1]), dict(list(tensors.items())[2:])),
    ]
    digests = {
        upload_bytes(store, f"v{index}", config, safetensors_bytes(content))[0].digest
        for index, (config, content) in enumerate(variants)
    }
    assert len(digests) == len(variants)


@pytest.mark.parametrize("dtype", ["<f4", "<f2", "<u2"])
def test_every_dtype_is_stored_as_it_came(store: AdapterStore, dtype: str) -> None:
    tensors = lora_tensors(LAYOUT, Q, 4, dtype=dtype)
    record, _ = upload_bytes(store, "x", config_bytes(), safetensors_bytes(tensors))
    stored = (store.path_of(record.digest) / "adapter_model.safetensors").read_bytes()
    assert all(data.tobytes() in stored for data in tensors.values())


@pytest.mark.parametrize(
    "bits",
    [
        *(("<f4", pattern) for pattern in (0x7FC00000, 0x7F800000, 0xFF800000, 0xFFFFFFFF)),
        *(("<f2", pattern) for pattern in (0x7C00, 0xFC00)),
        *(("<u2", pattern) for pattern in (0x7F80, 0xFF80, 0xFFC1)),
    ],
)
def test_nan_and_infinity_are_refused_by_tensor_name(store: AdapterStore, bits: tuple[str, int]) -> None:
    dtype, pattern = bits
    tensors = lora_tensors(LAYOUT, Q, 4, dtype=dtype)
    name = list(tensors)[-1]
    tensors[name].view("<u4" if dtype == "<f4" else "<u2")[-1, -1] = pattern
    with pytest.raises(Malformed, match="NaN or infinity") as caught:
        upload_bytes(store, "x", config_bytes(), safetensors_bytes(tensors))
    assert name in str(caught.value)


def test_an_adapter_beyond_the_row_budget_is_refused_with_both_sizes(tmp_path: Path) -> None:
    plan = plan_rows(LAYOUT, 100_000, element_bytes=4, alignment=16)
    rank = plan.rows["attention"] + 1
    store = AdapterStore(tmp_path / "store", LAYOUT, LIMITS, base_name="base", row_plan=plan)
    tensors = safetensors_bytes(lora_tensors(LAYOUT, Q, rank))
    with pytest.raises(RowsExceeded) as caught:
        upload_bytes(store, "x", config_bytes(r=rank), tensors)
    size = plan.row_bytes["attention"]
    assert f"{(rank + 15) * size} bytes" in str(caught.value)
    assert f"{plan.rows['attention'] * size} bytes" in str(caught.value)
    store.close()


def test_a_rank_beyond_the_devices_kernels_is_refused_with_both_ranks(tmp_path: Path) -> None:
    plan = plan_rows(LAYOUT, 1 << 30, element_bytes=4, max_rank=256)
    store = AdapterStore(tmp_path / "store", LAYOUT, LIMITS, base_name="base", row_plan=plan)
    with pytest.raises(RowsExceeded, match=r"rank 257 in .*q_proj; .* up to 256\."):
        upload_bytes(store, "x", config_bytes(r=257), safetensors_bytes(lora_tensors(LAYOUT, Q, 257)))
    upload_bytes(store, "x", config_bytes(r=256), safetensors_bytes(lora_tensors(LAYOUT, Q, 256)))
    store.close()


# ---- names


@pytest.mark.parametrize(
    "name", ["", ".", "..", "-a", "_a", ".a", "a/b", "a b", "a:b", "a\0", "a\n", "é", "a" * 129, "a\\b"]
)
def test_names_outside_the_rule_are_refused(store: AdapterStore, name: str) -> None:
    with pytest.raises(InvalidName):
        store.check_name(name)
    with pytest.raises(InvalidName):
        upload_small(store, LAYOUT, name)


@pytest.mark.parametrize("name", ["a", "0", "A.b_c-d", "a" * 128, "names", "con"])
def test_names_inside_the_rule_are_taken(store: AdapterStore, name: str) -> None:
    upload_small(store, LAYOUT, name)
    assert store.get(name).name == name


def test_the_base_models_name_is_taken(store: AdapterStore) -> None:
    with pytest.raises(Conflict, match="base model"):
        upload_small(store, LAYOUT, "base")


def test_a_name_with_other_content_is_a_conflict_and_keeps_what_it_had(store: AdapterStore) -> None:
    record, _ = upload_small(store, LAYOUT, "mine", seed=1)
    with pytest.raises(Conflict, match="taken"):
        upload_small(store, LAYOUT, "mine", seed=2)
    assert store.get("mine") == record
    assert [r.name for r in store.each()] == ["mine"]


def test_a_deleted_name_is_gone_at_once_and_free_again(store: AdapterStore) -> None:
    upload_small(store, LAYOUT, "mine", seed=1)
    store.delete("mine")
    with pytest.raises(NotFound):
        store.get("mine")
    with pytest.raises(NotFound):
        store.delete("mine")
    with pytest.raises(NotFound):
        store.lease("mine")
    assert upload_small(store, LAYOUT, "mine", seed=2)[1]


@pytest.mark.parametrize("digest", ["", "x", "../names", "0" * 64, "A" * 64])
def test_unknown_digests_are_not_found(store: AdapterStore, digest: str) -> None:
    with pytest.raises(NotFound):
        store.path_of(digest)
    with pytest.raises(NotFound):
        store.manifest(digest)


# ---- leases


def test_files_stay_while_leased_and_go_with_the_last_lease(store: AdapterStore) -> None:
    gone: list[str] = []
    store.on_gone = gone.append
    record, _ = upload_small(store, LAYOUT, "mine")
    first, second = store.lease("mine"), store.lease("mine")
    directory = store.path_of(record.digest)
    store.delete("mine")
    store.check_integrity()
    first.release()
    assert directory.is_dir()
    assert gone == []
    assert store.num_leases(record.digest) == 1
    second.release()
    store.settle()
    assert not directory.exists()
    assert gone == [record.digest]


def test_the_last_release_does_not_wait_for_the_disk(store: AdapterStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is called in the event loop; meanwhile another thread may sync an upload."""
    told = threading.Event()
    store.on_gone = lambda _digest: told.set()
    record, _ = upload_small(store, LAYOUT, "mine")
    lease = store.lease("mine")
    store.delete("mine")
    entered, may_publish = publishing_waits(monkeypatch)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(upload_small, store, LAYOUT, "other", seed=1)
        try:
            assert entered.wait(LIMIT_SECONDS)
            release = threading.Thread(target=lease.release, daemon=True)
            release.start()
            release.join(LIMIT_SECONDS)
            assert not release.is_alive()
            assert not told.is_set()
            assert store.path_of(record.digest).is_dir()
        finally:
            may_publish.set()
        assert other.result(LIMIT_SECONDS)[1]
    assert told.wait(LIMIT_SECONDS)


def test_a_lease_may_outlive_the_store(tmp_path: Path) -> None:
    store = AdapterStore(tmp_path / "store", LAYOUT, LIMITS, base_name="base")
    record, _ = upload_small(store, LAYOUT, "mine")
    lease = store.lease("mine")
    store.delete("mine")
    store.close()
    lease.release()
    again = AdapterStore(tmp_path / "store", LAYOUT, LIMITS, base_name="base")
    with pytest.raises(NotFound):
        again.path_of(record.digest)
    again.close()


def test_a_removal_that_fails_is_logged_and_hinders_no_other(
    store: AdapterStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gone: list[str] = []
    store.on_gone = gone.append
    leases = [(upload_small(store, LAYOUT, name, seed=seed)[0], store.lease(name)) for seed, name in enumerate("ab")]
    for record, _ in leases:
        store.delete(record.name)

    def refuse(_files: StoreFiles, digest: str) -> bool:
        raise PermissionError(13, "Permission denied", digest)

    with monkeypatch.context() as patched:
        patched.setattr(StoreFiles, "remove_adapter", refuse)
        leases[0][1].release()
        store.settle()
    leases[1][1].release()
    store.settle()
    assert gone == [leases[1][0].digest]
    assert leases[0][0].digest in caplog.text
    shutil.rmtree(store.path_of(leases[0][0].digest))  # the next start would


def test_a_second_name_keeps_the_files(store: AdapterStore) -> None:
    gone: list[str] = []
    store.on_gone = gone.append
    record, _ = upload_small(store, LAYOUT, "one")
    upload_small(store, LAYOUT, "two")
    store.delete("one")
    with store.lease("two"):
        pass
    assert store.path_of(record.digest).is_dir()
    assert gone == []
    store.delete("two")
    assert gone == [record.digest]


def test_content_that_comes_back_while_leased_is_the_same_directory(store: AdapterStore) -> None:
    record, _ = upload_small(store, LAYOUT, "one")
    lease = store.lease("one")
    store.delete("one")
    upload_small(store, LAYOUT, "two")
    lease.release()
    assert store.get("two").digest == record.digest
    assert store.path_of(record.digest).is_dir()


# ---- parts


@pytest.mark.parametrize(
    "name", ["adapter_model.bin", "x.pt", "x.PTH", "x.pkl", "training_args.bin", "a.ckpt", "x.npz"]
)
def test_pickles_are_refused_by_name(store: AdapterStore, name: str) -> None:
    with store.begin() as upload, pytest.raises(Unsupported, match=name):
        upload.open_part("adapter_model", name)


@pytest.mark.parametrize("name", ["new_embeddings.safetensors", "model.gguf", "model.safetensors.index.json"])
def test_other_weights_in_a_directory_are_refused_by_name(store: AdapterStore, tmp_path: Path, name: str) -> None:
    directory = write_peft_directory(tmp_path / "in", config_bytes(), safetensors_bytes(good_tensors()))
    (directory / name).write_bytes(b"x")
    with store.begin() as upload, pytest.raises(Unsupported, match=name):
        upload.add_directory(directory)


@pytest.mark.parametrize(
    ("part", "file_name"),
    [
        ("adapter_config", None),
        ("adapter_config.json", "blob"),
        ("file", "adapter_config.json"),
        ("files", "some/dir/adapter_config.json"),
    ],
)
def test_parts_are_known_by_part_name_or_file_name(store: AdapterStore, part: str, file_name: str | None) -> None:
    with store.begin() as upload:
        with upload.open_part(part, file_name) as config:
            config.write(config_bytes())
        with upload.open_part("file", "anything.safetensors") as tensors:
            tensors.write(safetensors_bytes(good_tensors()))
        assert upload.finish("x")[1]


def test_unknown_parts_are_refused_by_name(store: AdapterStore) -> None:
    with store.begin() as upload, pytest.raises(Malformed, match="mystery"):
        upload.open_part("mystery", "x.dat")


def test_a_part_given_twice_is_refused(store: AdapterStore) -> None:
    with store.begin() as upload:
        upload.open_part("adapter_config").close()
        with pytest.raises(Malformed, match="same purpose"):
            upload.open_part("file", "adapter_config.json")


@pytest.mark.parametrize("missing", ["adapter_config", "adapter_model"])
def test_a_missing_part_is_named(store: AdapterStore, missing: str) -> None:
    parts = {"adapter_config": config_bytes(), "adapter_model": safetensors_bytes(good_tensors())}
    with store.begin() as upload:
        for name, data in parts.items():
            if name != missing:
                with upload.open_part(name) as part:
                    part.write(data)
        with pytest.raises(Malformed, match=f"no {missing}"):
            upload.finish("x")


def test_a_directory_is_taken_and_the_rest_is_reported(store: AdapterStore, tmp_path: Path) -> None:
    directory = write_peft_directory(tmp_path / "in", config_bytes(), safetensors_bytes(good_tensors()))
    (directory / "README.md").write_text("hello")
    (directory / "checkpoint-5").mkdir()
    with store.begin() as upload:
        upload.add_directory(directory)
        record, _ = upload.finish("x")
    assert [note.split()[2] for note in record.manifest.notes] == ["README.md", "checkpoint-5"]


def snapshot_of(root: Path) -> Path:
    directory = write_peft_directory(root / "plain", config_bytes(), safetensors_bytes(good_tensors()))
    (directory / "README.md").write_text("hello")
    return hub_snapshot(directory, root / "models--me--ad")


def test_a_directory_of_links_loads_where_its_links_may_lead(store: AdapterStore, tmp_path: Path) -> None:
    """And links of files without a role matter nowhere, whatever they lead to."""
    snapshot = snapshot_of(tmp_path)
    (snapshot / ".gitattributes").symlink_to("/etc/hostname")
    (snapshot / "notes.md").symlink_to("nowhere")
    with store.begin() as upload:
        upload.add_directory(snapshot, tmp_path / "models--me--ad")
        record, _ = upload.finish("x")
    left = {note.split()[2] for note in record.manifest.notes}
    assert left == {"README.md", ".gitattributes", "notes.md"}
    for allowed in (None, tmp_path / "plain"):
        with store.begin() as upload, pytest.raises(Unsupported, match=r"leads out of the directory.*cp -rL"):
            upload.add_directory(snapshot, allowed)


def test_a_repository_of_the_hub_s_cache_is_named_as_such(store: AdapterStore, tmp_path: Path) -> None:
    repository = snapshot_of(tmp_path).parents[1]
    with store.begin() as upload, pytest.raises(Malformed, match=r"name the one below its snapshots"):
        upload.add_directory(repository)


@pytest.mark.parametrize("target", ["nowhere", "adapter_model.safetensors"], ids=["nothing", "itself"])
def test_a_link_to_nothing_is_refused(store: AdapterStore, tmp_path: Path, target: str) -> None:
    directory = write_peft_directory(tmp_path / "in", config_bytes(), safetensors_bytes(good_tensors()))
    (directory / "adapter_model.safetensors").unlink()
    (directory / "adapter_model.safetensors").symlink_to(target)
    with store.begin() as upload, pytest.raises(Malformed, match=r"a link to a file that is not there"):
        upload.add_directory(directory)


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "chat_template.jinja"])
def test_a_link_out_of_a_directory_is_refused(store: AdapterStore, tmp_path: Path, name: str) -> None:
    directory = write_peft_directory(tmp_path / "in", config_bytes(), safetensors_bytes(good_tensors()))
    (tmp_path / "secret").write_bytes(safetensors_bytes(good_tensors()))
    (directory / name).unlink(missing_ok=True)
    (directory / name).symlink_to(tmp_path / "secret")
    with store.begin() as upload, pytest.raises(Unsupported, match="link"):
        upload.add_directory(directory)


LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors", "tokenizer.json"])
def test_a_pointer_of_git_lfs_is_named_as_such(store: AdapterStore, tmp_path: Path, name: str) -> None:
    directory = write_peft_directory(tmp_path / "in", config_bytes(), safetensors_bytes(good_tensors()))
    (directory / name).write_bytes(LFS_POINTER)
    with store.begin() as upload:
        upload.add_directory(directory)
        with pytest.raises(Malformed, match=r"Git LFS pointer.*git lfs pull"):
            upload.finish("x")


def test_the_file_of_mlx_is_named_as_such(store: AdapterStore, tmp_path: Path) -> None:
    directory = write_peft_directory(tmp_path / "in", config_bytes(), safetensors_bytes(good_tensors()))
    (directory / "adapter_model.safetensors").rename(directory / "adapters.safetensors")
    with store.begin() as upload, pytest.raises(Unsupported, match=r"MLX.*convert it"):
        upload.add_directory(directory)


def test_names_in_a_directory_that_are_no_unicode_are_shown_all_the_same(store: AdapterStore, tmp_path: Path) -> None:
    directory = write_peft_directory(tmp_path / "peft", config_bytes(), safetensors_bytes(good_tensors()))
    (directory / os.fsdecode(b"caf\xe9.txt")).write_bytes(b"x")
    (directory / os.fsdecode(b"sub\xff")).mkdir()
    with store.begin() as upload:
        upload.add_directory(directory)
        record, _ = upload.finish("x")
    assert record.manifest.notes == (
        "The file caf?.txt is not needed and was left out.",
        "The folder sub? is not needed and was left out.",
    )
    assert store.get("x") == record


def test_a_fifo_in_a_directory_is_refused_without_opening_it(store: AdapterStore, tmp_path: Path) -> None:
    directory = write_peft_directory(tmp_path / "in", config_bytes(), safetensors_bytes(good_tensors()))
    os.mkfifo(directory / "chat_template.jinja")
    with store.begin() as upload, pytest.raises(Unsupported, match="device"):
        upload.add_directory(directory)


# ---- tokenizer files


def upload_with(store: AdapterStore, files: dict[str, bytes], name: str = "x") -> Any:
    with store.begin() as upload:
        for file, data in {
            "adapter_config.json": config_bytes(),
            "adapter_model.safetensors": safetensors_bytes(good_tensors()),
            **files,
        }.items():
            with upload.open_part("file", file) as part:
                part.write(data)
        return upload.finish(name)[0]


@pytest.mark.parametrize(
    "files",
    [
        {"chat_template.jinja": b"hello {{ x }}"},
        {"tokenizer_config.json": json.dumps({"chat_template": "hello {{ x }}"}).encode()},
        {
            "tokenizer_config.json": json.dumps(
                {"chat_template": [{"name": "rag", "template": "no"}, {"name": "default", "template": "hello {{ x }}"}]}
            ).encode()
        },
        {"chat_template.jinja": b"hello {{ x }}", "tokenizer_config.json": b'{"chat_template": "other"}'},
    ],
    ids=lambda files: "+".join(files),
)
def test_an_adapters_chat_template_is_kept(store: AdapterStore, files: dict[str, bytes]) -> None:
    record = upload_with(store, files)
    assert record.manifest.has_chat_template
    assert store.chat_templates(record.digest)["default"] == "hello {{ x }}"
    plain, _ = upload_bytes(store, "plain", config_bytes(), safetensors_bytes(good_tensors()))
    assert plain.digest != record.digest
    assert store.chat_templates(plain.digest) == {}


def test_the_digest_covers_what_changes_a_prompt_or_an_answer(tmp_path: Path) -> None:
    tokens = {"<s>": 1, "</s>": 2, "<end>": 3, "<pad>": 0}
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    base = BaseText(tokens.get, str, special_tokens=special, eos_token_ids=(2,))
    store = AdapterStore(tmp_path / "store", LAYOUT, LIMITS, base_name="base", base_text=base)

    names = map(str, count())

    def digest(config: dict[str, Any], **files: str) -> str:
        made = {"tokenizer_config.json": json.dumps(config)} | {
            name.replace("__", "/"): text for name, text in files.items()
        }
        return upload_with(store, {name: text.encode() for name, text in made.items()}, next(names)).digest

    template = {"chat_template.jinja": "{{ bos_token }}"}
    usual = digest(special, **template)
    assert digest({**special, "model_max_length": 5, "pad_token": "<pad>"}, **template) == usual
    assert digest({}, **template) == usual
    others = [
        digest({**special, "bos_token": None}, **template),
        digest({**special, "bos_token": "<end>"}, **template),
        digest({**special, "eos_token": "<end>"}, **template),
        digest(special, **template, **{"generation_config.json": '{"eos_token_id": [2, 3]}'}),
        digest(special, **template, **{"additional_chat_templates__rag.jinja": "{{ bos_token }}"}),
        digest(special, **template, **{"additional_chat_templates__rag.jinja": "other"}),
        digest(special, **template, **{"additional_chat_templates__tool_use.jinja": "other"}),
    ]
    assert len({usual, *others}) == 8
    store.close()


@pytest.mark.parametrize("file_name", [None, "template.jinja"])
def test_a_part_called_chat_template_is_one_whatever_its_file_is_called(
    store: AdapterStore, file_name: str | None
) -> None:
    parts = {"adapter_config": config_bytes(), "adapter_model": safetensors_bytes(good_tensors())}
    with store.begin() as upload:
        for part_name, data in parts.items():
            with upload.open_part(part_name) as part:
                part.write(data)
        with upload.open_part("chat_template", file_name) as part:
            part.write(b"hello {{ x }}")
        record, _ = upload.finish("x")
    assert store.chat_templates(record.digest)["default"] == "hello {{ x }}"


def test_a_part_that_is_not_known_is_refused_with_the_parts_that_are(store: AdapterStore) -> None:
    with (
        store.begin() as upload,
        pytest.raises(Malformed, match=r"adapter_config, adapter_model, archive and chat_template\."),
    ):
        upload.open_part("readme", "README.md")


@pytest.mark.parametrize(
    "files",
    [
        {"added_tokens.json": json.dumps({"<new>": VOCAB}).encode()},
        {"added_tokens.json": json.dumps({"<other>": 3}).encode()},
        {"added_tokens.json": json.dumps({"<known>": 4}).encode()},
        {"tokenizer_config.json": json.dumps({"added_tokens_decoder": {"14": {"content": "<new>"}}}).encode()},
        {"tokenizer.json": json.dumps({"version": "1.0", "added_tokens": [{"id": 14, "content": "<new>"}]}).encode()},
    ],
    ids=str,
)
def test_an_adapter_that_changes_the_vocabulary_is_refused(tmp_path: Path, files: dict[str, bytes]) -> None:
    known = {"<known>": 3}
    store = AdapterStore(tmp_path / "store", LAYOUT, LIMITS, base_name="base", base_text=BaseText(known.get))
    with pytest.raises(Unsupported, match="adds the token '<"):
        upload_with(store, files)
    same = {
        "added_tokens.json": b'{"<known>": 3}',
        "tokenizer.json": b'{"added_tokens": [{"id": 3, "content": "<known>"}]}',
    }
    assert upload_with(store, same)
    store.close()


@pytest.mark.parametrize(
    "files",
    [
        {"added_tokens.json": rb'{"\ud800": 5}'},
        {"tokenizer_config.json": rb'{"added_tokens_decoder": {"5": {"content": "\uDFFF"}}}'},
        {"tokenizer_config.json": rb'{"chat_template": "\udc00\ud83d"}'},
        {"tokenizer.json": rb'{"added_tokens": [{"id": 5, "content": "\ud800"}]}'},
        {"adapter_config.json": config_bytes(target_modules=["q_proj", "\ud800"])},
    ],
    ids=str,
)
def test_strings_that_are_no_unicode_are_refused_by_file(tmp_path: Path, files: dict[str, bytes]) -> None:
    def base_token_id(token: str) -> int:
        return len(token.encode()) + 4  # as a tokenizer does, this raises for what is no Unicode

    store = AdapterStore(tmp_path / "store", LAYOUT, LIMITS, base_name="base", base_text=BaseText(base_token_id))
    with pytest.raises(Malformed, match=rf"{next(iter(files))} cannot be read: it holds \\ud.* UTF-16 pair"):
        upload_with(store, files)
    assert staged(tmp_path) == []
    store.close()


# ---- limits


def test_a_declared_size_over_the_limit_is_refused_before_anything_is_written(store: AdapterStore) -> None:
    with pytest.raises(TooLarge):
        store.begin(declared_bytes=LIMITS.max_upload_bytes + 1)


def test_a_running_count_stops_an_upload_that_declared_nothing(store: AdapterStore) -> None:
    written = 0
    with store.begin() as upload, upload.open_part("adapter_model") as part:
        for _ in range(LIMITS.max_upload_bytes // 1000):
            written += part.write(b"x" * 1000)
        with pytest.raises(TooLarge):
            part.write(b"x")
    assert written == LIMITS.max_upload_bytes


def test_a_config_over_its_own_limit_is_refused(tmp_path: Path) -> None:
    store = AdapterStore(tmp_path / "store", LAYOUT, StoreLimits(free_disk_floor_bytes=0), base_name="base")
    with store.begin() as upload, upload.open_part("adapter_config") as part, pytest.raises(TooLarge, match="config"):
        part.write(b" " * (2 << 20))
    store.close()


def test_too_many_files_are_refused(store: AdapterStore, tmp_path: Path) -> None:
    directory = write_peft_directory(tmp_path / "in", config_bytes(), safetensors_bytes(good_tensors()))
    for index in range(LIMITS.max_files):
        (directory / f"{index}.txt").touch()
    with store.begin() as upload, pytest.raises(TooLarge, match="files"):
        upload.add_directory(directory)


def test_the_free_disk_floor_refuses_before_and_while_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    floor = StoreLimits(free_disk_floor_bytes=1 << 60)
    store = AdapterStore(tmp_path / "store", LAYOUT, floor, base_name="base")
    with pytest.raises(StorageFull):
        store.begin()
    store.close()

    store = AdapterStore(tmp_path / "store", LAYOUT, LIMITS, base_name="base")
    monkeypatch.setattr(upload_module, "DISK_CHECK_BYTES", 1000)
    with store.begin() as upload, upload.open_part("adapter_model") as part:
        part.write(b"x" * 2000)
        filled = [*os.statvfs(tmp_path)]
        filled[4] = 0  # blocks that are free for us: somebody else has written meanwhile
        monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(filled))
        with pytest.raises(StorageFull):
            part.write(b"x" * 2000)
    assert staged(tmp_path) == []
    store.close()


def test_a_disk_without_room_for_another_file_is_full(store: AdapterStore, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Path.open

    def without_inodes(path: Path, mode: str = "r", *arguments: Any, **named: Any) -> Any:
        if "x" in mode:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return opened(path, mode, *arguments, **named)

    monkeypatch.setattr(Path, "open", without_inodes)
    with store.begin() as upload, pytest.raises(StorageFull, match="full"):
        upload.open_part("adapter_config")


def test_a_name_whose_file_has_gone_can_be_deleted(store: AdapterStore, tmp_path: Path) -> None:
    upload_small(store, LAYOUT, "x")
    (name,) = tmp_path.glob("**/names/x")
    name.unlink()
    store.delete("x")
    assert tuple(store.each()) == ()


def test_refused_uploads_leave_nothing(store: AdapterStore, tmp_path: Path) -> None:
    bad = [
        (config_bytes(use_qalora=True), safetensors_bytes(good_tensors()), Unsupported),
        (config_bytes(), b"nonsense", Malformed),
        (config_bytes(r=9), safetensors_bytes(good_tensors()), BindingError),
    ]
    for config, tensors, error in bad:
        with pytest.raises(error):
            upload_bytes(store, "x", config, tensors)
        assert staged(tmp_path) == []
    assert tuple(store.each()) == ()


def test_no_message_holds_a_path_of_the_server(store: AdapterStore, tmp_path: Path) -> None:
    with store.begin() as upload:
        with pytest.raises(AdapterError) as caught:
            upload.add_directory(tmp_path / "nowhere")
        assert str(tmp_path) not in str(caught.value)


# ---- threads and processes


def test_of_many_uploads_under_one_name_one_content_wins(store: AdapterStore) -> None:
    start = threading.Barrier(8)
    outcomes: list[tuple[int, Any]] = []

    def one(seed: int) -> None:
        start.wait()
        try:
            outcomes.append((seed, upload_small(store, LAYOUT, "same", seed=seed % 3)))
        except Conflict as error:
            outcomes.append((seed, error))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(8)))
    done = [(seed, outcome) for seed, outcome in outcomes if not isinstance(outcome, Conflict)]
    assert sum(created for _, (_, created) in done) == 1
    assert len({record.digest for _, (record, _) in done}) == 1
    winner = done[0][0] % 3
    assert all((seed % 3 == winner) == (not isinstance(outcome, Conflict)) for seed, outcome in outcomes)


def test_uploads_deletes_and_leases_from_many_threads_keep_the_books(store: AdapterStore) -> None:
    def work(worker: int) -> None:
        generator = np.random.default_rng(worker)
        for _ in range(15):
            name = f"n{generator.integers(3)}"
            try:
                upload_small(store, LAYOUT, name, seed=int(generator.integers(2)))
                with store.lease(name) as lease:
                    assert (store.path_of(lease.record.digest) / "adapter_model.safetensors").is_file()
                    store.delete(name)
                    assert (store.path_of(lease.record.digest) / "adapter_model.safetensors").is_file()
            except (Conflict, NotFound):
                pass

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    store.check_integrity()


def test_an_upload_that_is_being_published_is_discarded_afterwards(
    store: AdapterStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that is cancelled leaves its thread at work, and has the upload discarded in another one."""
    entered, may_publish = publishing_waits(monkeypatch)
    upload = store.begin()
    for part_name, data in (("adapter_config", config_bytes()), ("adapter_model", safetensors_bytes(good_tensors()))):
        with upload.open_part(part_name) as part:
            part.write(data)
    with ThreadPoolExecutor(2) as pool:
        finish = pool.submit(upload.finish, "mine")
        assert entered.wait(LIMIT_SECONDS)
        discard = pool.submit(upload.discard)
        with pytest.raises(TimeoutError):  # a moment in which it would have been done
            discard.result(timeout=0.2)
        may_publish.set()
        record, created = finish.result(timeout=LIMIT_SECONDS)
        discard.result(timeout=LIMIT_SECONDS)
    assert created
    assert store.get("mine") == record
    assert {path.name for path in store.path_of(record.digest).iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "manifest.json",
    }


def test_an_upload_that_the_store_has_makes_no_other_wait_and_is_compared_anew_after_a_change(
    store: AdapterStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While its files are compared, others are published and deleted; so are, in the end, the very files."""
    digest = upload_small(store, LAYOUT, "first", seed=1)[0].digest
    compare, entered, may_go_on, times = StoreFiles.is_whole, threading.Event(), threading.Event(), list[bool]()

    def slow(files: StoreFiles, manifest: Manifest, ready: Path) -> bool:
        if manifest.digest == digest:
            entered.set()
            assert may_go_on.wait(LIMIT_SECONDS)
            times.append(compare(files, manifest, ready))
            return times[-1]
        return compare(files, manifest, ready)

    monkeypatch.setattr(StoreFiles, "is_whole", slow)
    with ThreadPoolExecutor(2) as pool:
        again = pool.submit(upload_small, store, LAYOUT, "second", seed=1)
        assert entered.wait(LIMIT_SECONDS)
        other = pool.submit(upload_small, store, LAYOUT, "other", seed=2)
        try:
            assert other.result(LIMIT_SECONDS)[1]
            store.delete("first")
        finally:
            may_go_on.set()
        assert again.result(LIMIT_SECONDS)[0].digest == digest
    assert times == [False, False]  # gone before they were looked at, and looked at anew
    assert (store.path_of(digest) / "adapter_model.safetensors").is_file()
    store.check_integrity()

    monkeypatch.setattr(StoreFiles, "is_whole", compare)
    assert not upload_small(store, LAYOUT, "second", seed=1)[1]

    def delete_after_comparing(files: StoreFiles, manifest: Manifest, ready: Path) -> bool:
        found = compare(files, manifest, ready)
        times.append(found)
        if found:
            store.delete("second")
        return found

    monkeypatch.setattr(StoreFiles, "is_whole", delete_after_comparing)
    assert upload_small(store, LAYOUT, "third", seed=1)[1]
    assert times == [False, False, True, False]
    assert (store.path_of(digest) / "adapter_model.safetensors").is_file()
    store.check_integrity()


@pytest.mark.parametrize("how", ["delete", "release", "repair"])
def test_files_that_are_being_deleted_make_no_upload_wait(
    store: AdapterStore, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Deleting gigabytes takes seconds, and names of all tenants are changed under one lock."""
    digest = upload_small(store, LAYOUT, "mine", seed=1)[0].digest
    remove, entered, may_go_on = shutil.rmtree, threading.Event(), threading.Event()

    def slow(directory: Path, ignore_errors: bool = False) -> None:
        if directory.name.startswith("gone-"):
            entered.set()
            assert may_go_on.wait(LIMIT_SECONDS)
        remove(directory, ignore_errors=ignore_errors)

    def take_away() -> None:
        if how == "repair":
            (store.path_of(digest) / "manifest.json").write_bytes(b"damaged")
            upload_small(store, LAYOUT, "mine", seed=1)
        else:
            with store.lease("mine") if how == "release" else nullcontext():
                store.delete("mine")
            store.settle()

    monkeypatch.setattr(shutil, "rmtree", slow)
    with ThreadPoolExecutor(2) as pool:
        try:
            first = pool.submit(take_away)
            assert entered.wait(LIMIT_SECONDS)
            assert pool.submit(upload_small, store, LAYOUT, "other", seed=2).result(LIMIT_SECONDS)[1]
        finally:
            may_go_on.set()
        first.result(LIMIT_SECONDS)
    store.check_integrity()
    assert not list(store.path_of(store.get("other").digest).parents[1].glob("staging/*"))


def test_a_start_does_not_mind_who_deletes_what_was_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that has closed its store may still be deleting files that it took out before."""
    AdapterStore(tmp_path, LAYOUT, LIMITS, base_name="base").close()
    (staging,) = tmp_path.glob("*/staging")
    (staging / "gone-1").mkdir()
    (staging / "gone-1" / "adapter_model.safetensors").write_bytes(b"")
    unlink, num_removed = os.unlink, 0

    def too_late(path: Any, *, dir_fd: int | None = None) -> None:
        nonlocal num_removed
        unlink(path, dir_fd=dir_fd)
        num_removed += 1
        raise FileNotFoundError(2, "No such file or directory", path)

    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", too_late)
        AdapterStore(tmp_path, LAYOUT, LIMITS, base_name="base").close()
    assert (num_removed, list(staging.iterdir())) == (1, [])


def test_a_link_in_an_adapters_place_is_replaced_and_hinders_no_start(tmp_path: Path) -> None:
    """An operator may have moved its files to another disk; these are left alone."""
    store = AdapterStore(tmp_path / "store", LAYOUT, LIMITS, base_name="base")
    upload_small(store, LAYOUT, "x")
    path, elsewhere = store.path_of(store.get("x").digest), tmp_path / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    (elsewhere / "adapter_model.safetensors").write_bytes(b"damaged")
    upload_small(store, LAYOUT, "x")
    assert not path.is_symlink()
    store.close()
    (path.parents[1] / "staging" / "left").symlink_to(elsewhere)
    store = AdapterStore(tmp_path / "store", LAYOUT, LIMITS, base_name="base")
    store.check_integrity()
    assert list((path.parents[1] / "staging").iterdir()) == []
    assert (elsewhere / "adapter_model.safetensors").read_bytes() == b"damaged"
    store.close()


@pytest.mark.usefixtures("store")
def test_two_servers_cannot_share_a_store(tmp_path: Path) -> None:
    with pytest.raises(StoreBusy):
        AdapterStore(tmp_path / "store", LAYOUT, LIMITS, base_name="base")


def test_everything_is_there_after_a_restart(tmp_path: Path) -> None:
    store = AdapterStore(tmp_path / "store", LAYOUT, LIMITS, base_name="base")
    records = [upload_small(store, LAYOUT, name, seed=index)[0] for index, name in enumerate(("a", "b", "c"))]
    held = store.lease("b")
    store.delete("b")
    unfinished = store.begin()
    unfinished.open_part("adapter_config").close()
    store.close()  # as a killed process would, with a lease held and an upload under way
    assert staged(tmp_path)

    again = AdapterStore(tmp_path / "store", LAYOUT, LIMITS, base_name="base")
    again.check_integrity()
    assert tuple(again.each()) == (records[0], records[2])
    assert staged(tmp_path) == []
    with pytest.raises(NotFound):
        again.path_of(held.record.digest)
    again.close()


def test_more_adapters_than_manifests_in_memory(store: AdapterStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog_module, "MAX_MANIFESTS_KEPT", 2)
    records = [upload_small(store, LAYOUT, f"n{index}", seed=index)[0] for index in range(5)]
    read_manifest, read = StoreFiles.read_manifest, list[str]()

    def noted(files: StoreFiles, digest: str) -> Manifest:
        read.append(digest)
        return read_manifest(files, digest)

    monkeypatch.setattr(StoreFiles, "read_manifest", noted)
    assert tuple(store.each()) == tuple(records)
    read.clear()
    for index in (3, 4, 4, 3, 0, 3, 4):  # the two that were asked for last are kept
        assert store.get(f"n{index}") == records[index]
    assert read == [records[0].digest, records[4].digest]


def test_names_are_counted_without_reading_a_manifest(store: AdapterStore, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (store.num_names(), store.names()) == (0, {})
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        upload_bytes(store, name, config_bytes(), safetensors_bytes(good_tensors(seed=seed)))
    store.delete("b")
    with monkeypatch.context() as patched:
        patched.setattr(StoreFiles, "read_manifest", None)  # nobody has asked for one yet, so that none is kept
        with pytest.raises(TypeError):
            store.get("a")
        assert store.num_names() == 2
        assert list(store.names()) == ["a", "c"]
        assert store.names()["a"].digest != store.names()["c"].digest


def test_what_is_known_of_adapters_is_nothing_for_the_garbage_collector_to_walk_through(store: AdapterStore) -> None:
    for seed in range(2):
        tensors = safetensors_bytes(good_tensors(seed=seed))
        upload_bytes(store, "a", config_bytes(), tensors, condition=rules.move)
    record, version, manifest = store.versions("a"), store.versions("a").current, store.get("a").manifest
    assert len(record.versions) == 2 and manifest.modules
    gc.collect()  # which is when a tuple of such is let go
    known = [record, record.versions, version, manifest, manifest.modules, *manifest.modules]
    assert [one for one in known if gc.is_tracked(one)] == []


def test_adapters_of_another_base_are_left_alone(tmp_path: Path) -> None:
    other = small_layout(num_layers=3)
    store = AdapterStore(tmp_path / "store", LAYOUT, LIMITS, base_name="base")
    record, _ = upload_small(store, LAYOUT, "a")
    store.close()
    elsewhere = AdapterStore(tmp_path / "store", other, LIMITS, base_name="base")
    assert tuple(elsewhere.each()) == ()
    elsewhere.close()
    store = AdapterStore(tmp_path / "store", LAYOUT, LIMITS, base_name="base")
    assert tuple(store.each()) == (record,)
    store.close()


def test_damaged_files_of_names_stop_no_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = AdapterStore(tmp_path / "store", LAYOUT, LIMITS, base_name="base")
    record, _ = upload_small(store, LAYOUT, "a")
    lost, _ = upload_small(store, LAYOUT, "lost", seed=5)
    names = store.path_of(record.digest).parent.parent / "names"
    store.close()
    (names / "broken").write_bytes(b"{")
    (names / "flipped").write_bytes(b'{"digest": "\xff"}')
    evil = {"number": 1, "digest": "../../x", "created_at_seconds": 1.0}
    (names / "evil").write_text(json.dumps({"versions": [evil]}))
    (names / "directory").mkdir()
    os.mkfifo(names / "fifo")
    (names.parent / "adapters" / lost.digest / "manifest.json").unlink()
    store = AdapterStore(tmp_path / "store", LAYOUT, LIMITS, base_name="base")
    assert tuple(store.each()) == (record,)
    assert "broken" in caplog.text
    assert "names/evil is ignored: not a name of this store" in caplog.text
    assert "directory" in caplog.text
    assert "fifo" in caplog.text
    assert "lost" in caplog.text
    store.close()


def refuse_to_read(monkeypatch: pytest.MonkeyPatch, refused: Path, code: int) -> None:
    """Tests may run as root, who may read everything."""
    read_bytes = Path.read_bytes

    def read(path: Path) -> bytes:
        if path == refused:
            raise OSError(code, os.strerror(code), str(path))
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", read)


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES])
def test_a_name_that_cannot_be_read_stops_no_start_and_keeps_its_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    """What has no name is removed at a start; but this one may have a name, which can be read another time."""
    store = AdapterStore(tmp_path / "store", LAYOUT, LIMITS, base_name="base")
    records = [upload_small(store, LAYOUT, name, seed=seed)[0] for seed, name in enumerate(("a", "b"))]
    names = store.path_of(records[0].digest).parent.parent / "names"
    store.close()
    with monkeypatch.context() as patched:
        refuse_to_read(patched, names / "b", code)
        store = AdapterStore(tmp_path / "store", LAYOUT, LIMITS, base_name="base")
        assert tuple(store.each()) == (records[0],)
        assert "names/b" in caplog.text
        store.close()
    store = AdapterStore(tmp_path / "store", LAYOUT, LIMITS, base_name="base")
    assert list(store.each()) == records
    store.check_integrity()
    store.close()


def test_a_process_that_may_open_no_more_files_says_so_and_blames_no_adapter(
    store: AdapterStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, _ = upload_small(store, LAYOUT, "x")
    path = store.path_of(record.digest)
    for refused, look_up in (
        (path / "manifest.json", lambda: tuple(store.each())),
        (path.parent.parent / "names/x", store.check_integrity),
    ):
        with monkeypatch.context() as patched:
            refuse_to_read(patched, refused, errno.EMFILE)
            with pytest.raises(OSError, match=os.strerror(errno.EMFILE)):
                look_up()


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES])
def test_a_manifest_that_cannot_be_read_hides_no_other_adapter(
    store: AdapterStore, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    whole, _ = upload_small(store, LAYOUT, "whole", seed=5)
    record, _ = upload_small(store, LAYOUT, "hurt")
    refuse_to_read(monkeypatch, store.path_of(record.digest) / "manifest.json", code)
    assert tuple(store.each()) == (whole,)
    with pytest.raises(Damaged, match="upload it again"):
        store.lease("hurt")


def test_a_directory_in_a_manifest_s_place_survives_a_start_and_is_replaced(tmp_path: Path) -> None:
    store = AdapterStore(tmp_path / "store", LAYOUT, LIMITS, base_name="base")
    record, _ = upload_small(store, LAYOUT, "hurt")
    manifest = store.path_of(record.digest) / "manifest.json"
    store.close()
    manifest.unlink()
    manifest.mkdir()
    store = AdapterStore(tmp_path / "store", LAYOUT, LIMITS, base_name="base")
    assert tuple(store.each()) == ()
    with pytest.raises(Damaged, match="upload it again"):
        store.lease("hurt")
    upload_small(store, LAYOUT, "hurt")
    assert [one.manifest for one in store.each()] == [record.manifest]
    store.close()


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'{"digest": "\xff"}', None, "directory"],
    ids=["empty", "cut", "other", "flipped", "missing", "directory"],
)
def test_a_damaged_adapter_is_told_and_can_be_deleted_or_uploaded_again(
    store: AdapterStore,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    content: bytes | str | None,
) -> None:
    monkeypatch.setattr(catalog_module, "MAX_MANIFESTS_KEPT", 1)
    whole, _ = upload_small(store, LAYOUT, "whole", seed=5)
    record, _ = upload_small(store, LAYOUT, "hurt")

    def hurt() -> None:
        assert store.get("whole") == whole  # whose manifest is the one that is kept
        path = store.path_of(record.digest) / "manifest.json"
        path.unlink()
        if content == "directory":
            path.mkdir()
        elif isinstance(content, bytes):
            path.write_bytes(content)

    hurt()
    assert tuple(store.each()) == (whole,)
    assert "hurt" in caplog.text
    for look_up in (store.get, store.lease):
        with pytest.raises(Damaged, match="upload it again"):
            look_up("hurt")
    assert upload_small(store, LAYOUT, "hurt")[0].digest == record.digest
    assert {one.name for one in store.each()} == {"hurt", "whole"}
    hurt()
    assert upload_small(store, LAYOUT, "again")[0].digest == record.digest
    assert {one.name for one in store.each()} == {"again", "hurt", "whole"}
    store.delete("again")
    hurt()
    assert store.delete("hurt") == record.digest
    assert store.names().keys() == {"whole"}


@pytest.mark.parametrize("damage", ["flipped", "cut", "missing"])
@pytest.mark.parametrize("name", ["hurt", "again"])
def test_an_upload_replaces_damaged_tensors(store: AdapterStore, damage: str, name: str) -> None:
    """And says so: the engine may have read them."""
    gone: list[str] = []
    store.on_gone = gone.append
    record, _ = upload_small(store, LAYOUT, "hurt")
    path = store.path_of(record.digest) / "adapter_model.safetensors"
    whole = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(whole[:-1] + (bytes([whole[-1] ^ 1]) if damage == "flipped" else b""))
    assert upload_small(store, LAYOUT, name)[0].digest == record.digest
    assert path.read_bytes() == whole
    assert gone == [record.digest]
    inode = path.stat().st_ino
    assert not upload_small(store, LAYOUT, name)[1]
    assert path.stat().st_ino == inode
    assert gone == [record.digest]


@pytest.mark.parametrize(
    ("file", "whole", "damaged"),
    [
        ("manifest.json", b'"scaling":2.0', b'"scaling":6.0'),
        ("manifest.json", b'"rank":4', b'"rank":5'),
        ("adapter_config.json", b'"lora_alpha": 8', b'"lora_alpha": 9'),
        ("adapter_config.json", b'"r": 4', b'"r": 4,,'),
    ],
)
@pytest.mark.parametrize("name", ["hurt", "again"])
def test_an_upload_replaces_files_that_parse_and_say_something_else(
    store: AdapterStore, file: str, whole: bytes, damaged: bytes, name: str
) -> None:
    """The engine scales by the manifest: it would answer wrongly, and nothing else would show it."""
    gone: list[str] = []
    store.on_gone = gone.append
    record, _ = upload_small(store, LAYOUT, "hurt")
    path = store.path_of(record.digest) / file
    content = path.read_bytes()
    assert whole in content
    path.write_bytes(content.replace(whole, damaged, 1))
    assert upload_small(store, LAYOUT, name)[0].digest == record.digest
    assert path.read_bytes() == content
    assert store.get("hurt").manifest == record.manifest
    assert gone == [record.digest]
    inode = path.stat().st_ino
    assert not upload_small(store, LAYOUT, name)[1]
    assert path.stat().st_ino == inode
    assert gone == [record.digest]


def test_an_upload_whose_notes_and_training_settings_differ_replaces_nothing(store: AdapterStore) -> None:
    gone: list[str] = []
    store.on_gone = gone.append
    tensors = safetensors_bytes(good_tensors())
    record, _ = upload_bytes(store, "x", config_bytes(), tensors)
    inode = store.path_of(record.digest).stat().st_ino
    again, created = upload_bytes(store, "x", config_bytes(lora_dropout=0.5, target_modules=["q_proj", "?"]), tensors)
    assert (again.digest, created) == (record.digest, False)
    assert again.manifest.notes != record.manifest.notes
    assert store.path_of(record.digest).stat().st_ino == inode
    assert gone == []


def test_a_manifest_of_a_version_before_it_knew_its_configuration_is_as_good(store: AdapterStore) -> None:
    """The configuration beside it is compared with the upload's: with another one all is replaced, and known then."""
    gone: list[str] = []
    store.on_gone = gone.append
    tensors = safetensors_bytes(good_tensors())
    record, _ = upload_bytes(store, "x", config_bytes(), tensors)
    path = store.path_of(record.digest) / "manifest.json"
    older = json.loads(path.read_bytes())
    assert older.pop("config") == hashlib.sha256(config_bytes()).hexdigest()
    path.write_text(json.dumps(older))
    assert store.get("x") == record
    assert not upload_bytes(store, "x", config_bytes(), tensors)[1]
    assert (json.loads(path.read_bytes()), gone) == (older, [])
    other = config_bytes(lora_dropout=0.5)
    assert upload_bytes(store, "x", other, tensors) == (record, True)
    assert json.loads(path.read_bytes()) == older | {"config": hashlib.sha256(other).hexdigest()}
    assert not upload_bytes(store, "x", config_bytes(), tensors)[1]
    assert gone == [record.digest]


def test_damaged_tensors_are_told_to_be_replaced_although_the_upload_s_own_name_cannot_be_written(
    store: AdapterStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files are new for the other name already; sent again, the upload would find them whole and say nothing."""
    gone: list[str] = []
    store.on_gone = gone.append
    record, _ = upload_small(store, LAYOUT, "hurt")
    path = store.path_of(record.digest) / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(StoreFiles, "write_name", refuse)
        with pytest.raises(StorageFull, match="full"):
            upload_small(store, LAYOUT, "again")
    assert gone == [record.digest]
    assert store.names().keys() == {"hurt"}


def test_damaged_tensors_are_told_to_be_replaced_although_their_last_user_has_left(store: AdapterStore) -> None:
    """Deleted and uploaded again, as the error of the damage says: nobody is left who would have them forgotten."""
    gone: list[str] = []
    entered, gate = threading.Event(), threading.Event()

    def on_gone(digest: str) -> None:
        gone.append(digest)
        if digest == other.digest:
            entered.set()
            assert gate.wait(LIMIT_SECONDS)

    store.on_gone = on_gone
    other, _ = upload_small(store, LAYOUT, "other", seed=1)
    record, _ = upload_small(store, LAYOUT, "hurt")
    path = store.path_of(record.digest) / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    leases = [store.lease(name) for name in ("other", "hurt")]
    store.delete("other")
    store.delete("hurt")
    leases[0].release()
    assert entered.wait(LIMIT_SECONDS)
    leases[1].release()  # its files go once those of the other are told of
    upload_small(store, LAYOUT, "hurt")
    gate.set()
    store.check_integrity()
    assert gone == [other.digest, record.digest]


def test_a_damaged_adapter_stays_where_it_is_when_the_new_files_cannot_be_moved_there(
    store: AdapterStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, _ = upload_small(store, LAYOUT, "hurt")
    path = store.path_of(record.digest) / "adapter_model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    rename, num_failures = Path.rename, 0

    def fail_once(source: Path, target: Path) -> Path:
        nonlocal num_failures
        if target == path.parent and not num_failures:
            num_failures += 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rename(source, target)

    monkeypatch.setattr(Path, "rename", fail_once)
    with pytest.raises(StoreUnreachable, match=os.strerror(errno.EIO)):
        upload_small(store, LAYOUT, "hurt")
    assert path.read_bytes() == whole[:-1]
    upload_small(store, LAYOUT, "hurt")
    assert path.read_bytes() == whole
    store.check_integrity()


def test_tensors_that_cannot_be_read_are_replaced(store: AdapterStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bad sector is the damage that occurs."""
    record, _ = upload_small(store, LAYOUT, "hurt")
    inode = store.path_of(record.digest).stat().st_ino

    def fail(*_: Any, **__: Any) -> bool:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr("adapters.files.disk.cmp", fail)
        upload_small(store, LAYOUT, "hurt")
    assert store.path_of(record.digest).stat().st_ino != inode
    store.check_integrity()


def test_a_directory_that_cannot_be_synced_undoes_no_rename(
    store: AdapterStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The name would point at files that are removed again, and the next start would take both away."""

    def fail(_path: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    upload_small(store, LAYOUT, "x", rank=2)
    with monkeypatch.context() as patched:
        patched.setattr(
            "adapters.files.durable_files.sync_directory", lambda path: None if "staging" in str(path) else fail(path)
        )
        record, _ = upload_small(store, LAYOUT, "y", rank=3)
    assert "failure of power" in caplog.text
    assert store.get("y") == record
    store.check_integrity()


@pytest.mark.parametrize(
    ("dtype", "factor", "alpha", "is_large"),
    [
        ("<f4", 1, 8, False),
        ("<f4", 1e5, 8, True),
        ("<f4", -1e5, 8, True),
        ("<f4", 1, 1e9, True),
        ("<f2", 1, 8, False),
        ("<f2", -1e3, 8, True),
    ],
)
def test_weights_that_overflow_are_taken_with_a_warning(
    store: AdapterStore, dtype: str, factor: float, alpha: float, is_large: bool
) -> None:
    tensors = {name: (data * factor).astype(dtype) for name, data in good_tensors().items()}
    record, _ = upload_bytes(store, "x", config_bytes(lora_alpha=alpha), safetensors_bytes(tensors))
    assert any("so large" in note and "probe" in note for note in record.manifest.notes) == is_large


# ---- copies of base weights


def test_a_copy_of_the_base_embedding_is_left_out_and_a_changed_one_refused(tmp_path: Path) -> None:
    embedding = np.random.default_rng(0).standard_normal((VOCAB, HIDDEN)).astype("<f4")
    base = tmp_path / "base"
    base.mkdir()
    bf16 = (embedding.view("<u4") >> 16).astype("<u2")
    (base / "model.safetensors").write_bytes(safetensors_bytes({"model.embed_tokens.weight": bf16}))
    widened = (bf16.astype("<u4") << 16).view("<f4")
    store = AdapterStore(tmp_path / "store", LAYOUT, LIMITS, base_name="base", base_dir=base)
    config = config_bytes(r=3, target_modules=["embed_tokens"])
    lora = lora_tensors(LAYOUT, ["model.embed_tokens"], 3)
    name = "base_model.model.model.embed_tokens.base_layer.weight"
    plain, _ = upload_bytes(store, "plain", config, safetensors_bytes(lora))
    for copy in (bf16, widened, widened.astype("<f2")):
        record, _ = upload_bytes(store, "copy", config, safetensors_bytes({**lora, name: copy}))
        assert record.digest == plain.digest
        assert name in record.manifest.notes[0]
        store.delete("copy")
    changed = widened.copy()
    changed[-1, -1] *= 1.5
    with pytest.raises(BindingError, match="differs from the base's"):
        upload_bytes(store, "changed", config, safetensors_bytes({**lora, name: changed}))
    (base / "model.safetensors").rename(base / "model.gguf")  # whose weights are rounded, so no copy equals them
    record, _ = upload_bytes(store, "rounded", config, safetensors_bytes({**lora, name: changed}))
    assert record.digest == plain.digest
    assert any("not compared" in note for note in record.manifest.notes)
    store.close()


def test_notes_and_message_are_short_however_many_copies_there_are(tmp_path: Path) -> None:
    embedding = np.ones((VOCAB, HIDDEN), "<f4")
    base = tmp_path / "base"
    base.mkdir()
    (base / "model.safetensors").write_bytes(safetensors_bytes({"model.embed_tokens.weight": embedding}))
    store = AdapterStore(tmp_path / "store", LAYOUT, LIMITS, base_name="base", base_dir=base)
    config = config_bytes(r=3, target_modules=["embed_tokens"])
    lora = lora_tensors(LAYOUT, ["model.embed_tokens"], 3)
    names = [f"{'module.' * at}base_model.model.model.embed_tokens.base_layer.weight" for at in range(40)]
    record, _ = upload_bytes(store, "x", config, safetensors_bytes({**lora, **dict.fromkeys(names, embedding)}))
    assert [note for note in record.manifest.notes if "repeats" not in note] == ["The same is true of 32 more."]
    assert len(record.manifest.notes) == 9
    with pytest.raises(BindingError, match="differs from the base's") as caught:
        upload_bytes(store, "y", config, safetensors_bytes({**lora, **dict.fromkeys(names, 2 * embedding)}))
    assert "and 32 more" in str(caught.value)
    assert len(caught.value.problems) == 40
    store.close()


def test_a_saved_module_that_repeats_the_base_is_no_fault_of_what_is_stored(tmp_path: Path) -> None:
    """It is left out of what is stored, whose configuration names it still."""
    base = tmp_path / "base"
    base.mkdir()
    head = np.ones((VOCAB, HIDDEN), "<f4")
    (base / "model.safetensors").write_bytes(safetensors_bytes({"lm_head.weight": head}))
    store = AdapterStore(tmp_path / "store", LAYOUT, LIMITS, base_name="base", base_dir=base)
    tensors = safetensors_bytes({**good_tensors(), "base_model.model.lm_head.weight": head})
    config = config_bytes(modules_to_save=["lm_head"])
    upload_bytes(store, "x", config, tensors)
    (file,) = (tmp_path / "store").rglob("adapter_model.safetensors")
    before = file.stat().st_ino
    record, _ = upload_bytes(store, "x", config_bytes(modules_to_save=["lm_head"], lora_dropout=0.5), tensors)
    assert any("repeats the base's own tensor" in note for note in record.manifest.notes)
    assert file.stat().st_ino == before, "it was taken for damaged and replaced"
    store.close()


@pytest.fixture(params=[1, 1 << 18], ids=["in-a-thread", "at-once"])
def beside_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of so many bytes are read beside the writing of the next one."""
    monkeypatch.setattr(upload_module, "_BESIDE_BYTES", request.param)


@pytest.mark.usefixtures("beside_bytes")
@pytest.mark.parametrize("chunk_bytes", [1, 7, 1000, 1 << 20])
def test_tensors_are_read_while_they_come_and_not_again(
    chunk_bytes: int, store: AdapterStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is one that PEFT saves, and its configuration comes first."""
    record, _ = upload_bytes(store, "saved", config_bytes(), safetensors_bytes(good_tensors()))
    peft_directory = store.path_of(record.digest)
    parts = {name: (peft_directory / name).read_bytes() for name in (CONFIG_FILE, TENSOR_FILE)}
    with store.begin() as upload:
        _send(upload, parts, chunk_bytes)
        monkeypatch.setattr(canonical_file, "read_chunks", None)
        assert upload.finish("again")[0].digest == record.digest


def test_pieces_are_written_while_others_wait_to_be_read(tmp_path: Path) -> None:
    may_read, read = threading.Event(), []

    def steps() -> Generator[None, bytes | memoryview, None]:
        while True:
            piece = yield
            assert may_read.wait(LIMIT_SECONDS)
            read.append(piece[0])

    budget = upload_module.Budget(tmp_path, StoreLimits(), upload_module.HeldBytes(None, ""))
    pieces = [bytes([number]) * upload_module._BESIDE_BYTES for number in range(9)]
    with upload_module.UploadPart(tmp_path / "part", "tensors", budget) as part, ThreadPoolExecutor(1) as writer:
        part.follow(steps())
        try:
            written = writer.submit(lambda: [part.write(piece) for piece in pieces[:4]])
            wait([written], LIMIT_SECONDS / 2)
            assert written.done()
        finally:
            may_read.set()
        for piece in pieces[4:]:
            part.write(piece)
        part.write(b"\xff")
    assert bytes(read) == bytes([*range(9), 0xFF])


def test_the_digest_is_the_same_in_whatever_order_the_files_come(store: AdapterStore) -> None:
    """Those that the digest covers may be there when the tensors come, or not."""
    record, _ = upload_bytes(store, "plain", config_bytes(), safetensors_bytes(good_tensors()))
    digests = set()
    parts = {
        CONFIG_FILE: config_bytes(),
        TENSOR_FILE: (store.path_of(record.digest) / TENSOR_FILE).read_bytes(),
        "chat_template.jinja": b"{{ messages }}",
    }
    for number, names in enumerate(permutations(parts)):
        with store.begin() as upload:
            _send(upload, {name: parts[name] for name in names}, 100)
            digests.add(upload.finish(f"a{number}")[0].digest)
    assert len(digests) == 1 and digests != {record.digest}


@pytest.mark.usefixtures("beside_bytes")
@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data + b"x", lambda data: data[:-4] + NAN])
def test_what_is_wrong_with_the_last_bytes_is_refused(store: AdapterStore, change: Callable[[bytes], bytes]) -> None:
    record, _ = upload_bytes(store, "plain", config_bytes(), safetensors_bytes(good_tensors()))
    data = (store.path_of(record.digest) / TENSOR_FILE).read_bytes()
    with store.begin() as upload:
        _send(upload, {CONFIG_FILE: config_bytes(), TENSOR_FILE: change(data)}, 100)
        with pytest.raises(Malformed, match=r"cut off|too long|holds NaN"):
            upload.finish("bad")


def _send(upload: Upload, parts: dict[str, bytes], chunk_bytes: int) -> None:
    for name, data in parts.items():
        with upload.open_part("file", name) as part:
            for start in range(0, len(data), chunk_bytes):
                part.write(data[start : start + chunk_bytes])


def test_a_module_saved_twice_is_stored_once_if_both_are_equal(store: AdapterStore) -> None:
    """As PEFT's `save_embedding_layers=True` does beside modules_to_save."""
    config = config_bytes(modules_to_save=["lm_head"])
    head = np.random.default_rng(0).standard_normal((VOCAB, HIDDEN)).astype("<f4")
    once, twice = "base_model.model.lm_head.weight", "base_model.model.lm_head.modules_to_save.weight"
    plain, _ = upload_bytes(store, "plain", config, safetensors_bytes({**good_tensors(), once: head}))
    record, _ = upload_bytes(store, "twice", config, safetensors_bytes({**good_tensors(), once: head, twice: head}))
    assert record.digest == plain.digest
    other = head.copy()
    other[-1, -1] += 1
    with pytest.raises(BindingError, match="which the file has for the same module"):
        upload_bytes(store, "other", config, safetensors_bytes({**good_tensors(), once: head, twice: other}))


def test_the_digest_is_what_it_was_in_earlier_versions(store: AdapterStore) -> None:
    """Stored adapters are found by it: a change of how it is made needs a migration."""
    module = Q[0]
    a, b = np.ones((1, HIDDEN), "<f4"), np.full((8, 1), 2, "<f4")
    tensors = {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
    config = config_bytes(r=1, lora_alpha=3, layers_to_transform=[0])
    record, _ = upload_bytes(store, "x", config, safetensors_bytes(tensors))
    head = f'["multilora adapter 1",[["{module}","{(3.0).hex()}","F32",[1,6],"F32",[8,1]]],null]\n'
    assert record.digest == hashlib.sha256(head.encode() + a.tobytes() + b.tobytes()).hexdigest()

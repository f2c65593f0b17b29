"""Archives: whole adapters come in, tricks do not come out."""

from __future__ import annotations

import gzip
import io
import struct
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adapters.errors import AdapterError, Malformed, TooLarge, Unsupported
from adapters.files.manifest import AdapterRecord
from adapters.store.store import AdapterStore, StoreLimits
from adapters.upload import archives as unpack_module
from tests.support.adapter_files import config_bytes, lora_tensors, modules_ending, safetensors_bytes, small_layout
from tests.support.tiers import examples

LAYOUT = small_layout()
TENSORS = safetensors_bytes(lora_tensors(LAYOUT, modules_ending(LAYOUT, "q_proj"), 4))
GOOD = {"adapter_config.json": config_bytes(), "adapter_model.safetensors": TENSORS}
LIMITS = StoreLimits(max_upload_bytes=3 << 20, max_files=20, free_disk_floor_bytes=0)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[AdapterStore]:
    opened = AdapterStore(tmp_path / "store", LAYOUT, LIMITS, base_name="base")
    yield opened
    opened.check_integrity()
    outside = [
        path for path in tmp_path.rglob("*") if path.is_file() and "store" not in path.relative_to(tmp_path).parts
    ]
    assert outside == []
    assert list((tmp_path / "store").glob("*/staging/*")) == []
    opened.close()


def tar_gz(files: dict[str, bytes], *members: tarfile.TarInfo) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for member in members:
            tar.addfile(member)
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return out.getvalue()


def zip_of(files: dict[str, bytes], *members: tuple[zipfile.ZipInfo, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, data in files.items():
            packed.writestr(name, data)
        for member, data in members:
            packed.writestr(member, data)
    return out.getvalue()


PACKERS = [tar_gz, zip_of]


def send(store: AdapterStore, archive: bytes, name: str = "x") -> AdapterRecord:
    with store.begin() as upload:
        with upload.open_part("archive", "adapter.tar.gz") as part:
            part.write(archive)
        return upload.finish(name)[0]


@pytest.mark.parametrize("pack", PACKERS)
@pytest.mark.parametrize("inside", ["", "my-adapter/", "./", "a/b/c/"])
def test_an_adapter_is_found_wherever_it_lies(store: AdapterStore, pack: type, inside: str) -> None:
    files = {"README.md": b"top", **{inside + name: data for name, data in GOOD.items()}, inside + "notes.txt": b"x"}
    record = send(store, pack(files))
    assert sorted(note.split()[2] for note in record.manifest.notes) == sorted(
        ["README.md", str(Path(inside + "notes.txt"))]
    )


@pytest.mark.parametrize("pack", PACKERS)
def test_what_a_mac_adds_is_not_mentioned(store: AdapterStore, pack: type) -> None:
    record = send(store, pack({**GOOD, "__MACOSX/._adapter_config.json": b"x", ".DS_Store": b"x", "._x": b"x"}))
    assert record.manifest.notes == ()


def test_a_zip_with_folders_as_windows_writes_them_is_read(store: AdapterStore) -> None:
    files = {f"my-adapter\\{name}": data for name, data in GOOD.items()}
    assert send(store, zip_of({"my-adapter\\": b"", **files})).manifest.notes == ()
    with pytest.raises(Malformed, match=r"pack names with /"):
        send(store, tar_gz(files))


def test_directories_in_archives_are_fine(store: AdapterStore) -> None:
    directory = tarfile.TarInfo("my-adapter")
    directory.type = tarfile.DIRTYPE
    assert send(store, tar_gz({f"my-adapter/{name}": data for name, data in GOOD.items()}, directory))
    folder = zipfile.ZipInfo("my-adapter/")
    assert send(store, zip_of(GOOD, (folder, b"")))


@pytest.mark.parametrize("pack", PACKERS)
@pytest.mark.parametrize(
    "name", ["../evil.txt", "/etc/evil", "a/../../evil", "..", "a\\..\\evil", "C:/evil", "a/../adapter_config.json"]
)
def test_names_that_lead_out_are_refused(store: AdapterStore, pack: type, name: str) -> None:
    with pytest.raises(Malformed, match="outside"):
        send(store, pack({**GOOD, name: b"evil"}))


@pytest.mark.parametrize(
    "kind",
    [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, tarfile.GNUTYPE_SPARSE],
)
@pytest.mark.parametrize("name", ["link", "adapter_model.safetensors"])
def test_links_and_devices_in_tars_are_refused(store: AdapterStore, kind: bytes, name: str) -> None:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, "/etc/passwd"
    with pytest.raises((Unsupported, Malformed)):
        send(store, tar_gz({"adapter_config.json": config_bytes()}, member))


def test_names_that_are_no_unicode_are_shown_all_the_same(store: AdapterStore) -> None:
    record = send(store, tar_gz({**GOOD, "caf\udce9.txt": b""}))
    assert record.manifest.notes == ("The file caf?.txt is not needed and was left out.",)
    assert store.get("x") == record
    with pytest.raises(Malformed, match="2 adapters") as caught:
        send(
            store, tar_gz({f"{directory}/{name}": data for directory in ("a", "\udce9") for name, data in GOOD.items()})
        )
    assert str(caught.value).encode()


def test_links_in_zips_are_refused(store: AdapterStore) -> None:
    member = zipfile.ZipInfo("link")
    member.create_system, member.external_attr = 3, 0o120777 << 16
    with pytest.raises(Unsupported, match="link"):
        send(store, zip_of(GOOD, (member, b"/etc/passwd")))


@pytest.mark.parametrize("pack", PACKERS)
@pytest.mark.parametrize("name", ["adapter_model.bin", "deep/other.pt", "x.pkl", "other.safetensors"])
def test_pickles_and_other_weights_are_refused_by_name(store: AdapterStore, pack: type, name: str) -> None:
    with pytest.raises(Unsupported, match=Path(name).name):
        send(store, pack({**GOOD, name: b"x"}))


@pytest.mark.parametrize("pack", PACKERS)
def test_two_adapters_in_one_archive_are_refused(store: AdapterStore, pack: type) -> None:
    files = {f"{directory}/{name}": data for directory in ("a", "b") for name, data in GOOD.items()}
    with pytest.raises(Malformed, match="2 adapters"):
        send(store, pack(files))


CHECKPOINT = {
    # Before PEFT has made a difference of it, which it does when training ends.
    "adapter_config.json": config_bytes(init_lora_weights="pissa"),
    "adapter_model.safetensors": TENSORS[:-4] + b"\x00\x00\x80\x3f",
    "tokenizer.json": b"{}",
    "optimizer.pt": b"x",
    "global_step5/mp_rank_00_model_states.pt": b"x",
}


@pytest.mark.parametrize("pack", PACKERS)
@pytest.mark.parametrize("inside", ["", "my-adapter/"])
@pytest.mark.parametrize("come_first", [False, True])
def test_of_checkpoints_below_an_adapter_it_is_taken_and_their_folders_are_named(
    store: AdapterStore, pack: type, inside: str, come_first: bool
) -> None:
    alone = send(store, pack(GOOD), "alone")
    own = {inside + name: data for name, data in GOOD.items()}
    folders = [f"{inside}checkpoint-{step}" for step in (5, 10)]
    below = {f"{folder}/{name}": data for folder in folders for name, data in CHECKPOINT.items()}
    record = send(store, pack({**below, **own} if come_first else {**own, **below}))
    assert record.digest == alone.digest
    assert list(record.manifest.notes) == [
        f"The folder {folder} is not needed and was left out." for folder in sorted(folders)
    ]


@pytest.mark.parametrize("pack", PACKERS)
@pytest.mark.parametrize(
    ("config", "error", "word"), [(b'{"peft_type": "IA3"}', Unsupported, "only LORA is"), (b"[", Malformed, "JSON")]
)
def test_of_several_configurations_the_refused_one_is_named(
    store: AdapterStore, pack: type, config: bytes, error: type[Exception], word: str
) -> None:
    with pytest.raises(error, match=rf"{word}.*'best/other/adapter_config\.json'.*pack without its folder"):
        send(store, pack({**GOOD, "best/other/adapter_config.json": config}))
    with pytest.raises(error, match=word) as alone:
        send(store, pack({**GOOD, "adapter_config.json": config}))
    assert "folder" not in str(alone.value)


@pytest.mark.parametrize("pack", PACKERS)
def test_a_checkpoint_alone_is_an_adapter(store: AdapterStore, pack: type) -> None:
    assert send(store, pack({f"checkpoint-5/{name}": data for name, data in GOOD.items()})).manifest.notes == ()
    with pytest.raises(Unsupported, match="pissa"):
        send(store, pack({f"checkpoint-5/{name}": data for name, data in CHECKPOINT.items()}), "y")


@pytest.mark.parametrize("pack", PACKERS)
def test_what_is_left_out_below_an_adapter_counts_as_unpacked(store: AdapterStore, pack: type) -> None:
    below = {f"checkpoint-5/{name}": data for name, data in GOOD.items()}
    below["checkpoint-5/adapter_model.safetensors"] = bytes(LIMITS.max_upload_bytes + 1)
    with pytest.raises(TooLarge):
        send(store, pack({**GOOD, **below}))


@pytest.mark.parametrize("pack", PACKERS)
def test_tensors_without_a_config_below_an_adapter_are_refused(store: AdapterStore, pack: type) -> None:
    with pytest.raises(Malformed, match="apart"):
        send(store, pack({**GOOD, "checkpoint-5/adapter_model.safetensors": TENSORS}))


@pytest.mark.parametrize("pack", PACKERS)
def test_tensors_apart_from_their_config_are_refused(store: AdapterStore, pack: type) -> None:
    with pytest.raises(Malformed, match="apart"):
        send(store, pack({"a/adapter_config.json": config_bytes(), "b/adapter_model.safetensors": TENSORS}))


@pytest.mark.parametrize("pack", PACKERS)
def test_an_archive_without_a_config_is_refused(store: AdapterStore, pack: type) -> None:
    with pytest.raises(Malformed, match="holds no adapter_config"):
        send(store, pack({"adapter_model.safetensors": TENSORS}))


def test_a_file_twice_in_an_archive_is_refused(store: AdapterStore) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name, data in [*GOOD.items(), ("adapter_config.json", config_bytes(lora_alpha=1))]:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    with pytest.raises(Malformed, match="same purpose"):
        send(store, out.getvalue())


def test_an_archive_beside_single_files_is_refused(store: AdapterStore) -> None:
    with store.begin() as upload:
        for part_name, data in (("archive", tar_gz(GOOD)), ("adapter_config", config_bytes())):
            with upload.open_part(part_name) as part:
                part.write(data)
        with pytest.raises(Malformed, match="either"):
            upload.finish("x")


# ---- bombs


@pytest.mark.parametrize("pack", PACKERS)
@pytest.mark.parametrize("name", ["adapter_model.safetensors", "README.md"])
def test_what_unpacks_beyond_the_limit_is_stopped(store: AdapterStore, pack: type, name: str) -> None:
    archive = pack({"adapter_config.json": config_bytes(), name: bytes(LIMITS.max_upload_bytes + 1)})
    assert len(archive) < 20_000
    with pytest.raises(TooLarge):
        send(store, archive)


@pytest.mark.parametrize("pack", PACKERS)
def test_too_many_members_are_stopped(store: AdapterStore, pack: type) -> None:
    with pytest.raises(TooLarge, match="entries"):
        send(store, pack({**GOOD, **{f"{index}.txt": b"" for index in range(LIMITS.max_files)}}))


def test_a_bomb_below_the_byte_limit_is_stopped_by_its_ratio(tmp_path: Path) -> None:
    store = AdapterStore(tmp_path / "store", LAYOUT, StoreLimits(free_disk_floor_bytes=0), base_name="base")
    with pytest.raises(TooLarge):
        send(store, tar_gz({**GOOD, "README.md": bytes(17 << 20)}))
    store.close()


def test_a_tar_header_that_claims_gigabytes_is_not_read_in_one_piece(store: AdapterStore) -> None:
    header = tarfile.TarInfo("pax")
    header.type, header.size = tarfile.XHDTYPE, 8 << 30
    content = header.tobuf(tarfile.GNU_FORMAT) + bytes(1024)
    with pytest.raises(Malformed, match="absurd"):
        send(store, gzip.compress(content))


def many_entries(num_entries: int, claimed: int) -> bytes:
    """A zip whose end record claims another number of entries than its directory has."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as packed:
        packed.writestr("x", b"")
    whole = out.getvalue()
    start = whole.index(b"PK\x01\x02")
    entry = whole[start : whole.index(b"PK\x05\x06")]
    end = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, claimed, claimed, num_entries * len(entry), start, 0)
    return whole[:start] + num_entries * entry + end


def test_a_zip_directory_of_absurd_size_is_refused_before_it_is_parsed(
    store: AdapterStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = many_entries(30_000, claimed=1)
    made: list[str] = []

    class Counted(zipfile.ZipInfo):
        def __init__(self, filename: str) -> None:
            made.append(filename)
            super().__init__(filename)

    monkeypatch.setattr(zipfile, "ZipInfo", Counted)
    with pytest.raises(TooLarge, match="directory is larger than"):
        send(store, archive)
    assert made == []


def test_a_zip_with_more_entries_than_it_claims_is_refused(store: AdapterStore) -> None:
    with pytest.raises(TooLarge, match="entries"):
        send(store, many_entries(LIMITS.max_files + 1, claimed=1))


def test_zips_with_comments_or_zip64_records_are_fine(store: AdapterStore, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.BytesIO(zip_of(GOOD))
    with zipfile.ZipFile(out, "a") as packed:
        packed.comment = b"made by hand" * 5000
    assert send(store, out.getvalue(), "comment")
    monkeypatch.setattr(zipfile, "ZIP_FILECOUNT_LIMIT", 1)
    archive = zip_of(GOOD)
    assert b"PK\x06\x06" in archive
    assert send(store, archive, "zip64")


def extended_header(kind: bytes, text: bytes) -> bytes:
    header = tarfile.TarInfo("x")
    header.type, header.size = kind, len(text)
    return header.tobuf(tarfile.GNU_FORMAT) + text + bytes(-len(text) % tarfile.BLOCKSIZE)


@pytest.mark.parametrize("kind", [tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE])
def test_a_chain_of_extended_headers_is_refused(
    store: AdapterStore, monkeypatch: pytest.MonkeyPatch, kind: bytes
) -> None:
    chain = gzip.compress(1000 * extended_header(kind, b"12 path=abc\n"))
    with pytest.raises(TooLarge, match="headers of an archive entry"):
        send(store, chain)
    monkeypatch.setattr(unpack_module, "TAR_HEADER_BYTES", 2 << 20)
    with pytest.raises(Malformed, match="RecursionError"):
        send(store, chain)


def test_many_global_headers_are_refused(store: AdapterStore) -> None:
    records = b"".join(b"12 k%03d=abc\n" % index for index in range(100))
    content = extended_header(tarfile.XGLTYPE, records) + gzip.decompress(tar_gz(GOOD))
    with pytest.raises(TooLarge, match="global"):
        send(store, gzip.compress(content))
    content = extended_header(tarfile.XGLTYPE, records[:60]) + gzip.decompress(tar_gz(GOOD))
    assert send(store, gzip.compress(content))


def test_header_limits_are_per_entry(store: AdapterStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the data nor the headers of other entries, skipped ones among them, count."""
    monkeypatch.setattr(unpack_module, "TAR_HEADER_BYTES", 2048)
    assert send(store, tar_gz({**GOOD, **{f"{index}.txt": bytes(2000) for index in range(8)}, "._x": bytes(5000)}))


def test_the_headers_of_a_tar_entry_are_limited(store: AdapterStore) -> None:
    """A sparse map of single bytes is read as long as it goes on, before the entry is handed out."""
    member = tarfile.TarInfo("x")
    member.size = 2 << 20
    member.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "README.md"}
    header = member.tobuf(tarfile.PAX_FORMAT)
    with pytest.raises(TooLarge, match="headers"):
        send(store, gzip.compress(header + b"9999999\n" + b"1\n" * (1 << 20)))


def test_sparse_files_are_refused_before_their_holes_are_read(store: AdapterStore) -> None:
    member = tarfile.TarInfo("README.md")
    member.pax_headers = {"GNU.sparse.map": "0,0", "GNU.sparse.size": str(1 << 40), "GNU.sparse.realsize": str(1 << 40)}
    content = member.tobuf(tarfile.PAX_FORMAT) + bytes(1024)
    with pytest.raises(Unsupported, match=r"'README\.md' is a sparse file"):
        send(store, gzip.compress(content))


def test_adapters_of_zeros_are_no_bomb(store: AdapterStore) -> None:
    layout_modules = modules_ending(LAYOUT, "q_proj", "k_proj", "v_proj", "o_proj", "down_proj", "in_proj")
    tensors = {name: np.zeros_like(data) for name, data in lora_tensors(LAYOUT, layout_modules, 128).items()}
    config = config_bytes(r=128, target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "down_proj", "in_proj"])
    files = {"adapter_config.json": config, "adapter_model.safetensors": safetensors_bytes(tensors)}
    assert send(store, tar_gz(files))


def test_a_refused_configuration_is_told_before_the_tensors_are_unpacked(store: AdapterStore) -> None:
    """They are damaged, but nobody looks."""
    content = tar_gz({**GOOD, "adapter_config.json": config_bytes(use_qalora=True)})
    with pytest.raises(Unsupported, match="use_qalora"):
        send(store, content[:-200])


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"adapter_config.json": config_bytes(use_qalora=True)}, "use_qalora"),
        ({"README.md": b"no adapter"}, "holds no adapter_config"),
        ({"a/adapter_config.json": config_bytes(), "b/adapter_config.json": config_bytes()}, "holds 2 adapters"),
    ],
    ids=["refused", "none", "several"],
)
def test_a_zip_s_configuration_is_looked_at_first_wherever_it_lies(
    store: AdapterStore, files: dict[str, bytes], words: str
) -> None:
    """What lies before it unpacks to more than an upload may, but nobody unpacks it."""
    tensors = {"adapter_model.safetensors": bytes(LIMITS.max_upload_bytes + 1)}
    with pytest.raises(AdapterError, match=words):
        send(store, zip_of({**tensors, **files}))


# ---- damage


@pytest.mark.parametrize(
    "content", [b"", b"x" * 100, b"\x1f\x8b", b"\x1f\x8b" + b"x" * 100, b"PK\x03\x04" + b"x" * 100]
)
def test_what_is_no_archive_is_refused(store: AdapterStore, content: bytes) -> None:
    with pytest.raises(Malformed):
        send(store, content)


@pytest.mark.parametrize("pack", PACKERS)
def test_encrypted_and_exotic_members_are_refused(store: AdapterStore, pack: type) -> None:
    if pack is tar_gz:
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w:xz") as tar:
            tar.addfile(tarfile.TarInfo("adapter_config.json"))
        with pytest.raises(Malformed, match="neither"):
            send(store, out.getvalue())
    else:
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w", zipfile.ZIP_LZMA) as packed:
            packed.writestr("adapter_config.json", config_bytes())
        with pytest.raises(Unsupported, match="deflated"):
            send(store, out.getvalue())


@pytest.mark.parametrize("pack", PACKERS)
def test_a_flipped_bit_of_the_packed_bytes_never_makes_another_adapter(store: AdapterStore, pack: type) -> None:
    """Only the checksum at its end tells of most of them in a gzip."""
    content = pack(GOOD)
    whole = send(store, content).digest  # kept, so that each of the others is written to a name of its own
    num_refused = 0
    for position in range(0, len(content), max(1, len(content) // 150)):
        damaged = bytearray(content)
        damaged[position] ^= 4
        try:
            record = send(store, bytes(damaged), "damaged")
        except AdapterError:
            num_refused += 1
            continue
        assert record.digest == whole, position
        store.delete("damaged")
    assert num_refused > 100


def test_a_gzip_without_its_end_is_damaged(store: AdapterStore) -> None:
    content = tar_gz(GOOD)
    for num_bytes in (1, 4, 8):
        with pytest.raises(Malformed, match="damaged"):
            send(store, content[:-num_bytes])


@settings(
    max_examples=examples(120),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_any_damage_is_an_error_of_ours_or_harmless(store: AdapterStore, data: st.DataObject) -> None:
    """Bytes flipped and cut anywhere in either kind of archive."""
    content = bytearray(data.draw(st.sampled_from([pack(GOOD) for pack in PACKERS])))
    if data.draw(st.booleans()):
        plain = bytearray(gzip.decompress(tar_gz(GOOD)))
        for position in data.draw(st.lists(st.integers(0, 1600), min_size=1, max_size=4)):
            plain[position] ^= data.draw(st.integers(1, 255))
        content = bytearray(gzip.compress(bytes(plain), compresslevel=1))
    else:
        for position in data.draw(st.lists(st.integers(0, len(content) - 1), max_size=4)):
            content[position] ^= data.draw(st.integers(1, 255))
        del content[data.draw(st.integers(0, len(content))) :]
    try:
        send(store, bytes(content))
    except AdapterError:
        return
    store.delete("x")

"""Safetensors headers: what is consistent is read, everything else is refused before data is touched."""

from __future__ import annotations

import copy
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from adapters.errors import AdapterError, Malformed, Unsupported
from adapters.files.safetensors_header import CHUNK_BYTES, MAX_TENSORS, header_bytes, read_chunks, read_header
from tests.support.adapter_files import file_bytes, safetensors_bytes
from tests.support.tiers import examples

GOOD = {
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
}
DATA = bytes(range(32))
quick = settings(
    max_examples=examples(150),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def write(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    return path


def edited(**changes: Any) -> dict[str, Any]:
    """GOOD with fields of tensor "b" changed."""
    header = copy.deepcopy(GOOD)
    header["b"].update(changes)
    return header


def test_a_good_file_is_read(tmp_path: Path) -> None:
    path = write(tmp_path, file_bytes({"__metadata__": {"format": "pt"}, **GOOD}, DATA))
    tensors = read_header(path)
    assert [(t.name, t.dtype, t.shape, t.num_bytes) for t in tensors.values()] == [
        ("a", "F32", (2, 3), 24),
        ("b", "BF16", (4,), 8),
    ]
    assert b"".join(read_chunks(path, tensors["b"], 2)) == DATA[24:]


def test_names_in_any_spelling_of_unicode_are_read(tmp_path: Path) -> None:
    header = json.dumps(GOOD).replace('"a"', r'"\ud83d\ude00"').replace('"b"', r'"\\ud800"').encode()
    assert list(read_header(write(tmp_path, file_bytes(header, DATA)))) == ["\U0001f600", r"\ud800"]


def test_a_file_of_ours_is_read_by_the_safetensors_library(tmp_path: Path) -> None:
    path, data = tmp_path / "x.safetensors", np.arange(6, dtype="<f4").reshape(2, 3)
    with path.open("wb") as file:
        file.write(header_bytes([("a", "F32", (2, 3))]))
        file.write(data.tobytes())
    with safe_open(path, framework="numpy") as opened:
        assert (opened.get_tensor("a") == data).all()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "shorter"),
        (b"\x05\x00", "shorter"),
        ((1 << 62).to_bytes(8, "little") + b"{}", "claims"),
        ((100).to_bytes(8, "little") + b"{}", "claims"),
        (file_bytes(b"[]", b""), "not a JSON object"),
        (file_bytes(b"{", b""), "not valid JSON"),
        (file_bytes(b"{\xff}", b""), "not valid JSON"),
        (file_bytes(b'{"a":' + b"[" * 100_000, b""), "not valid JSON"),
        (file_bytes(b'{"a":1,"a":2}', b""), "twice"),
        (file_bytes(b'{"a":NaN}', b""), "not a JSON number"),
        (file_bytes(b'{"a":' + b"9" * 5000 + b"}", b""), "not valid JSON"),
        (file_bytes(rb'{"\ud800": {}}', b""), r"\\ud800 outside"),
        (file_bytes({"__metadata__": {"x": 1}}, b""), "__metadata__"),
        (file_bytes({"a": 5}, b""), "exactly"),
        (file_bytes({"a" * 2000: 5}, b""), "longer"),
        (file_bytes(edited(extra=1), DATA), "exactly"),
        (file_bytes(edited(shape=[-4]), DATA), "sizes"),
        (file_bytes(edited(shape=[True]), DATA), "sizes"),
        (file_bytes(edited(shape=[1] * 9), DATA), "sizes"),
        (file_bytes(edited(shape=[1 << 60]), DATA), "sizes"),
        (file_bytes(edited(shape=[5]), DATA), "does not take"),
        (file_bytes(edited(data_offsets=[32, 24]), DATA), "data_offsets"),
        (file_bytes(edited(data_offsets=[24]), DATA), "data_offsets"),
        (file_bytes(edited(data_offsets=[20, 28]), DATA), "overlaps"),
        (file_bytes(edited(data_offsets=[26, 34]), DATA), "gap"),
        (file_bytes(GOOD, DATA + b"x"), "too long"),
        (file_bytes(GOOD, DATA[:-1]), "cut off"),
    ],
)
def test_inconsistent_files_are_refused(tmp_path: Path, content: bytes, says: str) -> None:
    with pytest.raises(Malformed, match=says):
        read_header(write(tmp_path, content))


def header_of(num_tensors: int) -> bytes:
    entry = '"layers.{0}.lora_A.weight":{{"dtype":"F32","shape":[1],"data_offsets":[{1},{2}]}}'
    numbers = range(num_tensors)
    return ("{" + ",".join(entry.format(one, 4 * one, 4 * one + 4) for one in reversed(numbers)) + "}").encode()


def test_a_long_header_is_read(tmp_path: Path) -> None:
    """Tensors in the order of their data, whatever that of the header."""
    tensors = read_header(write(tmp_path, file_bytes(header_of(20_000), bytes(80_000))))
    assert list(tensors) == [f"layers.{number}.lora_A.weight" for number in range(20_000)]


@pytest.mark.parametrize(
    ("header", "says"),
    [
        (b'{"a": {"dtype": "F32", "shape": [%s4], "data_offsets": [0, 4]}}' % (b"1," * 500_000), "sizes"),
        (header_of(20_000)[:-1] + b',"layers.19999.lora_A.weight":1}', "occurs twice"),
        (header_of(20_000)[:-1] + b',"b":1}', "exactly"),
        (header_of(20_000)[:-1], "not valid JSON"),
        (header_of(20_000)[:-1] + b',"b":{"\\ud800": 1}}', r"\\ud800 outside"),
        (b"{" + b",".join(b'"%d":1' % number for number in range(MAX_TENSORS + 1)) + b"}", "more than 65536 tensors"),
        (b'{"a": [' + b"[]," * 300_000 + b"[]]}", "may have 262144 lists and objects"),
    ],
)
def test_long_headers_are_refused_for_the_same_reasons(tmp_path: Path, header: bytes, says: str) -> None:
    with pytest.raises(Malformed, match=says):
        read_header(write(tmp_path, file_bytes(header, bytes(80_000))))


@pytest.mark.parametrize("dtype", ["F64", "I64", "F8_E4M3", "BOOL", "f32", ["F32"], None])
def test_other_dtypes_are_refused_by_name(tmp_path: Path, dtype: Any) -> None:
    with pytest.raises(Unsupported, match="F32, F16 and BF16"):
        read_header(write(tmp_path, file_bytes(edited(dtype=dtype), DATA)))


@pytest.mark.parametrize("content", [b"\x80\x02}q\x00.xxxxxxxxxx", b"PK\x03\x04" + b"\0" * 30])
def test_a_pickle_under_a_safetensors_name_is_called_a_pickle(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(Unsupported, match="pickle"):
        read_header(write(tmp_path, content))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@quick
@given(st.data())
def test_any_change_of_a_header_is_read_consistently_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    """Whatever a header says, the answer is an error of ours or tensors that lie exactly inside the file."""
    header: dict[str, Any] = copy.deepcopy(GOOD)
    for _ in range(data.draw(st.integers(1, 3))):
        tensor = data.draw(st.sampled_from(["a", "b", "c", "__metadata__"]))
        entry = header.setdefault(tensor, {})
        if isinstance(entry, dict):
            field = data.draw(st.sampled_from(["dtype", "shape", "data_offsets", "x"]))
            near = st.lists(st.integers(-1, 40), max_size=3) | st.sampled_from(["F32", "F16", "BF16", "I8"])
            entry[field] = data.draw(near | json_values)
    path = write(tmp_path, file_bytes(json.dumps(header).encode(), DATA))
    try:
        tensors = read_header(path)
    except AdapterError:
        return
    assert sum(tensor.num_bytes for tensor in tensors.values()) == len(DATA)
    assert b"".join(b"".join(read_chunks(path, tensor)) for tensor in tensors.values()) == DATA


@quick
@given(st.binary(max_size=200))
def test_any_bytes_are_refused_or_read(tmp_path: Path, content: bytes) -> None:
    with suppress(AdapterError):
        assert read_header(write(tmp_path, content)) == {}


def test_a_damaged_file_of_ours_is_noticed_at_every_truncation(tmp_path: Path) -> None:
    content = safetensors_bytes({"a": np.zeros((3, 2), "<f4"), "b": np.zeros(5, "<f2")})
    for length in range(len(content)):
        with pytest.raises(AdapterError):
            read_header(write(tmp_path, content[:length]))


def test_chunks_hold_whole_elements() -> None:
    assert CHUNK_BYTES % 4 == 0

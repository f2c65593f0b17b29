"""Reading a GGUF file's metadata and where its tensors lie. Torch-free; every number is bounded before it is used."""

from __future__ import annotations

import math
import re
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from service.models.spec.config_json import ModelError

LINK = "model.gguf"  # in a model directory, to the file, or to the first of several
_NAME_OF_PART = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf")
# Number formats of GGUF's metadata by their ids; 8 is a string, 9 an array.
_NUMBERS = dict(enumerate(("<B", "<b", "<H", "<h", "<I", "<i", "<f", "<?"))) | {10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_MOST_ITEMS, _MOST_DIMENSIONS = 1 << 24, 4
# What each wavelength of the rotation is stretched by, float32.
ROPE_FACTORS, _MOST_FACTORS = "rope_freqs.weight", 1 << 12
# Types of tokens.
CONTROL_TOKEN, USER_TOKEN = 3, 4
# Types of tensors by their ids: name, values in a block, its bytes.
TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}
_NOT_SERVED = {
    10: "Q2_K",
    11: "Q3_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor: its file, its type's name, its shape [outputs, inputs], and the bytes in the file that it has."""

    file: Path
    kind: str
    shape: tuple[int, ...]
    begin: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """Metadata by name, and tensors by the file's own names; the values of ROPE_FACTORS, if it is there."""

    facts: dict[str, Any]
    tensors: dict[str, StoredTensor]
    rope_factors: tuple[float, ...] = ()

    def fact(self, name: str) -> Any:
        """Raises ModelError where the file has none of this name."""
        if name not in self.facts:
            raise ModelError(f"the GGUF file's metadata has no {name}: convert the model anew")
        return self.facts[name]


def parts_of(path: Path) -> list[Path]:
    """The files of the model that the file at `path` is a part of, as its name says, else the one."""
    named = path
    while named.name == LINK and named.is_symlink():
        named = named.readlink()
    found = _NAME_OF_PART.fullmatch(named.name)
    if found is None:
        return [path]
    return [named.with_name(f"{found[1]}-{part:05d}-of-{found[2]}.gguf") for part in range(1, 1 + int(found[2]))]


def read_gguf(path: Path) -> GgufFile:
    """The model of `parts_of`. Raises ModelError for what is no GGUF file of version 2 or 3, for one that is cut or
    missing, and for types of tensors that are not served."""
    paths = parts_of(path)
    first, *others = files = [_read(one) for one in paths]
    tensors = {name: tensor for file in files for name, tensor in file.tensors.items()}
    factors = next((file.rope_factors for file in files if file.rope_factors), ())
    count = first.facts.get("split.count", 1)
    if count != len(files):
        raise ModelError(
            f"{paths[0]} has a split.count of {count}, and its name is not that of a part, such as "
            "model-00001-of-00002.gguf: give it the name that it was published by, beside the others"
        )
    if others and len(tensors) != first.facts.get("split.tensors.count", len(tensors)):
        raise ModelError(f"{paths[0]} and its other parts are not of one model: download them again")
    return replace(first, tensors=tensors, rope_factors=factors)


def _read(path: Path) -> GgufFile:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            return _Reader(file, size, path).read()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    except (struct.error, UnicodeDecodeError, _Cut) as error:
        raise ModelError(f"{path} is cut or no GGUF file: download it again, or name a directory") from error


class _Cut(Exception):
    pass


class _Reader:
    def __init__(self, file: BinaryIO, size: int, path: Path) -> None:
        self._file, self._size, self._path = file, size, path

    def read(self) -> GgufFile:
        if self._file.read(4) != b"GGUF" or self._number("<I") not in (2, 3):
            raise _Cut
        num_tensors, num_facts = self._count(), self._count()
        facts: dict[str, Any] = {}
        for _ in range(num_facts):
            name = self._text()
            facts[name] = self._value(self._number("<I"))
        found = [self._tensor() for _ in range(num_tensors)]
        alignment = facts.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise _Cut
        begin = -(-self._file.tell() // alignment) * alignment
        tensors = {}
        for name, shape, kind, offset in found:
            if kind not in TYPES:
                served = ", ".join(one for one, _, _ in TYPES.values())
                known = _NOT_SERVED.get(kind, kind)
                raise ModelError(
                    f"tensor {name} of the GGUF file is of the type {known}; served are {served}: take a file of "
                    "these, Q4_K_M or Q8_0 say"
                )
            label, num_values, num_bytes = TYPES[kind]
            if not shape or shape[-1] % num_values:
                raise ModelError(f"tensor {name} of the GGUF file has rows of no whole blocks of {label}")
            entry = StoredTensor(self._path, label, shape, begin + offset, math.prod(shape) // num_values * num_bytes)
            if entry.begin + entry.num_bytes > self._size:
                raise _Cut
            tensors[name] = entry
        return GgufFile(facts, tensors, self._rope_factors(tensors))

    def _rope_factors(self, tensors: dict[str, StoredTensor]) -> tuple[float, ...]:
        entry = tensors.get(ROPE_FACTORS)
        if entry is None:
            return ()
        count = math.prod(entry.shape)
        if entry.kind != "F32" or not 0 < count <= _MOST_FACTORS:
            raise ModelError(f"tensor {ROPE_FACTORS} of the GGUF file is not of some float32: convert the model anew")
        self._file.seek(entry.begin)
        return struct.unpack(f"<{count}f", self._file.read(4 * count))

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name, num_dimensions = self._text(), self._number("<I")
        if num_dimensions > _MOST_DIMENSIONS:
            raise _Cut
        shape = tuple(self._number("<Q") for _ in range(num_dimensions))[::-1]
        return name, shape, self._number("<I"), self._number("<Q")

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self._text()
        if kind == _ARRAY and depth < 2:
            kind, count = self._number("<I"), self._count()
            if kind in _NUMBERS:
                form = f"<{count}{_NUMBERS[kind][1]}"
                return list(struct.unpack(form, self._file.read(struct.calcsize(form))))
            return [self._value(kind, depth + 1) for _ in range(count)]
        if kind not in _NUMBERS:
            raise _Cut
        return self._number(_NUMBERS[kind])

    def _count(self) -> int:
        count: int = self._number("<Q")
        if count > min(_MOST_ITEMS, self._size):
            raise _Cut
        return count

    def _text(self) -> str:
        count = self._count()
        content = self._file.read(count)
        if len(content) != count:
            raise _Cut
        return content.decode()

    def _number(self, form: str) -> Any:
        return struct.unpack(form, self._file.read(struct.calcsize(form)))[0]

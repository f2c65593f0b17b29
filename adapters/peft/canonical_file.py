"""The canonical file of an adapter's tensors: PEFT's own names for the base's modules, sorted, nothing else. A file
that PEFT saved in this form already is not written again."""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from adapters.errors import Malformed
from adapters.files.durable_files import synced_beside
from adapters.files.paths import DEFAULT_TEMPLATE, EMBEDDING_SIDES, LINEAR_SIDES, stored_name
from adapters.files.safetensors_header import ELEMENT_BYTES, Tensor, header_bytes, read_chunks
from adapters.peft.block_tensors import chunks, origin
from adapters.peft.bound_tensors import LORA_BIAS, MAGNITUDE, TOKENS, Binding, BoundExtra, BoundSlice
from adapters.text.tokenizer_files import AdapterText

IDLE = "The adapter changes nothing: lora_A or lora_B is zero in all of its modules."
MAYBE_IDLE = "lora_A or lora_B is zero, or next to it, in all modules, so that the adapter may change nothing"
LARGE = "Weights are so large that answers may not be finite"
# No training comes near: products of a few such overflow float32.
LARGE_DELTA = 1e6
# Likewise; beside a weight of a ten-thousandth float32 rounds it away.
SMALL_DELTA = 1e-12
# Exponent bits all ones: NaN or infinity.
_EXPONENT = {"F32": ("<u4", 0x7F800000), "F16": ("<u2", 0x7C00), "BF16": ("<u2", 0x7F80)}


class CanonicalForm:
    """The canonical file of the tensors in `binding`.

    num_bytes  size of the file
    """

    def __init__(self, binding: Binding) -> None:
        self._binding = binding
        self._entries = _entries(binding)
        self._header = header_bytes((name, tensor.dtype, tensor.shape) for name, tensor in self._entries)
        self.num_bytes = len(self._header) + sum(tensor.num_bytes for _, tensor in self._entries)

    def is_that_of(self, source: Path) -> bool:
        """Whether the source file of the tensors is already in this form."""
        with source.open("rb") as file:
            return file.read(len(self._header)) == self._header

    def write(self, source: Path, target: Path) -> None:
        """Write `target` from the source file of the tensors."""
        with target.open("wb") as file:
            file.write(self._header)
            for _, tensor in self._entries:
                for chunk in chunks(source, tensor):
                    file.write(chunk)

    def described(self, text: AdapterText) -> bytes:
        """The part of the adapter that the digest covers before the tensors' data."""
        return _described(self._binding, text)

    def scan(self, described: bytes) -> Scan:
        """The reading of a file in this form for its digest, which begins with `described`."""
        return Scan(described, self._entries, len(self._header))

    def digest(self, path: Path, scan: Scan) -> tuple[str, tuple[str, ...]]:
        """The adapter's digest, and warnings, of a scan of its file, which is synced to disk while the rest is read,
        unless it is in memory.

        The digest covers each module's rank, scaling, dtypes and data, the chat templates with their special tokens,
        and the end tokens: whatever changes a prompt or an answer. Key order, metadata, tensor order and training-only
        settings do not. Raises Malformed for NaN and infinity.
        """
        with nullcontext() if path.is_symlink() else synced_beside(path):
            scan.finish(path)
        return scan.hash.hexdigest(), tuple(_warnings(self._binding, scan.largest))


class Scan:
    """One reading of a canonical file's tensors, in the order of their bytes.

    hash     SHA-256 of `described` and of what was taken
    largest  magnitude so far, by tensor
    """

    def __init__(self, described: bytes, entries: Sequence[tuple[str, Tensor]], data_start: int) -> None:
        self.described = described
        self.hash = hashlib.sha256(described)
        self.largest: dict[str, float] = {}
        self._tensors = deque(tensor for _, tensor in entries if tensor.num_bytes)
        self._next_byte = data_start  # of the file
        self._taken_bytes = 0  # of the first tensor
        self._element = b""  # which has begun

    @property
    def is_complete(self) -> bool:
        """Whether all tensors were taken."""
        return not self._tensors

    def take(self, data: bytes | memoryview) -> None:
        """Read the next bytes; those behind the last tensor are nobody's. Raises Malformed for NaN and infinity."""
        rest = memoryview(data)
        while rest and self._tensors:
            tensor = self._tensors[0]
            piece = rest[: tensor.num_bytes - self._taken_bytes]
            rest = rest[len(piece) :]
            self._look_at(tensor, piece)
            self.hash.update(piece)
            self._next_byte += len(piece)
            self._taken_bytes += len(piece)
            if self._taken_bytes == tensor.num_bytes:
                self._tensors.popleft()
                self._taken_bytes = 0

    def finish(self, path: Path) -> None:
        """Take the rest from a file that is whole."""
        while self._tensors:
            tensor = self._tensors[0]
            end = self._next_byte + tensor.num_bytes - self._taken_bytes
            for chunk in read_chunks(path, replace(tensor, start=self._next_byte, end=end)):
                self.take(chunk)

    def _look_at(self, tensor: Tensor, piece: memoryview) -> None:
        """Note the largest magnitude; an element may come in two pieces."""
        first_byte, size = self._taken_bytes - len(self._element), ELEMENT_BYTES[tensor.dtype]
        if self._element:
            missing = size - len(self._element)
            self._element, piece = self._element + piece[:missing], piece[missing:]
            if len(self._element) < size:
                return
            self._note(tensor, self._element, first_byte)
            first_byte += size
        whole = len(piece) // size * size
        self._element = bytes(piece[whole:])
        self._note(tensor, piece[:whole], first_byte)

    def _note(self, tensor: Tensor, elements: bytes | memoryview, first_byte: int) -> None:
        found = _refuse_non_finite(tensor, elements, first_byte)
        self.largest[tensor.name] = max(found, self.largest.get(tensor.name, 0.0))


def _warnings(binding: Binding, largest: Mapping[str, float]) -> Iterator[str]:
    """Warnings about weights that a probe would refuse, as far as their sizes show it."""
    deltas = {bound.slice.module: _largest_delta(bound, largest) for bound in binding.slices}
    others = [extra for extra in binding.extras if extra.part != LORA_BIAS or largest[extra.tensor.name]]
    if not (any(deltas.values()) or others or binding.tokens):
        yield IDLE
    elif max(deltas.values(), default=0.0) < SMALL_DELTA and all(map(_may_be_the_base_s, others)):
        yield f"{MAYBE_IDLE}; upload it with ?probe=true to find out."
    large = next((module for module, delta in deltas.items() if delta > LARGE_DELTA), None)
    if large is not None:
        yield f"{LARGE}, as those of {large}; upload it with ?probe=true to find out."


def _largest_delta(bound: BoundSlice, largest: Mapping[str, float]) -> float:
    """Upper bound of the delta's elements."""
    return bound.rank * abs(bound.scaling) * largest[bound.a.name] * largest[bound.b.name]


def _may_be_the_base_s(extra: BoundExtra) -> bool:
    """Whether it may be what the base computes with anyway: magnitudes are its norms until they are trained. Weights
    and biases that repeat the base's are not here any more."""
    return extra.part == MAGNITUDE


def _sides(bound: BoundSlice) -> Iterator[tuple[str, Tensor]]:
    names = EMBEDDING_SIDES if bound.projection.kind == "embedding" else LINEAR_SIDES
    for side, tensor in zip(names, (bound.a, bound.b), strict=True):
        yield stored_name(bound.slice.module, side), tensor


def _entries(binding: Binding) -> list[tuple[str, Tensor]]:
    """Wide elements first, so that every tensor is aligned in the file; then by name."""
    entries = [entry for bound in binding.slices for entry in _sides(bound)]
    entries += [(stored_name(extra.module, extra.part), extra.tensor) for extra in binding.extras]
    entries += [(stored_name(tokens.module, TOKENS), tokens.tensor) for tokens in binding.tokens]
    return sorted(entries, key=lambda entry: (-ELEMENT_BYTES[entry[1].dtype], entry[0]))


def _described(binding: Binding, text: AdapterText) -> bytes:
    """The JSON that the digest covers besides the data; its shapes also distinguish adapters of different bases."""
    modules = sorted(
        [bound.slice.module, bound.scaling.hex(), bound.a.dtype, bound.a.shape, bound.b.dtype, bound.b.shape]
        for bound in binding.slices
    )
    templates = {name: hashlib.sha256(source.encode()).hexdigest() for name, source in text.templates.items()}
    template = templates.pop(DEFAULT_TEMPLATE, None)
    extras = sorted([extra.module, extra.part, extra.tensor.dtype, extra.tensor.shape] for extra in binding.extras)
    described: list[object] = ["multilora adapter 1", modules, template, *([extras] if extras else [])]
    if binding.tokens:
        described.append({"tokens": sorted([one.module, one.token_ids, one.tensor.dtype] for one in binding.tokens)})
    if binding.invocation:
        described.append({"invocation": binding.invocation})
    if binding.head is not None:
        described.append({"head": binding.head})
    # Absent where there is none: digests of other adapters stay as they were.
    of_text = {
        "templates": sorted(templates.items()),
        "special_tokens": sorted(text.special_tokens.items()),
        "eos_token_ids": sorted(text.eos_token_ids),
        "classifier_from_token": binding.classifier_from_token,
    }
    described += [{name: value} for name, value in of_text.items() if value]
    return json.dumps(described, separators=(",", ":")).encode() + b"\n"


def _refuse_non_finite(tensor: Tensor, chunk: bytes | memoryview, first_byte: int) -> float:
    """The largest magnitude among the values; `chunk` begins at a byte of the tensor."""
    import numpy as np

    unsigned, exponent = _EXPONENT[tensor.dtype]
    bits = np.frombuffer(chunk, unsigned)
    without_sign = (1 << (8 * bits.itemsize - 1)) - 1
    # As integers with a sign the largest are the positive values of most magnitude, without one the negative ones: no
    # copy of the chunk is made.
    positive, negative = bits.view(unsigned.replace("u", "i")).max(initial=0), bits.max(initial=0)
    largest = max(int(positive), int(negative) & without_sign)
    if largest >= exponent:
        place = first_byte // bits.itemsize + int(np.argmax((bits & exponent) == exponent))
        name = origin(tensor, place).name[:200]
        raise Malformed(f"Tensor {name!r} holds NaN or infinity; the training has diverged.")
    if tensor.dtype == "F16":
        return float(np.uint16(largest).view("<f2"))
    return float((np.uint32(largest) << (32 - 8 * bits.itemsize)).view("<f4"))

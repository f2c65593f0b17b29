"""The sampling request of a step, in host values, and the arrays that take it to the device.

Everything is known before the model runs, so the arrays travel with the step's other inputs:

    asked = ask(rows, given, num_logits=..., vocab=...)
    asked.fill(host_arrays)  # laid out for `asked.facts`; the caller brings them to the device
    maps = SamplingMaps.of(asked.facts, device_arrays)

and without such arrays `asked.maps(device)` does both.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from kernels.arrays import HostArray, in_host, in_nothing, in_tensor, number_dtype
from kernels.sampling import parameters
from kernels.sampling.maps import (
    MASK_WORD_BITS,
    SamplingArrays,
    SamplingFacts,
    SamplingMaps,
    index_of,
    matrix_of,
    used_in,
    uses_penalties,
)

_MASK = 0xFFFFFFFFFFFFFFFF
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniform(seeds: Sequence[int], indices: Sequence[int]) -> np.ndarray:
    """float64 [n] in [0, 1), element by element: splitmix64 of the seed's hash (modulo 2**64) and the index of the
    output token. Hence a request's tokens depend neither on its neighbours nor on preemption, and a step's numbers are
    known before the step before has ended."""
    hashed = _mix(np.array([seed & _MASK for seed in seeds], np.uint64))
    counters = np.array(indices, np.uint64) + np.uint64(1)
    return (_mix(hashed + counters * _GOLDEN) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


# A sort of everything serves larger ones as well.
_LARGEST_TOP_K = 1024


MASK_FOLLOWS = np.empty(0, np.int32)


@dataclass(slots=True)  # not frozen: a step makes one for each sequence, which would take thrice as long
class RowSampling:
    """A row of the logits that gets a token.

    logits_row   row of the step's logits
    parameters   float64 [num_parameters], `maps.row_of(request)`
    seed, index  random stream of the request, and which of its output tokens this is
    slot         of the sequence: where its token counts stand; read only if its parameters have penalties
    bias         token -> what is added to its logit
    barred       tokens that must not be chosen
    mask         int32 [ceil(vocab / 32)], `mask_of(allowed tokens)`; None allows all; `MASK_FOLLOWS` in all rows with a
                 mask where the caller makes `masks` itself, later than the other arrays
    num_top      log probabilities are wanted of the chosen token and of so many of the most likely; None: of none
    scored       and of these tokens; only with a `num_top`
    """

    logits_row: int
    parameters: np.ndarray
    seed: int = 0
    index: int = 0
    slot: int = -1
    bias: Mapping[int, float] = field(default_factory=dict)
    barred: Collection[int] = ()
    mask: np.ndarray | None = None
    num_top: int | None = None
    scored: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class GivenRow:
    """A row of the logits whose token is known, one of a prompt: its log probability and rank, and the `num_top`
    largest."""

    logits_row: int
    token_id: int
    num_top: int


@dataclass(frozen=True, slots=True)
class Asked:
    """A step's sampling on the host, which `read` needs to assign the results.

    matrix  float64 [num_parameters, len(rows)], see `maps.matrix_of`
    """

    rows: tuple[RowSampling, ...]
    given: tuple[GivenRow, ...]
    facts: SamplingFacts
    matrix: np.ndarray

    def fill(self, arrays: SamplingArrays[HostArray]) -> None:
        """Write the device's inputs to arrays that are laid out for `facts`."""
        facts, rows = self.facts, self.rows
        arrays.rows.put([row.logits_row for row in rows])
        arrays.parameters.put(self.matrix)
        if facts.is_random:
            arrays.numbers.put(uniform([row.seed for row in rows], [row.index for row in rows]))
        if facts.num_penalised:
            self._fill_penalised(arrays)
        if facts.num_biased:
            places = {i * facts.vocab + token: added for i, row in enumerate(rows) for token, added in row.bias.items()}
            arrays.biased.put(list(places))
            arrays.bias.put(list(places.values()))
        if facts.num_barred:
            arrays.barred.put([i * facts.vocab + token for i, row in enumerate(rows) for token in row.barred])
        if facts.num_masked:
            arrays.masked.put([i for i, row in enumerate(rows) if row.mask is not None])
            arrays.mask_bits.put(_BITS)
        if facts.num_given:
            arrays.given.put([entry.logits_row for entry in self.given])
            arrays.given_tokens.put([entry.token_id for entry in self.given])
        if facts.num_chosen:
            arrays.chosen.put([i for i, row in enumerate(rows) if row.num_top is not None])
        if facts.num_scored:
            chosen = (row for row in rows if row.num_top is not None)
            padding = (0,) * facts.num_scored
            arrays.scored.put([token for row in chosen for token in (row.scored + padding)[: facts.num_scored]])

    def _fill_penalised(self, arrays: SamplingArrays[HostArray]) -> None:
        is_penalised = uses_penalties(self.matrix)
        slots = np.where(is_penalised, [row.slot for row in self.rows], -1)
        assert (slots[is_penalised] >= 0).all(), "a row with penalties has the slot of its sequence"
        arrays.slots.put(slots)
        arrays.penalised.put(is_penalised.nonzero()[0])

    def masks(self) -> np.ndarray | None:
        """int32 [num_masked, num_words], of rows that bring theirs; None without masks, and of those that follow."""
        masks = [row.mask for row in self.rows if row.mask is not None]
        if not masks or any(mask is MASK_FOLLOWS for mask in masks):
            return None
        return np.stack(masks)

    def maps(self, device: torch.device, number: type[np.floating] | None = None) -> SamplingMaps:
        """All of it on a device, in memory of its own. number: None stands for `number_dtype`."""
        number = number or number_dtype(device)
        layout = in_nothing(number)
        layout.add(SamplingArrays, self.facts)
        host = torch.zeros(layout.end, dtype=torch.uint8)
        self.fill(in_host(host.numpy(), number).add(SamplingArrays[HostArray], self.facts))
        arrays = in_tensor(host.to(device), number).add(SamplingArrays[torch.Tensor], self.facts)
        masks = self.masks()
        return SamplingMaps.of(self.facts, arrays, None if masks is None else torch.from_numpy(masks).to(device))


def ask(
    rows: Sequence[RowSampling],
    given: Sequence[GivenRow] = (),
    *,
    num_logits: int,
    vocab: int,
) -> Asked:
    """A step's sampling, from the requests of its rows.

    num_logits, vocab  shape of the logits
    """
    wishes = _wishes(b"".join([row.parameters.tobytes() for row in rows]), vocab, parameters.PARAMETERS)
    num_tops = [row.num_top for row in rows if row.num_top is not None]
    facts = SamplingFacts(
        num_logits=num_logits,
        vocab=vocab,
        num_rows=len(rows),
        is_in_order=[row.logits_row for row in rows] == list(range(len(rows))),
        is_random=wishes.is_random,
        used=wishes.used,
        num_ranked=wishes.num_ranked,
        num_penalised=wishes.num_penalised,
        num_biased=sum(len(row.bias) for row in rows),
        num_barred=sum(len(row.barred) for row in rows),
        num_masked=sum(row.mask is not None for row in rows),
        num_given=len(given),
        num_chosen=len(num_tops),
        num_top=min(max([*num_tops, *(entry.num_top for entry in given)], default=0), vocab),
        num_scored=max((len(row.scored) for row in rows if row.num_top is not None), default=0),
    )
    return Asked(tuple(rows), tuple(given), facts, wishes.matrix)


class _Wishes(NamedTuple):
    """The combined parameters of a step's rows; `matrix` is read-only."""

    matrix: np.ndarray
    is_random: bool
    used: frozenset[str]
    num_ranked: int
    num_penalised: int


@functools.lru_cache(maxsize=512)
def _wishes(rows: bytes, vocab: int, _parameters: tuple[parameters.Parameter, ...]) -> _Wishes:
    """rows: their parameters, float64, one after the other. Most steps are of the same requests as the one before."""
    matrix = matrix_of(np.frombuffer(rows, np.float64), vocab)
    return _Wishes(
        matrix,
        bool((matrix[index_of("temperature")] > 0.0).any()),
        used_in(matrix),
        _num_ranked(matrix, vocab),
        int(uses_penalties(matrix).sum()),
    )


def mask_of(allowed: Collection[int], vocab: int) -> np.ndarray:
    """int32 [ceil(vocab / 32)], the mask that allows these tokens and no others."""
    bits = np.zeros(-(-vocab // MASK_WORD_BITS) * MASK_WORD_BITS, np.bool_)
    bits[np.fromiter(allowed, np.int64, len(allowed))] = True
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)


def _num_ranked(matrix: np.ndarray, vocab: int) -> int:
    top_k, top_p = matrix[index_of("top_k")], matrix[index_of("top_p")]
    if bool(((top_k == 0.0) & (top_p < 1.0)).any()):
        return vocab
    largest = int(top_k.max(initial=0.0))
    return largest if largest <= _LARGEST_TOP_K else vocab


_BITS = (np.uint32(1) << np.arange(MASK_WORD_BITS, dtype=np.uint32)).view(np.int32)

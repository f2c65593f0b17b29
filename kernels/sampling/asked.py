"""What a step asks of its logits, in host values, and the arrays that take it to the device.

Everything is known before the model runs, so the arrays travel with the step's other inputs:

    asked = ask(rows, given, num_logits=..., vocab=...)
    arrays = asked.arrays(number_dtype(device))  # numpy; the caller brings each to the device
    maps = SamplingMaps.from_tensors(asked.facts, tensors)
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kernels.sampling import parameters
from kernels.sampling.maps import MASK_WORD_BITS, NOTHING, SamplingArrays, SamplingFacts
from kernels.sampling.parameters import index_of, matrix_of, neutral_row, used_in, uses_penalties
from kernels.sampling.random_numbers import uniform

# A sort of everything serves larger ones as well.
_LARGEST_TOP_K = 1024


MASK_FOLLOWS = np.empty(0, np.int32)


@dataclass(slots=True)  # not frozen: a step makes one for each sequence, which would take thrice as long
class RowSampling:
    """A row of the logits that gets a token.

    logits_row   row of the step's logits
    parameters   float64 [num_parameters], `parameters.row_of(request)`
    seed, index  random stream of the request, and which of its output tokens this is
    slot         of the sequence: where its token counts stand; read only if its parameters have penalties
    bias         token -> what is added to its logit
    barred       tokens that must not be chosen
    mask         int32 [ceil(vocab / 32)], `mask_of(allowed tokens)`; None allows all; `MASK_FOLLOWS` in all rows with a
                 mask where the caller makes `masks` itself, later than the other arrays
    num_top      log probabilities are wanted of the chosen token and of so many of the most likely; None: of none
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


@dataclass(frozen=True, slots=True)
class GivenRow:
    """A row of the logits whose token is known, one of a prompt: its log probability and the `num_top` largest."""

    logits_row: int
    token_id: int
    num_top: int


@dataclass(frozen=True, slots=True)
class Asked:
    """A step's sampling on the host; what `read` needs to tell whose the results are.

    matrix  float64 [num_parameters, len(rows)], see `parameters.matrix_of`
    """

    rows: tuple[RowSampling, ...]
    given: tuple[GivenRow, ...]
    facts: SamplingFacts
    matrix: np.ndarray

    def arrays(self, number_dtype: type[np.floating]) -> SamplingArrays:
        """What the device is told, without `masks` that follow.

        number_dtype  of parameters and uniform numbers, see `number_dtype`
        """
        facts = self.facts
        rows, parameters = self._rows_and_parameters(number_dtype)
        slots, penalised = self._penalties()
        biased, bias = self._bias()
        masked, masks = self._masks()
        barred = [i * facts.vocab + token for i, row in enumerate(self.rows) for token in row.barred]
        chosen = [i for i, row in enumerate(self.rows) if row.num_top is not None]
        return SamplingArrays(
            rows=rows,
            parameters=parameters,
            numbers=self._numbers(number_dtype),
            slots=slots,
            penalised=penalised,
            biased=biased,
            bias=bias,
            barred=_filled(barred, facts.num_barred, np.int64),
            masked=masked,
            masks=masks,
            mask_bits=_BITS if facts.num_masked else NOTHING,
            given=_filled([entry.logits_row for entry in self.given], facts.num_given, np.int64),
            given_tokens=_filled([entry.token_id for entry in self.given], facts.num_given, np.int64),
            chosen=_filled(chosen, facts.num_chosen, np.int64),
        )

    def _rows_and_parameters(self, number_dtype: type[np.floating]) -> tuple[np.ndarray, np.ndarray]:
        facts, num_padding = self.facts, self.facts.num_rows - len(self.rows)
        if not facts.num_rows:
            return NOTHING, NOTHING
        rows = [row.logits_row for row in self.rows]
        matrix = self.matrix
        if num_padding:
            rows += [min(i, facts.num_logits - 1) for i in range(len(rows), facts.num_rows)]
            neutral = np.repeat(neutral_row()[:, None], num_padding, axis=1)
            neutral[index_of("temperature")] = 0.0
            matrix = np.concatenate((matrix, neutral), axis=1)
        return np.array(rows, np.int64), matrix.astype(number_dtype)

    def _numbers(self, number_dtype: type[np.floating]) -> np.ndarray:
        if not self.facts.is_random:
            return NOTHING
        numbers = uniform([row.seed for row in self.rows], [row.index for row in self.rows])
        return np.concatenate((numbers, np.zeros(self.facts.num_rows - len(self.rows)))).astype(number_dtype)

    def _penalties(self) -> tuple[np.ndarray, np.ndarray]:
        """Slots of all rows, and the rows with penalties."""
        facts = self.facts
        if not facts.num_penalised:
            return NOTHING, NOTHING
        slots = np.full(facts.num_rows, -1, np.int64)
        penalised = uses_penalties(self.matrix).nonzero()[0].tolist()
        slots[penalised] = [self.rows[i].slot for i in penalised]
        assert (slots[penalised] >= 0).all(), "a row with penalties has the slot of its sequence"
        return slots, _filled(penalised, facts.num_penalised, np.int64)

    def _bias(self) -> tuple[np.ndarray, np.ndarray]:
        """Places, and what is added there."""
        facts = self.facts
        if not facts.num_biased:
            return NOTHING, NOTHING
        bias = {i * facts.vocab + token: added for i, row in enumerate(self.rows) for token, added in row.bias.items()}
        num = facts.num_biased
        return _filled(list(bias), num, np.int64), _filled(list(bias.values()), num, np.float32)

    def _masks(self) -> tuple[np.ndarray, np.ndarray]:
        """Rows with a mask, and the masks unless they follow."""
        facts = self.facts
        if not facts.num_masked:
            return NOTHING, NOTHING
        masks = {i: row.mask for i, row in enumerate(self.rows) if row.mask is not None}
        masked = _filled(list(masks), facts.num_masked, np.int64)
        if any(mask is MASK_FOLLOWS for mask in masks.values()):
            return masked, NOTHING
        return masked, _filled(list(masks.values()), facts.num_masked, np.int32)


def ask(
    rows: Sequence[RowSampling],
    given: Sequence[GivenRow] = (),
    *,
    num_logits: int,
    vocab: int,
    num_rows: int | None = None,
    is_rounded_up: bool = False,
) -> Asked:
    """A step's sampling, from what each row wants.

    num_logits, vocab  shape of the logits
    num_rows           with padding at the end, whose tokens mean nothing; None: as many as `rows`
    is_rounded_up      facts are `rounded_up`
    """
    wishes = _wishes(b"".join([row.parameters.tobytes() for row in rows]), vocab, parameters.PARAMETERS)
    num_tops = [row.num_top for row in rows if row.num_top is not None]
    num_rows = len(rows) if num_rows is None else num_rows
    assert num_rows >= len(rows), "padding is added, not taken away"
    facts = SamplingFacts(
        num_logits=num_logits,
        vocab=vocab,
        num_rows=num_rows,
        is_in_order=num_rows <= num_logits and [row.logits_row for row in rows] == list(range(len(rows))),
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
    )
    return Asked(tuple(rows), tuple(given), facts.rounded_up() if is_rounded_up else facts, wishes.matrix)


class _Wishes(NamedTuple):
    """What the parameters of a step's rows come to; `matrix` is not to be changed."""

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


def _filled(entries: Sequence[object], num_entries: int, dtype: type[np.generic]) -> np.ndarray:
    """The entries, and the first of them again until there are so many; `NOTHING` of none."""
    if not num_entries:
        return NOTHING
    return np.array([*entries, *[entries[0]] * (num_entries - len(entries))], dtype)


_BITS = (np.uint32(1) << np.arange(MASK_WORD_BITS, dtype=np.uint32)).view(np.int32)

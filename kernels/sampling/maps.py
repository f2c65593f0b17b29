"""A step's sampling on the device: host facts that choose the code path, and tensors that hold the rest.

A captured step may be run again with all that `sampling_request.ask` gives for equal facts, written into the same
tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic

import numpy as np
import torch

from kernels.arrays import Array, by_name, declared
from kernels.sampling import parameters


def index_of(name: str) -> int:
    """The parameter's row in a step's matrix."""
    return next(i for i, parameter in enumerate(parameters.PARAMETERS) if parameter.name == name)


def neutral_row() -> np.ndarray:
    """float64 [num_parameters] that changes nothing."""
    return np.array([parameter.neutral for parameter in parameters.PARAMETERS])


def row_of(request: parameters.Parameters) -> np.ndarray:
    """float64 [num_parameters]."""
    return np.array([getattr(request, parameter.name) for parameter in parameters.PARAMETERS], np.float64)


def uses_penalties(matrix: np.ndarray) -> np.ndarray:
    """Whether counts of the sequence's tokens are needed: bool [rows] for [num_parameters, rows], one for one row."""
    is_penalty = [parameter.stage == "penalty" for parameter in parameters.PARAMETERS]
    is_used: np.ndarray = (matrix.T[..., is_penalty] != neutral_row()[is_penalty]).any(axis=-1)
    return is_used


def used_in(matrix: np.ndarray) -> frozenset[str]:
    """Names of the parameters that some column of [num_parameters, rows] does not leave neutral."""
    is_used = (matrix != neutral_row()[:, None]).any(axis=1)
    return frozenset(parameter.name for parameter, used in zip(parameters.PARAMETERS, is_used, strict=True) if used)


def matrix_of(rows: np.ndarray, vocab: int) -> np.ndarray:
    """float64 [num_parameters, rows] from `row_of` each row, one after the other; each value in the one form that
    implementations meet.

    Rows that take the most likely token have temperature 0 and are neutral in all else that shapes a draw; other
    temperatures are 1e-5 at least, since float32 would round them to 0; top_k is 0 to `vocab` - 1.
    """
    matrix = rows.reshape(-1, len(parameters.PARAMETERS)).T.copy()
    temperature, top_k = matrix[index_of("temperature")], matrix[index_of("top_k")]
    is_drawn = temperature > 0.0
    temperature[is_drawn] = temperature[is_drawn].clip(min=1e-5)
    top_k[(top_k < 0.0) | (top_k >= vocab)] = 0.0
    for i, parameter in enumerate(parameters.PARAMETERS):
        if parameter.stage == "draw" and parameter.name != "temperature":
            matrix[i, ~is_drawn] = parameter.neutral
    return matrix


MASK_WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class SamplingFacts:
    """All of a step's sampling that implementations may look at on the host: equal facts, equal code path and shapes.

    num_logits      rows of the logits
    vocab           columns of the logits
    num_rows        rows that get a token
    is_in_order     row i is row i of the logits, for all rows that get a token
    is_random       some row draws its token
    used            names of the parameters that some row does not leave neutral
    num_ranked      how many of the largest weights of a row tell where top_k and top_p cut; 0: nothing does
    num_penalised, num_biased, num_barred, num_masked
                    rows with penalties, single logits with a bias, single logits barred, rows with a mask
    num_given, num_chosen
                    rows whose log probabilities are wanted: of a given token, of the chosen one
    num_top         most likely tokens that are told of each of these
    num_scored      tokens by id whose log probabilities are told of each row with a chosen one
    """

    num_logits: int
    vocab: int
    num_rows: int
    is_in_order: bool
    is_random: bool
    used: frozenset[str]
    num_ranked: int
    num_penalised: int
    num_biased: int
    num_barred: int
    num_masked: int
    num_given: int
    num_chosen: int
    num_top: int
    num_scored: int = 0

    @property
    def is_largest_only(self) -> bool:
        """Each row's token is that of its largest logit, as the model made them."""
        return not (self.is_random or self.num_penalised or self.num_biased or self.num_barred or self.num_masked)

    @property
    def num_words(self) -> int:
        """int32 words of a row's mask."""
        return -(-self.vocab // MASK_WORD_BITS)


_NO_MASKS = torch.empty(0, dtype=torch.int32)


@dataclass(frozen=True, slots=True)
class SamplingArrays(Generic[Array]):
    """Arrays that a step's sampling reads, by `SamplingFacts`; empty where these need none.

    A position is row * vocab + token, where row counts the rows that get a token, as everywhere except in `rows` and
    `given`.

    rows          of the logits
    parameters    as `matrix_of` makes them
    numbers       uniform in [0, 1); if rounded to float32, in [0, 1]
    slots         slot of the token counts that a row reads and adds its token to; -1 in rows without penalties
    penalised     rows with penalties
    biased, bias  positions, and the values added there
    barred        positions
    masked        rows with a mask
    mask_bits     1 << bit
    given, given_tokens  rows of the logits, and tokens whose log probabilities are wanted
    chosen        rows whose token's log probability is wanted
    scored        tokens whose log probabilities are wanted of each of these, one row after the other
    """

    rows: Array = field(metadata=declared(np.int64, lambda facts: (facts.num_rows,)))
    parameters: Array = field(metadata=declared(np.floating, lambda facts: (len(neutral_row()), facts.num_rows)))
    numbers: Array = field(metadata=declared(np.floating, lambda facts: (facts.num_rows * facts.is_random,)))
    slots: Array = field(metadata=declared(np.int64, lambda facts: (facts.num_rows * (facts.num_penalised > 0),), -1))
    penalised: Array = field(metadata=declared(np.int64, lambda facts: (facts.num_penalised,)))
    biased: Array = field(metadata=declared(np.int64, lambda facts: (facts.num_biased,)))
    bias: Array = field(metadata=declared(np.float32, lambda facts: (facts.num_biased,)))
    barred: Array = field(metadata=declared(np.int64, lambda facts: (facts.num_barred,)))
    masked: Array = field(metadata=declared(np.int64, lambda facts: (facts.num_masked,)))
    mask_bits: Array = field(metadata=declared(np.int32, lambda facts: (MASK_WORD_BITS * (facts.num_masked > 0),)))
    given: Array = field(metadata=declared(np.int64, lambda facts: (facts.num_given,)))
    given_tokens: Array = field(metadata=declared(np.int64, lambda facts: (facts.num_given,)))
    chosen: Array = field(metadata=declared(np.int64, lambda facts: (facts.num_chosen,)))
    scored: Array = field(metadata=declared(np.int64, lambda facts: (facts.num_chosen * facts.num_scored,)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SamplingMaps(SamplingArrays[torch.Tensor]):
    """A step's sampling on the device.

    masks  int32 [num_masked, num_words], made later than the arrays: bit t % 32 of word t // 32 allows token t; empty
           without masks
    """

    facts: SamplingFacts
    masks: torch.Tensor

    @classmethod
    def of(
        cls, facts: SamplingFacts, arrays: SamplingArrays[torch.Tensor], masks: torch.Tensor | None = None
    ) -> SamplingMaps:
        """arrays  laid out for these facts"""
        masks = _NO_MASKS if masks is None else masks
        wanted = (facts.num_masked, facts.num_words) if facts.num_masked else (0,)
        assert tuple(masks.shape) == wanted, f"masks are {list(masks.shape)}, and these facts want {list(wanted)}"
        return cls(**by_name(arrays, SamplingArrays), facts=facts, masks=masks)

    def uses(self, name: str) -> bool:
        """Whether some row does not leave the parameter neutral."""
        return name in self.facts.used

    def parameter(self, name: str) -> torch.Tensor:
        """number [num_rows]"""
        return self.parameters[index_of(name)]

    def column(self, name: str) -> torch.Tensor:
        """float32 [num_rows, 1]"""
        return self.parameter(name).float()[:, None]

"""A step's sampling on the device: host facts that choose the code path, and tensors that hold the rest.

A captured step may be run again with all that `asked.ask` gives for equal facts, written into the same tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from kernels.sampling.parameters import index_of, names_by_stage, neutral_row

MASK_WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class SamplingFacts:
    """All of a step's sampling that implementations may look at on the host: equal facts, equal code path and shapes.

    num_logits      rows of the logits
    vocab           columns of the logits
    num_rows        rows that get a token, padding included
    is_in_order     row i is row i of the logits, for all rows that get a token
    is_random       some row draws its token
    used            names of the parameters that some row does not leave neutral
    num_ranked      how many of the largest weights of a row tell where top_k and top_p cut; 0: nothing does
    num_penalised, num_biased, num_barred, num_masked
                    rows with penalties, single logits with a bias, single logits barred, rows with a mask
    num_given, num_chosen
                    rows whose log probabilities are wanted: of a given token, of the chosen one
    num_top         most likely tokens that are told of each of these
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

    @property
    def is_largest_only(self) -> bool:
        """Each row's token is that of its largest logit, as the model made them."""
        return not (self.is_random or self.num_penalised or self.num_biased or self.num_barred or self.num_masked)

    @property
    def num_words(self) -> int:
        """int32 words of a row's mask."""
        return -(-self.vocab // MASK_WORD_BITS)

    def rounded_up(self) -> SamplingFacts:
        """The same with every count but those of rows and logits a power of two (or 0), and with all parameters of a
        stage used if one is, so that few facts serve many steps; what is too much repeats what is there, is neutral, or
        is not read."""
        counts = ("num_penalised", "num_biased", "num_barred", "num_masked", "num_given", "num_chosen")
        changed: dict[str, Any] = {name: _power_of_two(getattr(self, name)) for name in counts}
        for name in ("num_ranked", "num_top"):
            changed[name] = min(_power_of_two(getattr(self, name)), self.vocab)
        used = {"temperature"}
        for names in names_by_stage():
            used |= names if self.used & names - {"temperature"} else set()
        return replace(self, **changed, used=frozenset(used))


# What facts do not need.
NOTHING = np.empty(0, np.float32)


class SamplingArrays(NamedTuple):
    """The arrays of `SamplingMaps` on the host, in its order; `NOTHING` where the facts need none."""

    rows: np.ndarray = NOTHING
    parameters: np.ndarray = NOTHING
    numbers: np.ndarray = NOTHING
    slots: np.ndarray = NOTHING
    penalised: np.ndarray = NOTHING
    biased: np.ndarray = NOTHING
    bias: np.ndarray = NOTHING
    barred: np.ndarray = NOTHING
    masked: np.ndarray = NOTHING
    masks: np.ndarray = NOTHING
    mask_bits: np.ndarray = NOTHING
    given: np.ndarray = NOTHING
    given_tokens: np.ndarray = NOTHING
    chosen: np.ndarray = NOTHING


@dataclass(frozen=True, slots=True, eq=False)
class SamplingMaps:
    """A step's sampling on the device. A number is float32, on a CPU float64. A place is row * vocab + token, where row
    counts the rows that get a token, as everywhere but in `rows` and `given`.

    rows          int64 [num_rows], rows of the logits
    parameters    number [num_parameters, num_rows], as `parameters.matrix_of` makes them; padding is greedy and neutral
    numbers       number [num_rows], uniform in [0, 1); if rounded to float32, in [0, 1]
    slots         int64 [num_rows], whose counts a row reads and its token is added to; -1 in rows without penalties
    penalised     int64 [num_penalised], rows with penalties
    biased, bias  int64 [num_biased] places, float32 [num_biased]
    barred        int64 [num_barred] places
    masked, masks int64 [num_masked] rows, int32 [num_masked, num_words]: bit t % 32 of word t // 32 allows token t
    mask_bits     int32 [32], 1 << bit
    given, given_tokens  int64 [num_given] rows of the logits, and tokens whose log probabilities are wanted
    chosen        int64 [num_chosen], rows whose token's log probability is wanted

    Padding of lists repeats their first entry, so that an edit of the logits must read, compute, then write.
    """

    facts: SamplingFacts
    rows: torch.Tensor
    parameters: torch.Tensor
    numbers: torch.Tensor
    slots: torch.Tensor
    penalised: torch.Tensor
    biased: torch.Tensor
    bias: torch.Tensor
    barred: torch.Tensor
    masked: torch.Tensor
    masks: torch.Tensor
    mask_bits: torch.Tensor
    given: torch.Tensor
    given_tokens: torch.Tensor
    chosen: torch.Tensor

    @classmethod
    def from_tensors(
        cls, facts: SamplingFacts, tensors: Sequence[torch.Tensor], masks: torch.Tensor | None = None
    ) -> SamplingMaps:
        """tensors  those of `SamplingArrays` on one device, in its order
        masks    that were made later than these
        """
        maps = cls(facts, *tensors)
        if masks is not None:
            maps = replace(maps, masks=masks)
        for name, shape in shapes_of(facts):
            found = tuple(getattr(maps, name).shape)
            assert found == shape, f"{name} is {list(found)}, and these facts want {list(shape)}"
        return maps

    def uses(self, name: str) -> bool:
        """Whether some row does not leave the parameter neutral."""
        return name in self.facts.used

    def parameter(self, name: str) -> torch.Tensor:
        """number [num_rows]"""
        return self.parameters[index_of(name)]


def shapes_of(facts: SamplingFacts) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The arrays that these facts need, and their shapes."""
    if facts.num_rows:
        yield "rows", (facts.num_rows,)
        yield "parameters", (len(neutral_row()), facts.num_rows)
    if facts.is_random:
        yield "numbers", (facts.num_rows,)
    if facts.num_penalised:
        yield "slots", (facts.num_rows,)
        yield "penalised", (facts.num_penalised,)
    if facts.num_biased:
        yield "biased", (facts.num_biased,)
        yield "bias", (facts.num_biased,)
    if facts.num_barred:
        yield "barred", (facts.num_barred,)
    if facts.num_masked:
        yield "masked", (facts.num_masked,)
        yield "masks", (facts.num_masked, facts.num_words)
        yield "mask_bits", (MASK_WORD_BITS,)
    if facts.num_given:
        yield "given", (facts.num_given,)
        yield "given_tokens", (facts.num_given,)
    if facts.num_chosen:
        yield "chosen", (facts.num_chosen,)


def number_dtype(device: torch.device) -> type[np.floating]:
    """In which parameters and uniform numbers go to a device: accelerators may lack float64, or be slow at it."""
    return np.float64 if device.type == "cpu" else np.float32


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length() if number else 0

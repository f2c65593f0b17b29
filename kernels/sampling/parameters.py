"""The sampling parameters of a request, each declared once.

A further one is one line of `PARAMETERS` and one line in each implementation, beside the others of its stage:

    if maps.uses("made_up"):
        ...maps.parameter("made_up")...   # [rows]

Its way to the device, its neutral value in rows that do not ask for it, and the question whether any row of a step
does, follow from the declaration. A request brings its value under the parameter's name (`row_of`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np


@dataclass(frozen=True, slots=True)
class Parameter:
    """One number of a request.

    neutral      the value that changes nothing
    stage        "penalty": changes the logits by what the sequence holds already, so that its slot's counts are read;
                 "draw": changes the distribution that is drawn from, so nothing where the most likely token is taken
    meaning      a sentence; p is a token's probability after what stands before in this table
    least, most  that can be computed with; the API may take less
    is_above     least itself cannot
    """

    name: str
    neutral: float
    stage: Literal["penalty", "draw"]
    meaning: str
    least: float = -math.inf
    most: float = math.inf
    is_above: bool = False

    def takes(self, value: float) -> bool:
        """Whether a request may have it."""
        return math.isfinite(value) and self.least <= value <= self.most and not (self.is_above and value == self.least)


# In the order in which they act; logit biases, barred tokens and masks come between the two stages.
PARAMETERS: tuple[Parameter, ...] = (
    Parameter(
        "repetition_penalty", 1.0, "penalty", "Divides positive logits of prompt and output, multiplies others.",
        least=0.0, is_above=True,
    ),
    Parameter(
        "frequency_penalty", 0.0, "penalty", "Is taken off a token's logit once for each time the output has it."
    ),
    Parameter("presence_penalty", 0.0, "penalty", "Is taken off a token's logit if the output has it."),
    Parameter("temperature", 1.0, "draw", "Divides the logits; 0 takes the most likely token.", least=0.0),
    Parameter(
        "min_p", 0.0, "draw", "Excludes tokens with less than this share of the largest p.", least=0.0, most=1.0
    ),
    Parameter(
        "top_k", 0.0, "draw", "Excludes all but so many of the largest p, and equals of the last; 0 excludes none.",
        least=0.0, most=2**31 - 1,
    ),
    Parameter(
        "top_p", 1.0, "draw", "Excludes all but the fewest tokens whose p sum to this share, and equals of the last.",
        least=0.0, most=1.0,
    ),
)  # fmt: skip


def index_of(name: str) -> int:
    """The parameter's row in a step's matrix."""
    return next(i for i, parameter in enumerate(PARAMETERS) if parameter.name == name)


def neutral_row() -> np.ndarray:
    """float64 [num_parameters] that changes nothing."""
    return np.array([parameter.neutral for parameter in PARAMETERS])


def row_of(request: object) -> np.ndarray:
    """float64 [num_parameters] of an object that has an attribute by each parameter's name."""
    return np.array([getattr(request, parameter.name) for parameter in PARAMETERS], np.float64)


def uses_penalties(matrix: np.ndarray) -> np.ndarray:
    """Whether counts of the sequence's tokens are needed: bool [rows] for [num_parameters, rows], one for one row."""
    is_penalty = [parameter.stage == "penalty" for parameter in PARAMETERS]
    is_used: np.ndarray = (matrix.T[..., is_penalty] != neutral_row()[is_penalty]).any(axis=-1)
    return is_used


def used_in(matrix: np.ndarray) -> frozenset[str]:
    """Names of the parameters that some column of [num_parameters, rows] does not leave neutral."""
    is_used = (matrix != neutral_row()[:, None]).any(axis=1)
    return frozenset(parameter.name for parameter, used in zip(PARAMETERS, is_used, strict=True) if used)


def matrix_of(rows: np.ndarray, vocab: int) -> np.ndarray:
    """float64 [num_parameters, rows] from `row_of` each row, one after the other; each value in the one form that
    implementations meet.

    Rows that take the most likely token have temperature 0 and are neutral in all else that shapes a draw; other
    temperatures are 1e-5 at least, since float32 would round them to 0; top_k is below `vocab`, or 0.
    """
    matrix = rows.reshape(-1, len(PARAMETERS)).T.copy()
    temperature, top_k = matrix[index_of("temperature")], matrix[index_of("top_k")]
    is_drawn = temperature > 0.0
    temperature[is_drawn] = temperature[is_drawn].clip(min=1e-5)
    top_k[top_k >= vocab] = 0.0
    for i, parameter in enumerate(PARAMETERS):
        if parameter.stage == "draw" and parameter.name != "temperature":
            matrix[i, ~is_drawn] = parameter.neutral
    return matrix

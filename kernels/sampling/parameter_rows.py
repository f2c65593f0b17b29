"""Numeric rows of requests' sampling parameters: a column of a step's matrix for each row of logits.

They are separate from the declaration, which processes without numpy read too.
"""

from __future__ import annotations

import numpy as np

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

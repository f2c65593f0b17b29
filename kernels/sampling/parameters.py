"""The sampling parameters of a request, each declared once.

A further one is one field of `Parameters`, a line in `reference.py`, and one for each kind of device beside the others
of its stage, in `penalty_state.py` or in `any_device.py`:

    if maps.uses("made_up"):
        ...maps.parameter("made_up")...   # [rows]

The rest follows from the declaration: the field of HTTP requests with its bounds and what is said of it, the model's
default in its `generation_config.json`, the field of the message to the engine (`service.engine.ipc.messages.Sampling`)
and the check there, the way to the device, the neutral value in rows that do not ask, and whether any row of a step
does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Literal, NamedTuple, get_type_hints

import msgspec


@dataclass(frozen=True, slots=True)
class Parameter:
    """One number of a request.

    stage        "penalty": changes the logits by the sequence's tokens so far, so that its slot's counts are read;
                 "draw": changes the distribution that is drawn from, so it has no effect where the most likely token is
                 chosen
    meaning      its effect, for clients
    least, most  bounds in a request
    is_whole     an integer; a client's larger value than `most` is clamped to it
    is_models    a model's generation_config.json may set it, as transformers and vLLM read one
    name         in requests
    neutral      the value that changes nothing
    """

    stage: Literal["penalty", "draw"]
    meaning: str
    least: float = -math.inf
    most: float = math.inf
    is_whole: bool = False
    is_models: bool = True
    name: str = ""
    neutral: float = 0.0

    def takes(self, value: float) -> bool:
        """Whether a request may have it."""
        return math.isfinite(value) and self.least <= value <= self.most


class Parameters(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The sampling parameters of a request, neutral by default.

    They are listed in the order in which they act; logit biases, barred tokens and masks come between the two stages.
    Probabilities are those after the parameters above in this table.
    """

    repetition_penalty: Annotated[
        float,
        Parameter(
            "penalty",
            "divides positive logits of tokens that prompt or answer have, multiplies negative ones",
            least=0.01,
            most=10.0,
        ),
    ] = 1.0
    frequency_penalty: Annotated[
        float,
        Parameter(
            "penalty",
            "is taken off a token's logit for each time the answer has it",
            least=-2.0,
            most=2.0,
            is_models=False,
        ),
    ] = 0.0
    presence_penalty: Annotated[
        float,
        Parameter(
            "penalty", "is taken off a token's logit if the answer has it", least=-2.0, most=2.0, is_models=False
        ),
    ] = 0.0
    temperature: Annotated[
        float, Parameter("draw", "divides the logits; 0 takes the most likely token", least=0.0, most=2.0)
    ] = 1.0
    min_p: Annotated[
        float,
        Parameter("draw", "excludes tokens with less than this share of the largest probability", least=0.0, most=1.0),
    ] = 0.0
    top_k: Annotated[
        float,
        Parameter(
            "draw",
            "excludes all but so many of the most likely tokens, and equals of the last; 0 and -1 exclude none",
            least=-1.0,
            most=2.0**31 - 1,
            is_whole=True,
        ),
    ] = 0.0
    top_p: Annotated[
        float,
        Parameter(
            "draw",
            "excludes all but the fewest tokens whose probabilities sum to this share, and equals of the last; 0 takes "
            "the most likely token",
            least=0.0,
            most=1.0,
        ),
    ] = 1.0


def _declared() -> tuple[Parameter, ...]:
    types = get_type_hints(Parameters, include_extras=True)
    return tuple(
        replace(types[field.name].__metadata__[0], name=field.name, neutral=field.default)
        for field in msgspec.structs.fields(Parameters)
    )


PARAMETERS = _declared()

# The value of each parameter that changes nothing, by name.
NEUTRAL: Mapping[str, float] = {parameter.name: parameter.neutral for parameter in PARAMETERS}


class ScoredToken(NamedTuple):
    """Log probability of one token, and others with theirs: the most likely ones, most likely first, or those that were
    asked for by id. rank: how many tokens are at least as likely, itself among them; 0: not counted."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0

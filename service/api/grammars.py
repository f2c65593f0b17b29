"""What a request's answer is constrained to, as the grammar that the engine follows."""

from __future__ import annotations

import asyncio

from service.api.errors import BadRequest
from service.api.state import Services
from service.grammars.constraints import Constraint, ConstraintError


async def compiled(services: Services, constraint: Constraint, field: str) -> str:
    """The constraint's grammar, for `Sampling.grammar`, once it has been tried. BadRequest about `field` if it cannot
    be followed, or takes too much."""
    trial = services.grammar_trial
    known = trial.known(constraint)
    if known is not None:
        return known
    try:
        return await asyncio.get_running_loop().run_in_executor(trial.thread, trial.compile, constraint)
    except ConstraintError as error:
        raise bad_constraint(error, field) from error


def bad_constraint(error: ConstraintError, field: str) -> BadRequest:
    """What the client is told of a constraint that is none."""
    return BadRequest(f"`{field}` {error}.", param=field)

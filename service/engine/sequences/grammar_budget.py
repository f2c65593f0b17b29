"""Sequences that are deferred for a step, so that costly grammars delay the tokens of others for a short time only.

A step waits for the masks of all of its sequences, which one thread makes: beside the model, as long as grammars are
usual ones. Time beyond that is a debt of the sequence's tenant, and is forgiven at SHARE of the time that passes. While
more than one tenant runs:
- a tenant that owes more than MAX_SECONDS_OWED has none of its sequences with grammars in a step;
- a tenant has at most MAX_NEW sequences in a step whose first mask is still to be made, since its cost is unknown.
So the others wait for MAX_NEW first masks at most, and for SHARE of the time from then on.

Without a keys file all clients are one tenant. Among the sequences of one tenant the rule therefore applies only to
those whose last mask was costly, and to those without one yet, unless masks of another sequence with the same grammar
were cheap. A step has MAX_NEW of them, and none while the tenant is in debt, as long as something else runs. A deferred
sequence keeps all it holds, and goes on after (debt / SHARE) seconds at the latest.

Who owns: the scheduler, which asks once a step. Accounts are kept for the life of the engine, one for each tenant of
the keys file that has used a grammar. The thread that makes masks writes what was spent, the engine's own the rest.
"""

from __future__ import annotations

import time
from collections import Counter, abc
from collections.abc import Callable

from service.engine.sequences.constraint import Account
from service.engine.sequences.sequence import Sequence

MAX_SECONDS_OWED = 20e-3
MAX_NEW = 4


class GrammarBudget:
    """See the module's docstring. `clock` returns seconds that pass."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._accounts: dict[str, Account] = {}

    def account(self, tenant: str) -> Account:
        """The account that the constraints of a tenant's sequences are charged to."""
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = Account(self._clock())
        return account

    def deferred(self, running: abc.Sequence[Sequence]) -> set[Sequence]:
        """The running sequences, given in the order of arrival, that the next step leaves out; never all of them."""
        bound = [one for one in running if one.constraint is not None and one.constraint.account is not None]
        if not bound:
            return set()
        now = self._clock()
        tenants = {one.request.tenant for one in bound}
        is_in_debt = {tenant: self.account(tenant).owed(now) > MAX_SECONDS_OWED for tenant in tenants}
        if len({one.request.tenant for one in running}) == 1:
            unproven = _unproven(bound)
            held = set(unproven if any(is_in_debt.values()) else unproven[MAX_NEW:])
            return held if len(unproven) < len(running) else set()
        num_new: Counter[str] = Counter()
        held = set()
        for one in bound:
            assert one.constraint is not None
            tenant = one.request.tenant
            num_new[tenant] += not one.constraint.num_masks
            if is_in_debt[tenant] or (not one.constraint.num_masks and num_new[tenant] > MAX_NEW):
                held.add(one)
        return held if len(held) < len(running) else set()


def _unproven(bound: abc.Sequence[Sequence]) -> list[Sequence]:
    """The sequences with grammars whose next mask may be costly."""
    constraints = [one.constraint for one in bound if one.constraint is not None]
    cheap = {one.grammar for one in constraints if one.num_masks and not one.is_costly}
    cheap -= {one.grammar for one in constraints if one.is_costly}
    return [
        one
        for one, constraint in zip(bound, constraints, strict=True)
        if constraint.is_costly or not (constraint.num_masks or constraint.grammar in cheap)
    ]

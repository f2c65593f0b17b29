"""Which sequences sit a step out, so that costly grammars hold up no other tokens than their own for long.

A step waits for the masks of all of its sequences, which one thread makes: beside the model, as long as grammars are
usual ones. What a mask takes beyond that is owed by the sequence's tenant, and forgiven at SHARE of the time that
passes. While more than one tenant runs:
- a tenant that owes more than MAX_SECONDS_OWED has none of its sequences with grammars in a step;
- of sequences whose first mask is still to be made, whose cost nobody knows, a tenant has MAX_NEW in a step.
So the others wait for MAX_NEW first masks at most, and for SHARE of the time from then on.

Where there are no tenants, all clients are one. So among the sequences of one tenant the same holds for those alone
whose last mask was costly, and for those that have none yet, unless another one's of the same grammar have shown that
these are cheap. MAX_NEW of them have a part in a step, and none while the tenant is in debt, as long as something else
runs. Whoever sits out keeps all it holds, and goes on after its debt over SHARE in seconds at the latest.

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
    """See the module's docstring. `clock` tells seconds that pass."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._accounts: dict[str, Account] = {}

    def account(self, tenant: str) -> Account:
        """That its sequences' constraints spend from."""
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = Account(self._clock())
        return account

    def deferred(self, running: abc.Sequence[Sequence]) -> set[Sequence]:
        """Of these, which are in the order of arrival, those that have no part in the next step; never all of them."""
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
    """Of sequences with grammars, those whose next mask may be costly."""
    constraints = [one.constraint for one in bound if one.constraint is not None]
    cheap = {one.grammar for one in constraints if one.num_masks and not one.is_costly}
    cheap -= {one.grammar for one in constraints if one.is_costly}
    return [
        one
        for one, constraint in zip(bound, constraints, strict=True)
        if constraint.is_costly or not (constraint.num_masks or constraint.grammar in cheap)
    ]

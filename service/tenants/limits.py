"""A tenant's use of its limits. For one thread, the event loop's: a check and its charge are one step.

Servers of one store share what their tenants have taken, so that limits count over all of them: each writes a file of
its own, twice a second, and reads those of the others. Nobody asks anybody before a request is admitted, so what others
have admitted within about a second is not known: by that a limit can be exceeded. Times are ages, and files are dated
by whoever keeps them: no two clocks are compared.
"""

from __future__ import annotations

import math
import os
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from adapters.files.durable_files import replace_file
from service.tenants.keys_file import Limits

EXCHANGE_SECONDS = 0.5
# A server that has written nothing for so long stands still or is gone, and its requests with it.
ABSENT_SECONDS = 10.0
_FORGET_SECONDS = 300.0

# (seconds ago, amount), the oldest first.
Taken = tuple[tuple[float, int], ...]


class TenantUsage(msgspec.Struct, frozen=True):
    """One tenant's use: sequences in flight, and tokens and uploads of the last minute."""

    num_in_flight: int = 0
    tokens: Taken = ()
    uploads: Taken = ()


_decoder = msgspec.json.Decoder(dict[str, TenantUsage])


class Exchange:
    """One server's file among those of the others, in `directory`. Blocking; one thread at a time."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._own = directory / uuid.uuid4().hex
        self._was_made = False

    def say_and_hear(self, own: dict[str, TenantUsage]) -> dict[str, TenantUsage]:
        """Write what tenants here have taken; what they have taken on all others together. Raises OSError."""
        if not self._was_made:  # once: where the store is away nothing may be put in its place
            self._directory.mkdir(parents=True, exist_ok=True)
            self._was_made = True
        replace_file(self._own, msgspec.json.encode(own), is_durable=False)
        now_seconds = self._own.stat().st_mtime
        return _together(self._others(now_seconds))

    def _others(self, now_seconds: float) -> Iterator[dict[str, TenantUsage]]:
        for path in self._directory.iterdir():
            if path == self._own:
                continue
            with suppress(FileNotFoundError, msgspec.DecodeError):
                with path.open("rb") as file:
                    age_seconds = max(0.0, now_seconds - os.fstat(file.fileno()).st_mtime)
                    data = file.read()
                if age_seconds > _FORGET_SECONDS:
                    path.unlink()
                elif not path.name.startswith("."):
                    yield {name: _older(one, age_seconds) for name, one in _decoder.decode(data).items()}


def _older(usage: TenantUsage, age_seconds: float) -> TenantUsage:
    return TenantUsage(
        usage.num_in_flight if age_seconds <= ABSENT_SECONDS else 0,
        tuple((ago + age_seconds, amount) for ago, amount in usage.tokens),
        tuple((ago + age_seconds, amount) for ago, amount in usage.uploads),
    )


def _together(servers: Iterable[dict[str, TenantUsage]]) -> dict[str, TenantUsage]:
    sums: dict[str, TenantUsage] = {}
    for server in servers:
        for name, one in server.items():
            so_far = sums.get(name, TenantUsage())
            sums[name] = TenantUsage(
                so_far.num_in_flight + one.num_in_flight,
                tuple(sorted(so_far.tokens + one.tokens, reverse=True)),
                tuple(sorted(so_far.uploads + one.uploads, reverse=True)),
            )
    return sums


_MINUTE_SECONDS = 60
# All that tell where a tenant stands.
RATE_HEADERS = tuple(
    f"x-ratelimit-{number}-{what}"
    for what in ("requests", "tokens", "uploads", "adapters", "adapter-bytes")
    for number in ("limit", "remaining", "reset")
)


class LimitReached(Exception):
    """A tenant has as much as it may have. `headers` say when to ask again, and more."""

    def __init__(self, message: str, retry_seconds: int = 1, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.headers = {"Retry-After": str(retry_seconds), **(headers or {})}


@dataclass
class Charge:
    """An amount charged within one second of the clock, by one or several; it falls when some is refunded."""

    second: int
    amount: int


class Minute:
    """Amounts charged in the last 60 seconds, a sliding window.

    Amounts count by whole seconds of the clock, and so for up to a second longer than 60.

    clock  seconds that never go back
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._charges: deque[Charge] = deque()
        self._used = 0
        # On other servers, by this one's clock; never changed here but for what is too old.
        self._elsewhere: deque[Charge] = deque()

    @property
    def used(self) -> int:
        """The amount that counts now."""
        self._forget()
        return self._used + sum(charge.amount for charge in self._elsewhere)

    def taken(self) -> Taken:
        """The amounts charged here that count now, each with its age in seconds."""
        self._forget()
        now_seconds = self._clock()
        return tuple((now_seconds - charge.second, charge.amount) for charge in self._charges if charge.amount)

    def learn(self, taken: Taken) -> None:
        """All that was taken elsewhere, in place of what was known of that."""
        now_seconds = self._clock()
        self._elsewhere = deque(Charge(math.floor(now_seconds - ago), amount) for ago, amount in taken)

    def seconds_until(self, amount: int) -> int:
        """In how many seconds no more than `amount` counts, if nothing more is taken; 0 for now."""
        left = self.used
        for charge in sorted((*self._charges, *self._elsewhere), key=lambda one: one.second):
            if left <= amount:
                break
            left -= charge.amount
            if left <= amount:
                return max(1, math.ceil(charge.second + _MINUTE_SECONDS + 1 - self._clock()))
        return 0

    def take(self, amount: int) -> Charge:
        """Count `amount` from now on."""
        self._forget()
        second = math.floor(self._clock())
        if not self._charges or self._charges[-1].second != second:
            self._charges.append(Charge(second, 0))
        self._charges[-1].amount += amount
        self._used += amount
        return self._charges[-1]

    def give_back(self, charge: Charge, amount: int) -> None:
        """So much of it was not used after all; what no longer counts is left as it is."""
        self._forget()
        if self._charges and charge.second >= self._charges[0].second:
            charge.amount -= amount
            self._used -= amount
            assert charge.amount >= 0, "more was given back than taken"

    def _forget(self) -> None:
        oldest = math.floor(self._clock()) - _MINUTE_SECONDS
        while self._charges and self._charges[0].second < oldest:
            self._used -= self._charges.popleft().amount
        while self._elsewhere and self._elsewhere[0].second < oldest:
            self._elsewhere.popleft()


class Tenant:
    """Whoever keys and adapters belong to.

    name    of the keys file, or DEFAULT
    limits  replaced when the keys file is read again; what was taken stays
    num_in_flight  sequences that run or wait here
    """

    def __init__(self, name: str, limits: Limits, clock: Callable[[], float]) -> None:
        self.name = name
        self.limits = limits
        self.num_in_flight = self._num_elsewhere = 0
        self._tokens, self._uploads = Minute(clock), Minute(clock)

    def enter(self, num_sequences: int) -> None:
        """Take places. LimitReached if the tenant may not have all of them now."""
        limit = self.limits.requests_in_flight
        if limit is not None and self._num_everywhere + num_sequences > limit:
            raise LimitReached(
                f"{self._num_everywhere} of your {limit} requests in flight are taken and this one needs "
                f"{num_sequences}; send it again when others have ended.",
                1,
            )
        self.num_in_flight += num_sequences

    def leave(self, num_sequences: int) -> None:
        """Give places back."""
        self.num_in_flight -= num_sequences
        assert self.num_in_flight >= 0, "more places were given back than taken"

    def take_tokens(self, num_tokens: int) -> Charge:
        """Tokens that are about to be computed. LimitReached if they are too many for now; the caller has refused what
        is above the limit by itself."""
        limit = self.limits.tokens_per_minute
        if limit is not None and self._tokens.used + num_tokens > limit:
            left = max(0, limit - self._tokens.used)
            raise LimitReached(
                f"{left} of your {limit} tokens per minute are left, and this request may take {num_tokens} "
                "(prompt and `max_tokens` of each sequence); send it again later, or lower `max_tokens`.",
                self._tokens.seconds_until(limit - num_tokens),
            )
        return self._tokens.take(num_tokens)

    def give_back_tokens(self, charge: Charge, num_tokens: int) -> None:
        """Tokens that were not computed after all."""
        self._tokens.give_back(charge, num_tokens)

    def take_change(self) -> None:
        """An upload begins, or another change of an adapter or its name. LimitReached if there were too many in the
        last minute."""
        limit = self.limits.uploads_per_minute
        if limit is not None and self._uploads.used + 1 > limit:
            wait_seconds = self._uploads.seconds_until(limit - 1) if limit else _MINUTE_SECONDS
            raise LimitReached(
                f"You have begun {limit} uploads within a minute, which is your limit; deletions, rollbacks and "
                "changes of visibility count as uploads. Send it again later.",
                wait_seconds,
            )
        self._uploads.take(1)

    def usage(self) -> TenantUsage:
        """The tenant's use on this server."""
        return TenantUsage(self.num_in_flight, self._tokens.taken(), self._uploads.taken())

    def learn(self, elsewhere: TenantUsage) -> None:
        """Set the tenant's use on all other servers together."""
        self._num_elsewhere = elsewhere.num_in_flight
        self._tokens.learn(elsewhere.tokens)
        self._uploads.learn(elsewhere.uploads)

    @property
    def _num_everywhere(self) -> int:
        return self.num_in_flight + self._num_elsewhere

    def headers(self) -> dict[str, str]:
        """Where the tenant stands, as OpenAI says it; nothing of what has no limit."""
        limits, headers = self.limits, dict[str, str]()
        if limits.requests_in_flight is not None:
            # When another request ends nobody knows.
            num_open = self._num_everywhere
            headers |= _rate_headers("requests", limits.requests_in_flight, num_open, 1 if num_open else 0)
        for name, limit, minute in (
            ("tokens", limits.tokens_per_minute, self._tokens),
            ("uploads", limits.uploads_per_minute, self._uploads),
        ):
            if limit is not None:
                headers |= _rate_headers(name, limit, minute.used, minute.seconds_until(0))
        return headers


def _rate_headers(name: str, limit: int, used: int, reset_seconds: int) -> dict[str, str]:
    return {
        f"x-ratelimit-limit-{name}": str(limit),
        f"x-ratelimit-remaining-{name}": str(max(0, limit - used)),
        f"x-ratelimit-reset-{name}": f"{reset_seconds}s",
    }

"""Adapters that operators keep on the device whether they are used or not, and the limit on their rows.

A pin belongs to a name, and follows the name to other contents. At most half of the rows of each group may be pinned,
so others have room; an adapter that needs more than the rest evicts pinned ones for as long as it is served.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from adapters.errors import Conflict
from adapters.layout import NON_LORA_GROUPS, Group
from adapters.row_plan import MEANINGS, RowPlan


class Pinned(msgspec.Struct, frozen=True):
    """A pinned name, the digest that it stands for, and the rows that this takes."""

    name: str
    digest: str
    rows: Mapping[str, int]


class Pins(msgspec.Struct, frozen=True):
    """Digests to be kept on the device, and pinned names for which there are not enough rows."""

    digests: tuple[str, ...] = ()
    left_out: frozenset[str] = frozenset()


def most_rows(plan: RowPlan, group: Group) -> int:
    """The most rows of the group that may be pinned."""
    return plan.rows[group] // 2


def select(pinned: Iterable[Pinned], plan: RowPlan) -> Pins:
    """The pins that fit, by name. Some do not where the row budget has shrunk, or a name has moved to a larger
    adapter."""
    kept: dict[str, Pinned] = {}
    left_out = []
    for one in sorted(pinned, key=lambda one: one.name):
        if _excess((*kept.values(), one), plan) is None:
            kept[one.digest] = one
        else:
            left_out.append(one.name)
    return Pins(tuple(kept), frozenset(left_out))


def refuse_excess(pinned: Iterable[Pinned], plan: RowPlan) -> None:
    """Raises Conflict if these together take more rows than may be pinned."""
    excess = _excess(pinned, plan)
    if excess is not None:
        group, num_rows = excess
        num_there, most = plan.rows[group], most_rows(plan, group)
        if group in NON_LORA_GROUPS:
            raise Conflict(
                f"The device has room for {num_there} adapters with {MEANINGS[group]}, of which {most} may be pinned, "
                f"and this would be number {num_rows}; unpin others first, or give the server more "
                "--adapter-side-bytes."
            )
        raise Conflict(
            f"The pinned adapters would take {num_rows} {group} rows of the device's {num_there}, of which {most} may "
            "be pinned; unpin others first, or give the server more --adapter-row-bytes."
        )


def _excess(pinned: Iterable[Pinned], plan: RowPlan) -> tuple[Group, int] | None:
    """The first group in which the pins take too many rows, and that number of rows. A content of several names counts
    once."""
    contents = {one.digest: one.rows for one in pinned}
    for group in plan.groups:
        num_rows = sum(plan.length(group, rows.get(group, 0)) for rows in contents.values())
        if num_rows > most_rows(plan, group):
            return group, num_rows
    return None

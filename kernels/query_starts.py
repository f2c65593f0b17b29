"""Where sequences begin in a step's tokens, as the host knows it: looked at once for a step, not in each layer."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise


class QueryStarts(tuple[int, ...]):
    """`query_start_loc` as host integers, [num_sequences + 1]: tokens [starts[i], starts[i + 1]) belong to sequence i.

    Ops look at the values of any other sequence at each call. ValueError where they do not begin at 0 or do not ascend.
    """

    __slots__ = ()

    def __new__(cls, starts: Iterable[int]) -> QueryStarts:
        made = super().__new__(cls, starts)
        if not made or made[0] != 0:
            raise ValueError(f"query_start_loc begins at {made[0] if made else 'nothing'}; it must start at 0")
        if any(start > end for start, end in pairwise(made)):
            raise ValueError("query_start_loc must ascend")
        return made

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences together."""
        return self[-1]

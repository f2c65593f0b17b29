"""Random changes of names, and what they make of them: for runs that compare it with what a store or a server holds."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

State = dict[str, tuple[int, ...]]  # name to the contents of its versions, by number, oldest first
Change = tuple[str, str, int]  # "put", "rollback" or "delete", which name, which content


def changes(seed: int, names: Sequence[str], num_contents: int) -> Iterator[Change]:
    """An endless sequence, the same for the same seed."""
    generator = random.Random(seed)
    while True:
        what = generator.choices(("put", "rollback", "delete"), (5, 2, 1))[0]
        yield what, generator.choice(names), generator.randrange(num_contents)


def after(state: State, change: Change, max_versions: int) -> State:
    """What a change makes of the names."""
    what, name, content = change
    versions = state.get(name, ())
    others = {other: kept for other, kept in state.items() if other != name}
    if what == "delete":
        return others
    if what == "rollback":
        earlier = [one for one in versions if one != versions[-1]]
        return {**others, name: (*versions, earlier[-1])[-max_versions:]} if earlier else state
    return state if versions[-1:] == (content,) else {**others, name: (*versions, content)[-max_versions:]}

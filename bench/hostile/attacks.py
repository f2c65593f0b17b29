"""All attacks, by what is told of them, in the order in which they are made."""

from __future__ import annotations

from bench.hostile import bodies, changes, connections, grammars, templates, tools, uploads
from bench.hostile.target import Attack, Target

KINDS = (bodies, connections, uploads, templates, grammars, changes, tools)


def attacks(target: Target) -> dict[str, Attack]:
    """Every one of them is bounded and ends by itself."""
    found: dict[str, Attack] = {}
    for kind in KINDS:
        made = kind.attacks(target)
        assert not found.keys() & made.keys()
        found |= made
    return found

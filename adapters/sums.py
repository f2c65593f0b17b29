"""Sums of adapters, each times a weight, added to the base: exact, PEFT's `combination_type="cat"`.

A sum has no files and no copy in host memory: its rows on the device are its parts' rows, one part behind the other.
Its digest names the parts, so both processes know them, and equal sums are one, whoever asks and in whichever order:

    <digest>*<weight>+<digest>*<weight>     by digest, each once, no weight 0; one part of weight 1 is that adapter
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache

from adapters.files.manifest import Manifest
from adapters.row_plan import MEANINGS

# Adapters in a sum, and the size of a weight. The ranks of a sum are bounded by the device's.
MAX_PARTS = 8
MAX_WEIGHT = 100.0


def digest_of(parts: Iterable[tuple[str, float]]) -> str | None:
    """The digest of a sum of (digest, weight), None where nothing is left but the base."""
    weights: dict[str, list[float]] = {}
    for digest, weight in parts:
        weights.setdefault(digest, []).append(weight)
    # `fsum` rounds once, so that the order does not matter.
    totals = sorted((digest, math.fsum(found)) for digest, found in weights.items())
    left = [(digest, float(total)) for digest, total in totals if total]
    if len(left) == 1 and left[0][1] == 1.0:
        return left[0][0]
    return "+".join(f"{digest}*{total!r}" for digest, total in left) or None


@lru_cache(maxsize=1024)
def parts_of(digest: str) -> tuple[tuple[str, float], ...]:
    """Digest and weight of each part of a sum; an adapter is its own only part."""
    if not is_sum(digest):
        return ((digest, 1.0),)
    split = (one.partition("*") for one in digest.split("+"))
    return tuple((part, float(weight)) for part, _, weight in split)


def is_sum(digest: str) -> bool:
    """Whether the digest is a sum's."""
    return "*" in digest


def rows_of(manifests: Iterable[Manifest]) -> dict[str, int]:
    """Rows that a sum of these takes on the device, by projection group."""
    rows: Counter[str] = Counter()
    for manifest in manifests:
        rows.update(manifest.rows)
    return dict(rows)


def what_cannot_be_added(manifest: Manifest) -> str | None:
    """The adapter's first part that is no LoRA weight, in words; None if it has none, so that sums may have it."""
    found = [words for group, words in MEANINGS.items() if group in manifest.rows]
    if any(module.token_ids for module in manifest.modules):
        found.append("trained tokens")
    if manifest.labels:
        found.append("a score head")
    return next(iter(found), None)

"""What an owner has is what all of its names tell, however they have changed."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.errors import Conflict, QuotaExceeded
from adapters.files.name_versions import NameRecord, Quota, Version, are_twins
from adapters.store.name_index import QuotaUsage

SIZES = {"a": 1, "b": 20, "c": 300, "d": 4000}
NAMES = ("t/one", "t/ONE", "t/two", "t/three")
contents = st.lists(st.sampled_from(sorted(SIZES)), min_size=1, max_size=3)
changes = st.lists(st.tuples(st.sampled_from(NAMES), st.none() | contents), max_size=20)


def record_of(digests: list[str]) -> NameRecord:
    return NameRecord(tuple(Version(at + 1, digest, 0.0) for at, digest in enumerate(digests)), "t")


def num_bytes(names: Mapping[str, NameRecord]) -> int:
    return sum(SIZES[digest] for digest in set().union(*(record.digests for record in names.values())))


@given(changes, st.integers(0, 20), st.sampled_from(NAMES), contents)
def test_bytes_names_and_twins_are_those_of_all_names(
    made: list[tuple[str, list[str] | None]], num_before: int, name: str, digests: list[str]
) -> None:
    """The first changes have been made when it is first asked."""
    names: dict[str, NameRecord] = {}
    owned: QuotaUsage | None = None
    for at, (changed, wanted) in enumerate([*made, (name, None)]):
        if at == min(num_before, len(made)):
            owned = QuotaUsage(names, SIZES.__getitem__)
        before = names.pop(changed, None)
        if wanted is not None:
            names[changed] = record_of(wanted)
        if owned is not None:
            owned.point(changed, before, names.get(changed))
    assert owned is not None
    after = record_of(digests)
    excess = num_bytes({**names, name: after})
    owned.refuse_excess(None, after, Quota(len(names) + 1, excess))
    for quota in (Quota(len(names), None), *([Quota(None, excess - 1)] if excess > num_bytes(names) else ())):
        with pytest.raises(QuotaExceeded):
            owned.refuse_excess(None, after, quota)
    if any(one != name and are_twins(one, name) for one in names):
        with pytest.raises(Conflict):
            owned.refuse_twin(name)
    else:
        owned.refuse_twin(name)


def test_a_change_may_need_more_than_there_is_room_for_where_it_needs_less_than_before() -> None:
    before, after = record_of(["c", "d"]), record_of(["d"])
    owned = QuotaUsage({"t/one": before, "t/two": record_of(["a"])}, SIZES.__getitem__)
    owned.refuse_excess(before, after, Quota(0, 0))
    with pytest.raises(QuotaExceeded, match=r"have 4301 bytes.*would have 4321"):
        owned.refuse_excess(before, record_of(["c", "d", "b"]), Quota(0, 0))


def test_the_size_of_a_content_is_asked_for_once_if_it_can_be_read() -> None:
    """Thousands of them would be read for each upload."""
    asked: list[str] = []
    readable = {"a": 1}

    def size_of(digest: str) -> int:
        asked.append(digest)
        return readable.get(digest, 0)

    owned = QuotaUsage({"t/one": record_of(["a"]), "t/two": record_of(["b"])}, size_of)
    for _ in range(2):
        owned.refuse_excess(None, record_of(["a"]), Quota(None, 10))
    assert sorted(asked) == ["a", "b", "b"]  # what is damaged may have been uploaded again
    readable |= {"b": 20, "c": 5}
    with pytest.raises(QuotaExceeded, match="have 21 bytes"):
        owned.refuse_excess(None, record_of(["c"]), Quota(None, 22))

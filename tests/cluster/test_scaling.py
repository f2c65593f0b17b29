"""How many engines there should be."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from service.ray_serve.scaling import ByQueuedTokens, engines_wanted


@pytest.mark.parametrize(
    ("queued_tokens", "engines"), [(0, 1), (1, 1), (1000, 1), (1001, 2), (2000, 2), (2001, 3), (100_000, 100)]
)
def test_no_engine_has_more_than_its_part(queued_tokens: float, engines: int) -> None:
    assert engines_wanted(queued_tokens, 1000) == engines


def test_the_policy_goes_by_what_all_replicas_report() -> None:
    policy = ByQueuedTokens(tokens_per_engine=1000)
    context = SimpleNamespace(aggregated_metrics={"queued_tokens": {"a": 1500.0, "b": 700.0}}, target_num_replicas=2)
    assert policy(context) == (3, {})


@pytest.mark.parametrize("reported", [None, {}, {"other": {"a": 1.0}}])
def test_nothing_changes_before_anything_is_known(reported: object) -> None:
    assert ByQueuedTokens()(SimpleNamespace(aggregated_metrics=reported, target_num_replicas=4)) == (4, {})

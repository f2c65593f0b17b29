"""What is freed is seen to be freed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.api.operation.freed_memory import measure


def test_the_engine_gives_back_the_memory_of_adapters_that_are_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their rows on the device, which is the host here, and their copies beside them; ends when it has."""
    monkeypatch.delenv("PYTHONPATH")  # fresh memory filled with NaN would be in use from the start
    figures = measure(tmp_path, 25, 64)
    assert figures["full_mb"] > 1.2 * figures["start_mb"], "too few adapters to tell"
    assert figures["end_mb"] <= 1.1 * figures["start_mb"]

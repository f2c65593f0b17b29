"""What is asked of torch_npu's runtime, and what follows from its answers; the twin knows the true signatures."""

from __future__ import annotations

import pytest

from tests.support.npu.fake_npu import CHECKS


@pytest.mark.parametrize("name", CHECKS)
def test_an_npu_is_asked_and_set_right(name: str) -> None:
    CHECKS[name]()

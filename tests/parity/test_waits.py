"""A step on a GPU waits for the device once: for the tokens that it has sampled. CUDA itself looks for it."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

from tests.support.engine.engine_parity import build_engine, config_of, make_world, submit_every_sampling


@pytest.mark.parametrize("model_type", ["llama", "lfm2"])
def test_a_step_waits_for_the_device_once(model_type: str, device: str, tmp_path: Path) -> None:
    """Mixed steps: prompts and decode tokens of two adapters and the base, every way to choose a token."""
    if device == "cpu":
        pytest.skip("NOT RUN: CUDA counts the waits, and there is no NVIDIA GPU")
    world = make_world(model_type, tmp_path, device)
    engine = build_engine(config_of(world, token_budget=64))
    try:
        submit_every_sampling(engine, world)
        num_steps = engine.num_steps
        while engine.num_requests:
            with warnings.catch_warnings(record=True) as waits:
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn")
                try:
                    engine.step()
                finally:
                    torch.cuda.set_sync_debug_mode("default")
            # The mode's own warning, once in a process, speaks of "synchronizing operations" too.
            found = [f"{w.filename}:{w.lineno}" for w in waits if "called a synchronizing" in str(w.message)]
            # The one wait is for an event, which CUDA does not count.
            assert not found, found
        assert engine.num_steps > num_steps
    finally:
        engine.close()

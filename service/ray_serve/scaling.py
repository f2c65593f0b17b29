"""How many engines there should be, by the tokens that wait for them."""

from __future__ import annotations

import math
from typing import Any

# Queued tokens per engine, of prompts and expected outputs, beyond which another one is wanted: some seconds of work
# for a device, so that a passing burst starts no new engine, which takes longer to start.
DEFAULT_TOKENS_PER_ENGINE = 32_768.0


def engines_wanted(queued_tokens: float, tokens_per_engine: float) -> int:
    """The number of engines for which none has more than `tokens_per_engine`; at least one."""
    return max(1, math.ceil(queued_tokens / tokens_per_engine))


class ByQueuedTokens:
    """A policy for Ray Serve's `autoscaling_config`, which adds bounds and delays. Engines report `queued_tokens`, the
    tokens that all their open requests are still expected to take."""

    def __init__(self, tokens_per_engine: float = DEFAULT_TOKENS_PER_ENGINE) -> None:
        assert tokens_per_engine > 0, "engines that may have nothing to do"
        self._tokens_per_engine = tokens_per_engine

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """The wanted number, and no state. `context` is an AutoscalingContext."""
        reported = (context.aggregated_metrics or {}).get("queued_tokens", {})
        # Until engines have reported nothing is known, and nothing changes.
        if not reported:
            return context.target_num_replicas, {}
        return engines_wanted(sum(reported.values()), self._tokens_per_engine), {}

"""What an engine says of itself now and then, put together from what its parts say."""

from __future__ import annotations

from typing import TYPE_CHECKING

from adapters.row_pool import PoolUsage
from service.engine.captured_steps import CapturedSteps
from service.engine.messages import Stats

if TYPE_CHECKING:
    from service.engine.engine import Engine

NO_ROWS = PoolUsage(0, 0, 0, 0, 0, 0, 0, 0)


def stats_of(engine: Engine, captured: CapturedSteps) -> Stats:
    """The state now, with what is new since the last call."""
    residency, host, records = engine.adapter_loads.residency, engine.host, engine.records
    usage = engine.rows.usage() if engine.rows is not None else NO_ROWS
    has_states = engine.capacity.has_conv
    return Stats(
        num_waiting=engine.scheduler.num_waiting + len(engine.constrained.waiting),
        num_running=len(engine.scheduler.running),
        kv_blocks_used=engine.blocks.num_used,
        kv_blocks_total=engine.blocks.capacity,
        state_lines_used=engine.slots.num_used if has_states else 0,
        state_lines_total=engine.slots.capacity if has_states else 0,
        rows_used=usage.rows_used,
        rows_total=usage.rows_total,
        row_bytes_used=usage.bytes_used,
        row_bytes_total=usage.bytes_total,
        num_adapters_on_device=usage.num_resident,
        num_adapters_on_host=0 if host is None else host.num_kept,
        num_adapter_requests={**engine.adapter_loads.num_hits},
        num_tier_evictions={} if residency is None else {**residency.evictions},
        loaded_bytes={} if residency is None else {**residency.loaded_bytes},
        host_bytes_used=0 if host is None else host.used_bytes,
        adapter_load_seconds=() if residency is None else residency.take_load_seconds(),
        first_tokens=records.take_first_tokens(),
        moved_adapters={} if residency is None else residency.take_moved(),
        num_steps=records.num_steps,
        num_preemptions=engine.scheduler.num_preemptions,
        num_adapter_loads=usage.num_loads,
        num_adapter_evictions=usage.num_evictions,
        num_steps_replayed=captured.num_replayed,
        num_steps_eager=dict(captured.eager),
        num_lora_op_calls=records.num_lora_op_calls,
        steps=records.take_new(),
    )

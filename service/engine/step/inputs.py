"""The inputs of a step: buffers that never move, filled on the host and brought to the device by one copy.

On a device there is one buffer there, which captured steps read, and two pinned ones on the host, used in turn, each
with an event that says when its latest copy has run: the host prepares a step while the device still fetches the one
before, and waits only if it is two steps ahead. The copy runs on the stream of the steps, hence after the step before
it has read the buffer. On a CPU there is one buffer, which the step reads where the host has written it.

The model's inputs end in the middle of a buffer, at an offset that follows from the sizes of the step. The sampler's
begin there, at offsets that follow from the facts of the sampling. So one copy brings both, and neither moves with the
other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from kernels.arrays import HostArray, Layout, by_name, in_host, in_nothing, in_tensor, number_dtype
from kernels.attention_maps import AttentionArrays, QueryStarts
from kernels.lora.maps import LoraArrays, LoraMaps, Segment
from kernels.lora.non_lora import NonLoraArrays, NonLoraLines
from kernels.sampling.maps import SamplingFacts
from kernels.sampling.sampling_request import Asked
from service.engine.model.padding import TOKEN_SIZES, StepSizes
from service.engine.step import maps
from service.engine.step.maps import AdapterArrays, ChunkInput, InputLimits, SamplerArrays, StepArrays, step_arrays
from service.models.step_batch import AttentionMaps, ConvArrays, ConvMaps, StepBatch, TokenArrays


class RequestTable:
    """Data of running sequences by slot, for `num_slots` slots, the null slot included, and sequences of up to
    max_blocks blocks.

    Row 0 is the null slot's: its blocks are the null block. A row is written when the sequence's blocks change. The
    latest tokens are written by the step that samples them and read by the next one, without the host in between; what
    another sequence left there is never read, since a sequence's first steps bring their tokens along.

    block_table   int32 [num_slots, max_blocks], on the host; 0 behind a sequence's last block
    last_tokens   int64 [num_slots], on the device
    """

    def __init__(self, num_slots: int, max_blocks: int, device: torch.device) -> None:
        self.block_table = np.zeros((num_slots, max_blocks), np.int32)
        self.last_tokens = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._blocks: list[tuple[int, ...]] = [()] * num_slots

    def set_blocks(self, slot: int, blocks: tuple[int, ...]) -> None:
        """The blocks of the sequence that holds the slot, in its order. Costs nothing for the same tuple again."""
        before = self._blocks[slot]
        if blocks is before:
            return
        row = self.block_table[slot]
        row[: len(blocks)] = blocks
        row[len(blocks) : len(before)] = 0
        self._blocks[slot] = blocks

    def keep_tokens(self, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Remember what a step has sampled: token_ids int64 [n] of the slots int64 [n], none of them twice; -1, where
        there was nothing to choose from, is kept as token 0, since the step after may read it before the host knows."""
        self.last_tokens.index_copy_(0, slots, token_ids.clamp(min=0))

    def resolve_tokens(self, token_ids: torch.Tensor, token_slots: torch.Tensor) -> None:
        """token_ids[t] = latest token of token_slots[t] where token_ids[t] is -1, in place. Both int64 [tokens]."""
        latest = self.last_tokens.index_select(0, token_slots)
        torch.where(token_ids < 0, latest, token_ids, out=token_ids)


class DeviceEvent(Protocol):
    """An event of torch.cuda or torch.npu: reached when all work queued before it is done."""

    def record(self) -> object: ...

    def synchronize(self) -> object: ...


class Runtime(Protocol):
    """The part of torch.cuda and torch.npu that is needed here."""

    def Event(self) -> DeviceEvent: ...


_MAX_KNOWN = 512  # sizes, and facts, whose arrays are remembered


@dataclass(frozen=True, slots=True)
class _Arrays:
    """The same arrays in each of the host's buffers and in the device's, from one byte to another.

    host, device  of `HostArray` and of tensors: `StepArrays` or `SamplerArrays`
    """

    host: tuple[Any, ...]
    device: Any
    start: int
    end: int


class StepInputs:
    """See the module's docstring."""

    def __init__(self, limits: InputLimits, runtime: Runtime | None = None) -> None:
        """runtime  of the device; None: torch's, which on a CPU needs none"""
        self._limits = limits
        self._runtime: Any = runtime
        if runtime is None and limits.device.type != "cpu":
            self._runtime = torch.get_device_module(limits.device)
        self._number = number_dtype(limits.device)
        self._middle = self._num_bytes(self._lay_step(limits.largest_sizes))
        num_bytes = self._middle + self._num_bytes(_lay_sampler(limits.largest_facts))
        self._host = [self._host_buffer(num_bytes) for _ in range(1 if self._runtime is None else 2)]
        self._host_bytes = [buffer.numpy() for buffer in self._host]
        self._copied: list[DeviceEvent | None] = [None] * len(self._host)
        self._device = self._host[0]
        if self._runtime is not None:
            self._device = torch.zeros(num_bytes, dtype=torch.uint8, device=limits.device)
        self._host_index = 0
        self._known: dict[StepSizes | SamplingFacts, _Arrays] = {}

    def fill(
        self,
        chunks: Sequence[ChunkInput],
        block_table: np.ndarray,
        block_tuples: Sequence[tuple[int, ...]],
        sizes: StepSizes,
        asked: Asked | None = None,
        sampled_slots: Sequence[int] = (),
    ) -> tuple[StepBatch, SamplerArrays[torch.Tensor] | None]:
        """The batch of `chunks`, which stand in adapter order already, on the device and padded to `sizes`; and what is
        asked of its logits there, None for None.

        block_table    int32 [slots, blocks], by slot; block_tuples are the chunks' own blocks
        sampled_slots  of the sequences that get a token

        Both hold until the next call; on a device the batch's tensors are the same for the same sizes, and those of the
        sampler for the same facts.
        """
        step = self._arrays_of_step(sizes)
        sampler = None if asked is None else self._arrays_of_sampler(asked.facts)
        self._next_host_buffer()
        arrays: StepArrays[HostArray] = step.host[self._host_index]
        starts = maps.fill_tokens(arrays, chunks, block_table, self._limits.block_size)
        segments = maps.segments_of(chunks, [len(chunk.token_ids) for chunk in chunks])
        row_segments = segments
        if sizes.num_rows is not None:
            row_segments = maps.segments_of(chunks, [chunk.num_logits for chunk in chunks])
        for adapters, its in ((arrays.adapters, segments), (arrays.rows_adapters, row_segments)):
            if adapters is not None:
                maps.fill_adapters(adapters, its, self._limits.non_lora_groups)
        if asked is not None and sampler is not None:
            asked.fill(sampler.host[self._host_index])
            sampler.host[self._host_index].sampled_slots.put(sampled_slots)
        self._send(step.start, step.end if sampler is None else sampler.end)
        batch = _batch(step.device, chunks, starts, block_tuples, segments, row_segments, sizes)
        return batch, None if sampler is None else sampler.device

    def _arrays_of_step(self, sizes: StepSizes) -> _Arrays:
        known = self._known.get(sizes)
        if known is None:
            lay = self._lay_step(sizes)
            start = self._middle - self._num_bytes(lay)
            assert start >= 0, f"a step of {sizes} is larger than the limits of all steps"
            known = self._remembered(sizes, lay, start)
        return known

    def _arrays_of_sampler(self, facts: SamplingFacts) -> _Arrays:
        return self._known.get(facts) or self._remembered(facts, _lay_sampler(facts), self._middle)

    def _lay_step(self, sizes: StepSizes) -> Callable[[Layout[Any]], StepArrays[Any]]:
        return lambda layout: step_arrays(layout, sizes, self._limits)

    def _num_bytes(self, lay: Callable[[Layout[Any]], object]) -> int:
        layout = in_nothing(self._number)
        lay(layout)
        return layout.end

    def _remembered(self, key: StepSizes | SamplingFacts, lay: Callable[[Layout[Any]], Any], start: int) -> _Arrays:
        if len(self._known) == _MAX_KNOWN:
            self._known.clear()
        host = tuple(lay(in_host(buffer, self._number, start)) for buffer in self._host_bytes)
        on_device = in_tensor(self._device, self._number, start)
        self._known[key] = _Arrays(host, lay(on_device), start, on_device.end)
        return self._known[key]

    def _next_host_buffer(self) -> None:
        """Go on to the next host buffer, once no copy reads it."""
        self._host_index = (self._host_index + 1) % len(self._host)
        copied = self._copied[self._host_index]
        if copied is not None:
            copied.synchronize()

    def _send(self, start: int, end: int) -> None:
        """Bring these bytes of the host's buffer to the device."""
        if self._runtime is None:
            return
        self._device[start:end].copy_(self._host[self._host_index][start:end], non_blocking=True)
        event = self._runtime.Event()
        event.record()
        self._copied[self._host_index] = event

    def _host_buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=self._limits.device.type != "cpu")


def _lay_sampler(facts: SamplingFacts) -> Callable[[Layout[Any]], SamplerArrays[Any]]:
    return lambda layout: layout.add(SamplerArrays, facts)


def _batch(
    arrays: StepArrays[torch.Tensor],
    chunks: Sequence[ChunkInput],
    starts: list[int],
    block_tuples: Sequence[tuple[int, ...]],
    segments: tuple[Segment, ...],
    row_segments: tuple[Segment, ...],
    sizes: StepSizes,
) -> StepBatch:
    """The arrays with what the host says of them."""
    lora = _lora_maps(arrays.adapters, segments, sizes.num_tokens, sizes)
    rows_lora = lora
    if sizes.num_rows is not None:
        rows_lora = _lora_maps(arrays.rows_adapters, row_segments, sizes.num_rows, sizes)
    num_missing = sizes.num_sequences - len(chunks)
    query_starts = QueryStarts((*starts, *starts[-1:] * num_missing))
    attention = AttentionMaps(
        **by_name(arrays.attention, AttentionArrays),
        query_starts=query_starts,
        kv_lens=(*(chunk.end for chunk in chunks), *(0,) * num_missing),
        block_tables=(*block_tuples, *((),) * num_missing),
        is_decode=sizes.all_decode,
    )
    conv = None
    if arrays.conv is not None:
        conv = ConvMaps(
            **by_name(arrays.conv, ConvArrays),
            query_starts=query_starts,
            query_start_loc=attention.query_start_loc,
            all_decode=sizes.all_decode,
        )
    return StepBatch(
        **by_name(arrays.tokens, TokenArrays),
        lora=lora,
        attention=attention,
        conv=conv,
        logits_lora=rows_lora,
        window_rows=sizes.window_rows,
    )


def _lora_maps(
    arrays: AdapterArrays[torch.Tensor] | None, segments: tuple[Segment, ...], num_tokens: int, sizes: StepSizes
) -> LoraMaps | None:
    if arrays is None:
        return None
    lines = None
    if arrays.side is not None:
        lines = NonLoraLines(**by_name(arrays.side, NonLoraArrays), num_heads=dict(sizes.side).get("saved_head", 0))
    return LoraMaps(
        **by_name(arrays.lora, LoraArrays),
        segments=segments,
        num_tokens=num_tokens,
        side=lines,
        runs_once=num_tokens > TOKEN_SIZES[-1],
        has_experts=sizes.has_experts,
    )

"""Probe cases of paged attention: chunks and decode tokens, blocks out of order."""

from __future__ import annotations

import torch

from kernels.attention_maps import AttentionMaps
from kernels.paged_attention import ops
from kernels.paged_attention.cache_layout import made
from kernels.platform import in_use
from kernels.probe.cases.tensors import Place, Prepared
from kernels.shapes import ProbeShapes

_NUM_BLOCKS = 10
_LARGEST_WINDOW = 5
# Published caps are far above the scores of random queries; this one bends them.
_LARGEST_CAP = 0.5


def attend(shapes: ProbeShapes, place: Place) -> Prepared:
    """All heads over the whole of each sequence."""
    return _attend(shapes, place, None)


def attend_decode(shapes: ProbeShapes, place: Place) -> Prepared:
    """One token for each sequence, which fused operators serve by a path of its own."""
    return _attend(shapes, place, None, is_decode=True)


def attend_window(shapes: ProbeShapes, place: Place) -> Prepared:
    """With a window smaller than some of the sequences."""
    return _attend(shapes, place, _window(shapes))


def attend_window_decode(shapes: ProbeShapes, place: Place) -> Prepared:
    """Both: torch_npu's documentation would have windows not count where queries are single tokens."""
    return _attend(shapes, place, _window(shapes), is_decode=True)


def _window(shapes: ProbeShapes) -> int:
    assert shapes.sliding_window is not None
    # Each key of a small window weighs enough that one too many or too few shows in any dtype.
    return min(shapes.sliding_window, _LARGEST_WINDOW)


def _attend(shapes: ProbeShapes, place: Place, sliding_window: int | None, *, is_decode: bool = False) -> Prepared:
    maps = _maps(shapes.block_size, place, is_decode)
    num_tokens, head_dim = maps.query_starts[-1], shapes.head_dim
    # Slots that no position of a sequence has hold what nobody has written.
    k_cache, v_cache = (place.fresh(_NUM_BLOCKS * shapes.block_size, shapes.num_kv_heads, head_dim) for _ in range(2))
    for blocks, kv_len in zip(maps.block_tables, maps.kv_lens, strict=True):
        slots = [blocks[p // shapes.block_size] * shapes.block_size + p % shapes.block_size for p in range(kv_len)]
        for cache in (k_cache, v_cache):
            cache[slots] = place.random(kv_len, shapes.num_kv_heads, head_dim)
    cache_shape = (_NUM_BLOCKS, shapes.block_size, shapes.num_kv_heads, head_dim)
    k, v = (_laid_out(place.put(cache).view(cache_shape)) for cache in (k_cache, v_cache))
    # As they come out of the rotation: queries beside keys.
    q = place.put(place.random(num_tokens, shapes.num_heads + shapes.num_kv_heads, head_dim))[:, : shapes.num_heads]

    sinks = None
    if shapes.has_sinks:
        sinks = place.random(shapes.num_heads).float().to(place.device)
    scale, cap = head_dim**-0.5, None if shapes.score_cap is None else min(shapes.score_cap, _LARGEST_CAP)

    def call() -> tuple[torch.Tensor, ...]:
        options = {"scale": scale, "sliding_window": sliding_window, "score_cap": cap, "sinks": sinks}
        out = ops.paged_attention(q, k, v, maps, **options)
        # Each token by itself: over many keys values average out, and what is wrong there would pass beside the values
        # of a token with a single key.
        return out.unbind()

    return call


def _laid_out(cache: torch.Tensor) -> torch.Tensor:
    """As the implementation at work has caches."""
    heads_first = in_use(cache.device).kv_heads_first
    return made(cache.new_empty, tuple(cache.shape), heads_first=heads_first).copy_(cache)


def _maps(block_size: int, place: Place, is_decode: bool) -> AttentionMaps:
    """A chunk, a decode token, a new prompt, a first token: (tokens of the step, tokens in the cache after it).

    is_decode  the last token only of each
    """
    # The first two take two blocks each, however small blocks are.
    first_len, prompt_len = block_size + min(3, block_size), min(7, block_size)
    step = [(min(5, first_len), first_len), (1, 2 * block_size), (prompt_len, prompt_len), (1, 1)]
    if is_decode:
        step = [(1, kv_len) for _, kv_len in step]
    block_tables = ((4, 2), (7, 8), (1,), (9,))
    starts = [sum(num_new for num_new, _ in step[:i]) for i in range(len(step) + 1)]
    kv_lens = [kv_len for _, kv_len in step]
    positions = [(s, kv_len - num_new + t) for s, (num_new, kv_len) in enumerate(step) for t in range(num_new)]
    slots = [block_tables[s][p // block_size] * block_size + p % block_size for s, p in positions]
    return AttentionMaps(
        query_starts=tuple(starts),
        kv_lens=tuple(kv_lens),
        block_tables=block_tables,
        query_start_loc=place.ints(starts),
        kv_lens_device=place.ints(kv_lens),
        block_table=place.ints([[*blocks, 0][:2] for blocks in block_tables]),
        slot_mapping=place.ints(slots, torch.int64),
        is_decode=is_decode,
    )

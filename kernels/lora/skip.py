"""Arguments of a step in which no adapter is active: a kernel compiles for them, and its programs leave at once.

A compiled variant depends on types, on sizes and strides being 1 or multiples of 16, and on alignment of addresses, so
these are as in a step that is not idle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from kernels.lora.maps import LoraMaps, LoraStack

_MULTIPLE = 16


def launch_idle(
    run: Callable[..., None],
    stack: LoraStack,
    step_sizes: Iterable[int],
    dtype: torch.dtype,
    max_segments: int,
    *,
    is_embedding: bool,
) -> None:
    """Have `run`, an implementation's `lora_linear` or `lora_embedding`, compile for steps of these many tokens."""
    for num_tokens in step_sizes:
        out = idle_matrix(num_tokens, stack.output_width, dtype, stack)
        if is_embedding:
            read = torch.zeros(num_tokens, dtype=torch.int64, device=out.device)
        else:
            read = idle_matrix(num_tokens, stack.a[0].shape[1], dtype, stack)
        run(read, out, stack, idle_maps(num_tokens, max_segments, stack))


def idle_maps(num_tokens: int, max_segments: int, stack: LoraStack) -> LoraMaps:
    """Maps of `num_tokens` base tokens, padded to `max_segments`."""
    device = stack.ranks.device

    def ints(value: int, *shape: int) -> torch.Tensor:
        return torch.full(shape, value, dtype=torch.int32, device=device)

    return LoraMaps(
        segments=(),
        num_tokens=num_tokens,
        segment_starts=ints(0, max_segments + 1),
        places=ints(-1, max_segments),
        first_rows=ints(-1, stack.group + 1, max_segments),
        token_segment=ints(-1, num_tokens),
        num_segments=ints(0, 1),
    )


def idle_matrix(num_tokens: int, width: int, dtype: torch.dtype, stack: LoraStack) -> torch.Tensor:
    """[num_tokens, width], whose rows lie over one another: nobody reads or writes it, so it takes next to no memory.

    Its row stride is a multiple of 16, or 1, where that of a real matrix is.
    """
    stride = width if width <= _MULTIPLE else _MULTIPLE + width % _MULTIPLE
    return torch.empty_strided((num_tokens, width), (stride, 1), dtype=dtype, device=stack.a[0].device)

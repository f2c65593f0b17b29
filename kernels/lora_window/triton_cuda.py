"""The window's ops on NVIDIA GPUs: one launch each, no workspace, no synchronisation.

The grid follows from the padded token count and the window, and the kernels read what is active from the maps on the
device. A captured step can therefore be replayed with any adapters, ranks and tokens of its padded size, as long as
their rows lie in the window of the captured product.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from kernels import triton_launch
from kernels.contract import Contract
from kernels.lora.maps import LoraMaps, LoraStack
from kernels.lora.skip import idle_maps, idle_matrix
from kernels.lora_window.triton_cuda_configs import TokenConfig, WindowConfig, WindowTileConfig, config_for
from kernels.lora_window.triton_cuda_tiles import lora_expand_tile_kernel, swiglu_tile_kernel
from kernels.lora_window.triton_cuda_tokens import lora_expand_token_kernel, swiglu_token_kernel
from kernels.platform import in_use


def lora_expand_window(
    product: torch.Tensor, stack: LoraStack, maps: LoraMaps, *, config: WindowTileConfig | TokenConfig | None = None
) -> None:
    """See `ops.lora_expand_window`.

    config  for tuning
    """
    widths = tuple(b.shape[1] for b in stack.b)
    window_rows = (product.shape[1] - stack.output_width) // len(widths)
    chosen = config or _config(product.device).expand.choose(maps.num_tokens, window_rows)
    kernel = lora_expand_tile_kernel if isinstance(chosen, WindowTileConfig) else lora_expand_token_kernel
    num_blocks = sum(-(-width // chosen.block_n) for width in widths)
    kernel[(chosen.num_programs(maps.num_tokens, window_rows), num_blocks)](
        product,
        stack.b,
        maps.token_segment,
        maps.places,
        maps.first_rows[stack.group],
        stack.ranks,
        stack.scalings,
        widths,
        stack.slice_starts,
        stack.output_width,
        product.stride(0),
        *(
            (maps.num_tokens, chosen.turns(maps.num_tokens, window_rows))
            if isinstance(chosen, WindowTileConfig)
            else ()
        ),
        stack.ranks.shape[1],
        NUM_SLICES=len(widths),
        EVEN_N=all(width % chosen.block_n == 0 for width in widths),
        **_options(product.device, chosen),
    )


def swiglu_window(
    product: torch.Tensor,
    stack: LoraStack,
    maps: LoraMaps,
    *,
    out: torch.Tensor,
    config: WindowTileConfig | TokenConfig | None = None,
) -> None:
    """See `ops.swiglu_window`.

    config  for tuning
    """
    size = out.shape[1]
    window_rows = (product.shape[1] - 2 * size) // 2
    chosen = config or _config(product.device).swiglu.choose(maps.num_tokens, window_rows)
    kernel = swiglu_tile_kernel if isinstance(chosen, WindowTileConfig) else swiglu_token_kernel
    kernel[(chosen.num_programs(maps.num_tokens, window_rows), -(-size // chosen.block_n))](
        product,
        *stack.b,
        out,
        maps.token_segment,
        maps.places,
        maps.first_rows[stack.group],
        stack.ranks,
        stack.scalings,
        size,
        product.stride(0),
        *(
            (maps.num_tokens, chosen.turns(maps.num_tokens, window_rows))
            if isinstance(chosen, WindowTileConfig)
            else ()
        ),
        stack.ranks.shape[1],
        EVEN_N=size % chosen.block_n == 0,
        **_options(product.device, chosen),
    )


def warm_up(stack: LoraStack, max_tokens: int, dtype: torch.dtype, max_segments: int, *, is_gated: bool) -> None:
    """See `ops.warm_up`, of one stack. Two forms of a kernel, for whatever token counts."""
    num_tokens, window_rows = min(max_tokens, 16), min(stack.b[0].shape[0], 16)
    maps = idle_maps(num_tokens, max_segments, stack)
    width = stack.output_width + window_rows * len(stack.b)
    of_device = _config(stack.ranks.device)
    for config in (of_device.swiglu.token, of_device.swiglu.tile) if is_gated else ():
        product = torch.zeros(num_tokens, width, dtype=dtype, device=stack.ranks.device)
        swiglu_window(product, stack, maps, out=product.new_empty(num_tokens, stack.b[0].shape[1]), config=config)
    for config in () if is_gated else (of_device.expand.token, of_device.expand.tile):
        lora_expand_window(idle_matrix(num_tokens, width, dtype, stack), stack, maps, config=config)


def compiled_count() -> int:
    """Number of compiled variants of these kernels in this process; it must not rise after warm-up."""
    return triton_launch.count_compiled(
        lora_expand_tile_kernel, swiglu_tile_kernel, lora_expand_token_kernel, swiglu_token_kernel
    )


CONTRACT = Contract(warm_up=warm_up, compiled_count=compiled_count, replayable=True)


@functools.cache
def _config(device: torch.device) -> WindowConfig:
    return config_for(in_use(device).kind)


@functools.cache
def _options(device: torch.device, chosen: WindowTileConfig | TokenConfig) -> dict[str, Any]:
    """The configuration as constants, and the options of the CUDA backend, which the interpreter does not know."""
    dependent = triton_launch.launches_dependently(device)
    options: dict[str, Any] = {"BLOCK_N": chosen.block_n, "DEPENDENT_LAUNCH": dependent, "num_warps": chosen.num_warps}
    if isinstance(chosen, WindowTileConfig):
        options |= {"BLOCK_M": chosen.block_m, "STAGES": chosen.stages}
    return options | triton_launch.launch_options(device, max_registers=chosen.max_registers)

"""`kernels.kv_write.ops` with torch_npu's scatter into a paged cache. Not verified on an NPU.

The operator takes contiguous tensors only. Keys come contiguous from the rotation; values are a slice of the packed
projection and are copied.
"""

from __future__ import annotations

import torch
import torch_npu


def write_kv(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """See `ops.write_kv`."""
    # "Norm" is the plain layout [num_blocks, block_size, kv_heads, head_dim]; the default is another one.
    torch_npu.npu_scatter_pa_kv_cache(
        key=k.contiguous(),
        value=v.contiguous(),
        key_cache=k_cache,
        value_cache=v_cache,
        slot_mapping=slot_mapping,
        cache_mode="Norm",
    )

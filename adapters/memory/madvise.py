"""Release of memory pages of a CPU pool that are reserved but unused."""

from __future__ import annotations

import ctypes
import mmap

import torch

_MADV_DONTNEED = getattr(mmap, "MADV_DONTNEED", None)


def give_back_pages(tensor: torch.Tensor) -> None:
    """Release the whole pages of a contiguous tensor to the system; its contents are lost. Writing allocates them
    again. A no-op for other tensors, other devices, and systems without the call."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or _MADV_DONTNEED is None:
        return
    start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    advise = getattr(ctypes.CDLL(None), "madvise", None)
    if advise is not None and end > start:
        advise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_DONTNEED)

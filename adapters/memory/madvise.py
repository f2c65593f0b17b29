"""Memory of a CPU that is kept for later, and that the system may have until then."""

from __future__ import annotations

import ctypes
import mmap

import torch

_MADV_DONTNEED = getattr(mmap, "MADV_DONTNEED", None)


def give_back_pages(tensor: torch.Tensor) -> None:
    """Let the system have the whole pages in the memory of a contiguous tensor, whose contents are lost then. Writing
    brings them back. Nothing happens for other tensors, of other devices, and where the system has no such call."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or _MADV_DONTNEED is None:
        return
    start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    advise = getattr(ctypes.CDLL(None), "madvise", None)
    if advise is not None and end > start:
        advise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_DONTNEED)

"""Advice to the system about memory pages."""

from __future__ import annotations

import ctypes
import mmap

import torch

_MADV_DONTNEED = getattr(mmap, "MADV_DONTNEED", None)
_MADV_HUGEPAGE = getattr(mmap, "MADV_HUGEPAGE", None)
_HUGE_PAGE_BYTES = 2 << 20


def give_back_pages(tensor: torch.Tensor) -> None:
    """Release the whole pages of a contiguous tensor to the system; its contents are lost. Writing allocates them
    again. A no-op for other tensors, other devices, and systems without the call."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or _MADV_DONTNEED is None:
        return
    _advise(tensor, mmap.PAGESIZE, _MADV_DONTNEED)


def use_huge_pages(tensor: torch.Tensor) -> None:
    """Have the system use huge pages for a contiguous CPU tensor that is written next, where it has them: the first
    touch of each small page costs more than the copy into it. A no-op elsewhere."""
    if _MADV_HUGEPAGE is not None:
        _advise(tensor, _HUGE_PAGE_BYTES, _MADV_HUGEPAGE)


def _advise(tensor: torch.Tensor, page_bytes: int, advice: int) -> None:
    start = -(-tensor.data_ptr() // page_bytes) * page_bytes
    end = (tensor.data_ptr() + tensor.nbytes) // page_bytes * page_bytes
    advise = getattr(ctypes.CDLL(None), "madvise", None)
    if advise is not None and end > start:
        advise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), advice)

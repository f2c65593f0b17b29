"""The C library's heap."""

from __future__ import annotations

import ctypes


def trim_heap() -> None:
    """Give memory that was freed back to the system.

    glibc keeps freed blocks of up to 32 MiB for later: after loading, a tenth of the model's size. Other C libraries
    have no such call, and none is made there.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)

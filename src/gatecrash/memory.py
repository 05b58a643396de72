"""Memory that a process frees and needs again, kept by the process."""

from __future__ import annotations

import ctypes
import os
import sys

KEPT, LARGEST = 2**30, 2**25
"""Bytes that are kept at the end of the heap at most, and those of the largest tensor from there, as glibc allows."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""glibc's names for the two, in malloc.h."""


def keep_freed_memory() -> bool:
    """From now on, keep what this process frees for what it needs next; False where that cannot be, or was said.

    A pass through a network frees hundreds of tensors that the next pass needs again. By itself glibc, Linux's usual C
    library, gives much of that back to the system, and to fetch it again page by page takes as long as a small
    network's pass. Who has said otherwise, with glibc's environment variables, is left alone.
    """
    said = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"} & os.environ.keys()
    if sys.platform != "linux" or said or "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    return bool(mallopt(_TRIM_THRESHOLD, KEPT)) and bool(mallopt(_MMAP_THRESHOLD, LARGEST))

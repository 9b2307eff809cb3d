"""What becomes of memory that this process has freed.

Owns: :func:`keep_freed_memory`. Refuses: accelerators, which torch keeps pools for, and deciding when
(``engines/torch.py``).
"""

from __future__ import annotations

import ctypes
import os

# glibc's names for what mallopt sets (malloc.h), and the limits: larger blocks still come from the system and go back
# to it, and so does what is free at the end of the heap beyond the second one.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST_KEPT = 1 << 30
_MOST_KEPT = (1 << 31) - 1

# By any of these somebody has decided already.
_DECIDED = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Have the C library keep freed blocks of up to 1 GiB for the next ones, for the whole process.

    By default blocks of more than 32 MiB, and often smaller ones, go back to the system when they are freed, and every
    page of the next one is cleared again. A train step on a CPU allocates the same tensors as the one before, and may
    spend a tenth of its time on that. The peak of resident memory stays; what comes after it does not fall as far.

    Returns:
        Whether it was done: not where an environment variable has set these limits, nor without glibc.
    """
    if any(name in os.environ for name in _DECIDED):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        # Another C library, or another system.
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT) and mallopt(_TRIM_THRESHOLD, _MOST_KEPT))

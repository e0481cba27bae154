"""What this machine has, and what this process has used of it; on Windows, which has no POSIX, psutil knows it."""

import os
import sys


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_of_machine() -> int:
    """Return the bytes of memory that this machine has."""
    if hasattr(os, "sysconf"):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    import psutil

    return psutil.virtual_memory().total


def peak_memory() -> int:
    """Return the bytes that this process held at its peak."""
    if sys.platform == "win32":
        import psutil

        return psutil.Process().memory_info().peak_wset
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak  # Linux counts kibibytes, macOS bytes

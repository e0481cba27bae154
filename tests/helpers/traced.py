"""What a call allocates."""

import tracemalloc
from collections.abc import Callable


def traced_peak(call: Callable[[], object]) -> int:
    """The largest number of bytes that Python and NumPy have allocated at once during a call."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()  # else every test after one that fails takes four times as long

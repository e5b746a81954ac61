"""Memory of this process, for the benchmarks; Linux, read from /proc."""

from collections.abc import Callable
from pathlib import Path


def resident(name: str) -> float:
    """MiB of this process's memory now (VmRSS) or at its peak (VmHWM)."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)]
    return int(line.split()[1]) / 1024


def start_of_peak() -> Callable[[], float]:
    """Forget the peak so far; called later, what this gives tells the MiB of the peak on top of now."""
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    return lambda: resident("VmHWM") - before

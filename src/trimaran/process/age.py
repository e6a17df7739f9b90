"""How long this process has existed, interpreter start included: for honest start-up times."""

import os
import time
from pathlib import Path


def process_age_s() -> float:
    """Seconds since the kernel started this process (resolution: 10 ms)."""
    # proc(5): field 22 is the start in ticks after boot; the name in field 2 may hold spaces.
    stat = Path("/proc/self/stat").read_text("ascii", "replace")
    start_ticks = int(stat.rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - start_ticks / os.sysconf("SC_CLK_TCK")

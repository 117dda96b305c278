"""How long `hf-fsdp --help` takes, as whole processes; the bar is a median under 0.5 s.

python benchmarks/cli_start.py [--runs 11]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

BAR_SECONDS = 0.5


def main() -> None:
    """Time the runs after one warm-up and print minimum, median and maximum."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=11)
    runs = parser.parse_args().runs
    seconds = []
    for _ in range(runs + 1):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-m", "hf_fsdp", "--help"], check=True, stdout=subprocess.DEVNULL)
        seconds.append(time.perf_counter() - began)
    counted = seconds[1:]
    median = statistics.median(counted)
    print(f"hf-fsdp --help: min {min(counted):.3f} s, median {median:.3f} s, max {max(counted):.3f} s, {runs} runs")
    if median >= BAR_SECONDS:
        raise SystemExit(f"the median is not under {BAR_SECONDS} s")


if __name__ == "__main__":
    main()

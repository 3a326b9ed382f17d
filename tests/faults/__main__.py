"""Check that each seeded fault fails a test: ``python -m tests.faults [--sound] [--part K/N] [NAME ...]``."""

import argparse
import os
import re
import subprocess
import sys
from time import perf_counter

from tests.faults.faults import FAULTS
from tests.faults.plugin import VARIABLE

_WIDTH = 200
_FAILURES = 1  # pytest's exit status: some tests failed, and nothing else went wrong


def main() -> int:
    """Run the tests of each fault and print what has caught it; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="faults to check; all unless given")
    parser.add_argument("--sound", action="store_true", help="only check that the selected tests pass without a fault")
    parser.add_argument(
        "--part", metavar="K/N", help="only each N-th fault, from the K-th on; K counts from 1, modulo N"
    )
    options = parser.parse_args()
    unknown = sorted(set(options.names) - set(FAULTS))
    if unknown:
        parser.error(f"unknown faults: {', '.join(unknown)}")
    names = options.names or list(FAULTS)
    if options.part:
        match = re.fullmatch(r"(\d+)/(\d+)", options.part)
        if match is None or int(match[2]) == 0:
            parser.error(f"--part={options.part!r} must be K/N, such as 2/12")
        names = names[(int(match[1]) - 1) % int(match[2]) :: int(match[2])]
    selected = sorted({test for name in names for test in FAULTS[name].tests})
    if options.sound:
        return _check_soundness(selected)
    return max(_check_faults(names), _check_soundness(selected))


def _check_soundness(selected: list[str]) -> int:
    """Run the selected tests without a fault; they must pass."""
    status, caught, seconds = _run(selected, "")
    print(f"{'no fault':<40} | {'passes' if status == 0 else f'FAILS: {caught}'} | {seconds:.0f}", flush=True)
    return int(status != 0)


def _check_faults(names: list[str]) -> int:
    """Run the tests of each fault, one of which must fail."""
    missed = []
    print(f"{'fault':<40} | caught by | seconds")
    for name in names:
        status, caught, seconds = _run(FAULTS[name].tests, name)
        if status != _FAILURES or not caught:
            missed.append(name)
            caught = "NOT CAUGHT" if status == 0 else f"NOT CAUGHT: pytest ended with {status}"
        print(f"{name:<40} | {caught} | {seconds:.0f}", flush=True)
    print(f"{len(names) - len(missed)} of {len(names)} faults caught")
    return int(bool(missed))


def _run(selected: list[str] | tuple[str, ...], fault: str) -> tuple[int, str, float]:
    """Run pytest in a process of its own; return its exit status, what failed first and why, and the seconds."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not slow", "--no-header", "-p", "tests.faults.plugin"]
    environment = {**os.environ, VARIABLE: fault}
    started = perf_counter()
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", *selected], env=environment, capture_output=True, text=True, check=False
    )
    seconds = perf_counter() - started
    failed = re.search(r"^(?:FAILED|ERROR) (.+)", done.stdout, re.MULTILINE)
    if done.returncode not in (0, _FAILURES):
        print(done.stdout[-2000:], done.stderr[-2000:], file=sys.stderr)
    return done.returncode, failed[1][:_WIDTH] if failed else "", seconds


if __name__ == "__main__":
    sys.exit(main())

"""`bin/fuzz`: checks many mutated inputs, or one again."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from fuzz.fuzzer import check_one, fuzz


def main() -> None:
    """Check inputs as the command line says, and fail if one went wrong."""
    parser = argparse.ArgumentParser(prog="bin/fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=10_000, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="another one makes other inputs")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--max-failures", type=int, default=20, help="after so many it ends")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="check one input again and show what goes wrong")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="with --only: a new folder for the files of the input")
    options = parser.parse_args()
    if options.only is not None:
        sys.excepthook = sys.__excepthook__  # torch's names the rank that the process last stood in for
        print(check_one(options.only, options.seed, options.keep or Path(f"fuzz-{options.seed}-{options.only}")))
        return
    outcome = fuzz(range(options.inputs), options.seed, processes=options.processes, max_failures=options.max_failures)
    for failure in outcome.failures:
        again = shlex.join(["bin/fuzz", "--seed", str(options.seed), "--only", str(failure.number)])
        print(f"== input {failure.number} ({again}): {failure.what}\n")
    for verdict, count in outcome.counts.most_common():
        print(f"{count:7,} {verdict}")
    total = sum(outcome.counts.values()) + len(outcome.failures)
    print(f"{total:7,} inputs, seed {options.seed}, {len(outcome.failures)} wrong, in {outcome.seconds:.0f} s")
    sys.exit(bool(outcome.failures))


main()

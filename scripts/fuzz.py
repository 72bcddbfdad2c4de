"""Draws compositions of rules until one of them does something that docs/rules.md does not say.

Usage: python scripts/fuzz.py [--max-examples N] [--seed S]

The tests are those of the suite, with other examples: in rounds, each a run of pytest with a seed of its
own, so that progress shows and memory is given back. The first round that fails ends it. The seed is
printed; the same seed draws the same examples.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = ['tests/test_compositions.py', 'tests/test_composition_laws.py']
# About what these tests draw in all where the profile says 100.
SUITE = 3000
ROUND = 5_000
ROUND_TIMEOUT_S = 3600


def run_round(seed: int, examples: int) -> int:
    """Runs about that many examples and returns how many passed; none where one failed."""
    profile = [
        '--longest',
        str(ROUND_TIMEOUT_S),
        '--hypothesis-profile=fuzz',
        f'--hypothesis-seed={seed}',
        '--hypothesis-show-statistics',
    ]
    done = subprocess.run(
        [sys.executable, '-m', 'pytest', '-p', 'no:cacheprovider', '-q', '-x', *profile, *TESTS],
        cwd=ROOT,
        env={**os.environ, 'FUZZ_EXAMPLES': str(max(1, math.ceil(100 * examples / SUITE)))},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=ROUND_TIMEOUT_S,
    )
    if done.returncode:
        print(done.stdout)
        return 0
    return sum(map(int, re.findall(r'(\d+) passing', done.stdout)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--max-examples', type=int, default=50_000, metavar='N', help='how many')
    parser.add_argument('--seed', type=int, help='draw the same examples again')
    args = parser.parse_args()
    seed = random.randrange(10**6) if args.seed is None else args.seed
    print(f'seed {seed}, {args.max_examples:,} examples', flush=True)

    begun, drawn, number = time.monotonic(), 0, seed
    while drawn < args.max_examples:
        examples = min(ROUND, args.max_examples - drawn)
        passed = run_round(number, examples)
        if not passed:
            again = f'--seed {number} --max-examples {examples}'
            sys.exit(f'FAILED after {drawn:,} examples. Once more: make fuzz ARGS="{again}"')
        drawn, number = drawn + passed, number + 1
        seconds = time.monotonic() - begun
        print(f'{drawn:,} examples passed in {seconds:.0f} s, {drawn / seconds:.0f} a second', flush=True)
    print(f'All {drawn:,} examples passed.')


if __name__ == '__main__':
    main()

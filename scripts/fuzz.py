"""Draws compositions of rules, until one is not treated as the docs say.

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
COMPOSITIONS = ['tests/rules/test_compositions.py', 'tests/rules/test_composition_laws.py']
# About what the tests of compositions draw in all where the profile says 100.
SUITE = 3000
ROUND = 5_000
ROUND_TIMEOUT_S = 3600


def run_tests(arguments: list[str], **env: str) -> str:
    """Runs tests, and returns what pytest prints; nothing where one failed, after printing that."""
    command = ['-m', 'pytest', '-p', 'no:cacheprovider', '-q', '-x', f'--longest={ROUND_TIMEOUT_S}']
    done = subprocess.run(
        [sys.executable, *command, *arguments],
        cwd=ROOT,
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=ROUND_TIMEOUT_S,
    )
    if done.returncode:
        print(done.stdout)
        return ''
    return done.stdout


def compositions(seed: int, examples: int) -> int:
    """Runs about that many examples and returns how many passed; none where one failed."""
    profile = ['--hypothesis-profile=fuzz', f'--hypothesis-seed={seed}', '--hypothesis-show-statistics']
    printed = run_tests(
        [*profile, *COMPOSITIONS], FUZZ_EXAMPLES=str(max(1, math.ceil(100 * examples / SUITE)))
    )
    return sum(map(int, re.findall(r'(\d+) passing', printed)))


def fuzz(seed: int, total: int) -> None:
    """Runs rounds until there were enough examples or one fails."""
    begun, drawn = time.monotonic(), 0
    while drawn < total:
        examples = min(ROUND, total - drawn)
        passed = compositions(seed, examples)
        if not passed:
            again = f'--seed {seed} --max-examples {examples}'
            sys.exit(f'FAILED after {drawn:,} compositions. Once more: make fuzz ARGS="{again}"')
        drawn, seed = drawn + passed, seed + 1
        seconds = time.monotonic() - begun
        print(f'{drawn:,} compositions passed in {seconds:.0f} s, {drawn / seconds:.0f} a second', flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--max-examples', type=int, default=50_000, metavar='N', help='how many compositions')
    parser.add_argument('--seed', type=int, help='draw the same examples again')
    args = parser.parse_args()
    seed = random.randrange(10**6) if args.seed is None else args.seed
    print(f'seed {seed}, {args.max_examples:,} compositions', flush=True)
    fuzz(seed, args.max_examples)
    print('All passed.')


if __name__ == '__main__':
    main()

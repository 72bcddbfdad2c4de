"""Draws compositions of rules and headers of safetensors files, until one is not treated as the docs say.

Usage: python scripts/fuzz.py [--max-examples N] [--headers N] [--seed S]

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
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMPOSITIONS = ['tests/rules/test_compositions.py', 'tests/rules/test_composition_laws.py']
HEADERS = ['tests/checkpoint/test_safetensors_header.py', '-k', 'test_mutated_headers']
# About what the tests of compositions draw in all where the profile says 100.
SUITE = 3000
ROUND = 5_000
HEADERS_ROUND = 50_000
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


def headers(seed: int, examples: int) -> int:
    """Compares what is read of that many headers with what the safetensors library reads."""
    # Rounds follow one another by one, and their headers must not be the same.
    first = seed * HEADERS_ROUND
    return examples if run_tests(HEADERS, FUZZ_SEED=str(first), FUZZ_HEADERS=str(examples)) else 0


def fuzz(option: str, run: Callable[[int, int], int], seed: int, total: int, most: int) -> None:
    """Runs rounds of at most *most* examples, until there were enough or one fails."""
    begun, drawn, number = time.monotonic(), 0, seed
    while drawn < total:
        examples = min(most, total - drawn)
        passed = run(number, examples)
        if not passed:
            others = {'--max-examples': 0, '--headers': 0, option: examples}
            again = ' '.join(f'{name} {count}' for name, count in others.items())
            sys.exit(
                f'FAILED after {drawn:,} {run.__name__}. Once more: make fuzz ARGS="--seed {number} {again}"'
            )
        drawn, number = drawn + passed, number + 1
        seconds = time.monotonic() - begun
        rate = drawn / seconds
        print(f'{drawn:,} {run.__name__} passed in {seconds:.0f} s, {rate:.0f} a second', flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--max-examples', type=int, default=50_000, metavar='N', help='how many compositions')
    parser.add_argument('--headers', type=int, default=1_000_000, metavar='N', help='how many headers')
    parser.add_argument('--seed', type=int, help='draw the same examples again')
    args = parser.parse_args()
    seed = random.randrange(10**6) if args.seed is None else args.seed
    print(f'seed {seed}, {args.headers:,} headers, {args.max_examples:,} compositions', flush=True)
    fuzz('--headers', headers, seed, args.headers, HEADERS_ROUND)
    fuzz('--max-examples', compositions, seed, args.max_examples, ROUND)
    print('All passed.')


if __name__ == '__main__':
    main()

"""Draws compositions of rules and headers of safetensors files, until the documented behavior is violated.

Usage: python scripts/fuzz.py [--max-examples N] [--headers N] [--seed S]

It runs tests of the suite on other examples, in rounds: each round is a pytest run with its own seed, which
shows progress and frees memory. The first round that fails ends it. The printed seed reproduces the examples.
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
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
ROUND_TIMEOUT_S = 3600


class Tests(NamedTuple):
    """Tests that draw examples.

    Attributes:
        option: the pytest option for the number of examples.
        examples: the examples that they draw, for messages.
        selection: the arguments of pytest that select them.
        suite: the approximate number of examples of all tests at a profile of 100.
        round: the number of examples of a pytest run.
    """

    option: str
    examples: str
    selection: tuple[str, ...]
    suite: int
    round: int


HEADERS = Tests(
    '--headers', 'headers', ('tests/checkpoint/test_safetensors_header.py', '-k', 'test_mutated'), 250, 20_000
)
COMPOSITIONS = Tests(
    '--max-examples',
    'compositions',
    ('tests/rules/test_compositions.py', 'tests/rules/test_composition_laws.py'),
    3000,
    5000,
)


def run_tests(arguments: list[str], **env: str) -> str:
    """Runs tests, and returns pytest's output; if a test fails, prints the output and returns None."""
    command = ['-m', 'pytest', '-p', 'no:cacheprovider', '-q', '-x', f'--timeout={ROUND_TIMEOUT_S}']
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


def run_round(tests: Tests, seed: int, examples: int) -> int:
    """Draws about that many examples and returns how many passed; None if a test fails."""
    profile = ['--hypothesis-profile=fuzz', f'--hypothesis-seed={seed}', '--hypothesis-show-statistics']
    scale = str(max(1, math.ceil(100 * examples / tests.suite)))
    printed = run_tests([*profile, *tests.selection], FUZZ_EXAMPLES=scale)
    return sum(map(int, re.findall(r'(\d+) passing', printed)))


def fuzz(tests: Tests, seed: int, total: int) -> None:
    """Runs rounds until enough examples were drawn or a test fails."""
    begun, drawn = time.monotonic(), 0
    while drawn < total:
        examples = min(tests.round, total - drawn)
        passed = run_round(tests, seed, examples)
        if not passed:
            counts = dict.fromkeys((HEADERS.option, COMPOSITIONS.option), 0) | {tests.option: examples}
            again = ' '.join(f'{option} {count}' for option, count in counts.items())
            sys.exit(
                f'FAILED after {drawn:,} {tests.examples}. Once more: make fuzz ARGS="--seed {seed} {again}"'
            )
        drawn, seed = drawn + passed, seed + 1
        seconds = time.monotonic() - begun
        rate = drawn / seconds
        print(f'{drawn:,} {tests.examples} passed in {seconds:.0f} s, {rate:.0f} a second', flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--max-examples', type=int, default=50_000, metavar='N', help='how many compositions')
    parser.add_argument('--headers', type=int, default=100_000, metavar='N', help='how many headers')
    parser.add_argument('--seed', type=int, help='draw the same examples again')
    args = parser.parse_args()
    seed = random.randrange(10**6) if args.seed is None else args.seed
    print(f'seed {seed}, {args.headers:,} headers, {args.max_examples:,} compositions', flush=True)
    fuzz(HEADERS, seed, args.headers)
    fuzz(COMPOSITIONS, seed, args.max_examples)
    print('All passed.')


if __name__ == '__main__':
    main()

"""Runs the checks of scalax, each as a named step, and sums them up at the end.

Usage: python -m scripts.run_checks static
       python -m scripts.run_checks release
       python -m scripts.run_checks all --oldest-python .venv-oldest/bin/python

*release* is what depends on the release of JAX that this interpreter has: types, docstrings and all tests.
With *all*, the tests on the oldest JAX run beside everything else, with their output kept back until they
end. A failed step stops nothing; the last lines say what failed, and so does the exit status. Where pytest
did not come to its end, they say which test was begun last. No process of a step outlives it.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from scripts import left_behind

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = (
    3600  # no test takes longer than a minute without a reason (limits.py); this is for the sum of them
)
GRACE_S = 10
_numbers = itertools.count()

# pytest's cache folder would be shared by two runs at the same time.
PYTEST = ['-m', 'pytest', '-p', 'no:cacheprovider']

# These ask nothing of JAX that they do not already ask on the newest one.
NOT_ON_OLDEST = [f'tests/test_{name}.py' for name in ('benchmarks', 'launch', 'plan_tpu', 'wheel')]


@dataclass
class Step:
    """One command, where its output goes, and what became of it."""

    name: str
    command: list[str]
    junit: Path | None = None
    log: Path | None = None
    mark: str = field(default_factory=lambda: f'SCALAX_CHECKS_{os.getpid()}_{next(_numbers)}')
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    seconds: float = 0.0
    problem: str = ''
    counts: Counter[str] = field(default_factory=Counter)

    def start(self) -> None:
        beside = ' (in the background)' if self.log else ''
        title(f'{self.name}{beside}: {" ".join(self.command[1:])}')
        self.started = time.monotonic()
        with contextlib.ExitStack() as stack:
            out = stack.enter_context(self.log.open('wb')) if self.log else None
            # A session of its own: a terminal's Ctrl-C comes here only.
            self.process = subprocess.Popen(
                self.command,
                cwd=ROOT,
                env={**os.environ, self.mark: '1', 'SCALAX_RUNNING_TEST': str(self.running or '')},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT if out else None,
                start_new_session=True,
            )

    def finish(self) -> None:
        """Waits for the step, within what is left of its time, and records how it went."""
        assert self.process is not None
        try:
            left = TIMEOUT_S - (time.monotonic() - self.started)
            self.problem = describe_exit(self.process.wait(timeout=max(left, 0)))
        except subprocess.TimeoutExpired:
            self.problem = f'ended after {TIMEOUT_S} s{self.at_test()}'
            self.end()
        self.seconds = time.monotonic() - self.started
        if processes := left_behind.end(self.mark):
            self.problem = self.problem or 'left processes behind'
            title(f'{self.name}: left behind, and ended now: {"; ".join(processes)}')
        if self.log:
            title(f'{self.name}: its output')
            print(self.log.read_text(encoding='utf-8', errors='replace'), flush=True)
        if self.junit:
            self.read_counts(self.junit)

    def end(self) -> bool:
        """Ends the step, if it still runs, with all that it has started; returns whether it did."""
        if self.process is None or self.process.poll() is not None:
            return False
        self.process.send_signal(signal.SIGINT)  # at which pytest says where it was, and cleans up
        # A second Ctrl-C means: at once.
        with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            self.process.wait(timeout=GRACE_S)
        self.process.kill()
        self.process.wait()
        left_behind.end(self.mark)
        return True

    def at_test(self) -> str:
        """Which test was begun last, as the end of a sentence; nothing where there are no tests."""
        if self.running is None or not self.running.exists():
            return ''
        return f', in {self.running.read_text(encoding="utf-8")}'

    @property
    def running(self) -> Path | None:
        """The file in which pytest names the test that runs (see limits.py)."""
        return self.junit and self.junit.with_suffix('.running')

    def read_counts(self, junit: Path) -> None:
        try:
            suites = list(ET.parse(junit).getroot().iter('testsuite'))
        except (OSError, ET.ParseError):
            self.problem = f'{self.problem or "no test report"}{self.at_test()}'
            return
        for suite in suites:
            total, failed, errors, skipped = (
                int(suite.get(key, 0)) for key in ('tests', 'failures', 'errors', 'skipped')
            )
            self.counts += Counter(
                failed=failed,
                errors=errors,
                skipped=skipped,
                passed=total - failed - errors - skipped,
            )


def describe_exit(code: int) -> str:
    if code == 0:
        return ''
    return f'exit status {code}' if code > 0 else f'died of {signal.Signals(-code).name}'


def describe_counts(counts: Counter[str]) -> str:
    """The counts as pytest writes them."""
    order = ['failed', 'passed', 'skipped', 'errors']
    return ', '.join(f'{counts[key]} {key}' for key in order if counts[key]) or 'no tests ran'


def title(text: str) -> None:
    print(f'\n==> {text}', flush=True)


def describe_python(python: str) -> str:
    """The versions that a step runs on, asked of its own interpreter."""
    code = (
        'import importlib.metadata, platform\n'
        'version = importlib.metadata.version\n'
        'print(f"Python {platform.python_version()}, JAX {version(\'jax\')}", end="")\n'
        'print(f", jaxlib {version(\'jaxlib\')}")'
    )
    command = [python, '-c', code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def static_steps(python: str) -> list[Step]:
    return [
        Step('format', [python, '-m', 'ruff', 'format', '--check', '.']),
        Step('lint', [python, '-m', 'ruff', 'check', '.']),
        Step('types', [python, '-m', 'mypy', 'scalax', 'benchmarks']),
    ]


def test_steps(python: str, scratch: Path, jax: str) -> list[Step]:
    doctests, tests = scratch / 'doctests.xml', scratch / 'tests.xml'
    return [
        Step(
            'docstrings',
            [python, *PYTEST, f'--junit-xml={doctests}', '--doctest-modules', 'scalax'],
            junit=doctests,
        ),
        Step(f'tests ({jax})', [python, *PYTEST, f'--junit-xml={tests}', 'tests'], junit=tests),
    ]


def oldest_step(python: str, scratch: Path) -> Step:
    report = scratch / 'oldest.xml'
    ignored = [f'--ignore={path}' for path in NOT_ON_OLDEST]
    command = [python, *PYTEST, f'--junit-xml={report}', *ignored, 'tests']
    return Step('tests (oldest JAX)', command, junit=report, log=scratch / 'oldest.log')


def run(steps: list[Step], beside: list[Step]) -> None:
    """Runs `steps` one after the other while those `beside` run too; leaves no process behind."""
    try:
        for step in beside:
            step.start()
        for step in steps:
            step.start()
            step.finish()
        for step in beside:
            title(f'{step.name}: waiting for it to end')
            step.finish()
    finally:
        for step in [*steps, *beside]:
            at_test = step.at_test()
            if step.end():
                title(f'{step.name}: ended{at_test}')


def summarise(steps: list[Step], seconds: float) -> bool:
    """Prints what became of each step, the counts last, and returns whether all passed."""
    title('summary')
    for step in steps:
        verdict = f'FAILED ({step.problem})' if step.problem else 'passed'
        counts = f': {describe_counts(step.counts)}' if step.junit else ''
        print(f'{step.name:<20} {verdict}{counts} in {step.seconds:.1f}s')
    failed = [step.name for step in steps if step.problem]
    if any(step.junit for step in steps):
        total = sum((step.counts for step in steps), Counter())
        print(f'\n{describe_counts(total)} in {seconds:.2f}s', flush=True)
    if failed:
        print(f'FAILED: {len(failed)} of {len(steps)} steps: {", ".join(failed)}', flush=True)
    else:
        print(f'All {len(steps)} steps passed.', flush=True)
    return not failed


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Makes a polite request to end look like Ctrl-C, so that the steps are ended too."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        print('\nInterrupted; the running steps were ended.', file=sys.stderr)
        sys.exit(130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('what', choices=['static', 'release', 'all'])
    parser.add_argument('--oldest-python', help='the interpreter that has the oldest JAX')
    args = parser.parse_args()
    if args.what == 'all' and not args.oldest_python:
        parser.error('all needs --oldest-python')

    begun = time.monotonic()
    python, oldest = sys.executable, args.oldest_python
    with interruptible(), tempfile.TemporaryDirectory(prefix='scalax-checks-') as folder:
        steps, beside = static_steps(python), []
        if args.what == 'release':
            print(describe_python(python))
            steps = [steps[-1], *test_steps(python, Path(folder), 'this JAX')]
        elif args.what == 'all':
            # Not resolved: that would lead out of the virtual environment.
            oldest = str(Path(oldest).absolute())
            print(f'newest: {describe_python(python)}')
            print(f'oldest: {describe_python(oldest)}')
            steps += test_steps(python, Path(folder), 'newest JAX')
            beside.append(oldest_step(oldest, Path(folder)))
        run(steps, beside)
        passed = summarise([*steps, *beside], time.monotonic() - begun)
    sys.exit(0 if passed else 1)


if __name__ == '__main__':
    main()

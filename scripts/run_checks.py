"""Runs the checks of scalax, each as a named step, and sums them up at the end.

Usage: python -m scripts.run_checks check
       python -m scripts.run_checks release
       python -m scripts.run_checks all --oldest-python .venv-oldest/bin/python

*check* is for the minutes in between: format, lint, types, and the tests that are quick. Its first line says
what it leaves out. *release* is what depends on the release of JAX that this interpreter has: types,
docstrings and all tests. *all* is everything but the tests that are marked as slow, on this JAX and, where a
release can change what they find, on the oldest.

One step more runs at a time than there are cores, for some tests wait for processes; of *check*, all run at
once. The output of each is printed when it has ended.

A failed step stops nothing; the last lines say what failed, and so does the exit status. Where pytest did not
come to its end, they say which test was begun last. No process of a step outlives it.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from scripts import left_behind

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = (
    3600  # no test takes longer than a minute without a reason (limits.py); this is for the sum of them
)
GRACE_S = 10
POLL_S = 0.1
_numbers = itertools.count()

# pytest's cache folder would be shared by two runs at the same time.
PYTEST = ['-m', 'pytest', '-p', 'no:cacheprovider']
FEWER = '--hypothesis-profile=fewer'
QUICK = ['-m', 'not slow', FEWER]
IN_CHECK = ['-m', 'not slow and not long', FEWER]
# Of the large tables of cases, the oldest runs a third.
ON_OLDEST = ['-m', 'not slow and not one_jax', FEWER, '--third']

# Compiling is much of the work of the tests, and how fast the machine code is says nothing about what scalax
# does: where arrays lie, which collectives there are and what is traced stay as they are. `make verify`
# compiles as users do.
# Small programs compile with less work where they are not split for several threads.
WHOLE = '--xla_cpu_parallel_codegen_split_count=1'
UNOPTIMISED = {'JAX_DISABLE_MOST_OPTIMIZATIONS': '1', 'XLA_FLAGS': WHOLE}
# JAX 0.10 can also make machine code without MLIR, in a third of the time; newer ones do not know the flag.
UNOPTIMISED_OLDEST = {**UNOPTIMISED, 'XLA_FLAGS': f'{WHOLE} --xla_cpu_use_fusion_emitters=false'}

# Hundreds of processes import scalax and the examples: what Python compiles of them is kept beside the files,
# also where the shell says otherwise.
BYTECODE = {'PYTHONDONTWRITEBYTECODE': ''}

# What mypy checks; tests/typed has programs of users, right and wrong ones.
TYPED = ['scalax', 'benchmarks', 'tests/typed']

# Many tests ask for the same program, say of jax.jit and of sjit: what is compiled is kept, for this run and
# the next. Each step has a folder of its own: JAX writes an entry in place, where another process may read it
# before it is whole.
KEPT, AT_MOST = ROOT / '.jax_cache', 2**29
COMPILED, KEEP_ALL = 'JAX_COMPILATION_CACHE_DIR', {'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0'}

# These ask little of JAX that others do not ask, or their subject is files, text or pages and not JAX; `make
# verify` runs them there, too. Each room keeps others: checkpoint what one process and several write and
# read, hostdata its transfers and what several processes do (loaders too), rules random compositions.
NOT_ON_OLDEST = [
    'tests/benchmarks',
    'tests/checkpoint/test_faults.py',
    'tests/checkpoint/test_writer.py',
    'tests/cli',
    'tests/docs/test_blocks.py',
    'tests/docs/test_contributing.py',
    'tests/docs/test_pages.py',
    'tests/docs/test_site.py',
    'tests/docs/test_notebooks.py',
    'tests/e2e/test_examples.py',
    'tests/e2e/test_expert_parallel.py',
    'tests/e2e/test_launch.py',
    'tests/e2e/test_lost_part.py',
    'tests/e2e/test_ops.py',
    'tests/e2e/test_ring_attention.py',
    'tests/e2e/test_strategies.py',
    'tests/e2e/test_training_processes.py',
    'tests/explain/test_browser.py',
    'tests/explain/test_html.py',
    'tests/find/test_regexes.py',
    'tests/hostdata/test_prefetch.py',
    'tests/plan/test_page.py',
    'tests/plan/test_programs_that_run.py',
    'tests/plan/test_published.py',
    'tests/plan/test_recorded.py',
    'tests/plan/test_recorded_memory.py',
    'tests/plan/test_roofline.py',
    'tests/plan/test_second_reader.py',
    'tests/plan/test_tpu.py',
    'tests/rules/test_catalogue_models.py',
    'tests/rules/test_composition_laws.py',
    'tests/rules/test_optimizer_state.py',
    'tests/rules/test_properties.py',
    'tests/search',
    'tests/tools',
    'tests/visualize/test_page.py',
]
# The files that take longest, with their seconds of a processor, roughly: the processes that share the tests
# are to end at about the same time. Others count as one.
SECONDS = {
    'tests/docs/test_blocks.py': 70,
    'tests/e2e/test_training_processes.py': 50,
    'tests/transforms/sjit/test_jit_parity.py': 50,
    'tests/e2e/test_lost_part.py': 100,
    'tests/e2e/test_examples.py': 55,
    'tests/hostdata/test_processes.py': 35,
    'tests/jobs/test_jobs.py': 30,
    'tests/checkpoint/test_processes.py': 30,
    'tests/reshard/test_processes.py': 30,
    'tests/e2e/test_strategies.py': 30,
    'tests/benchmarks/test_unchanged_models.py': 25,
    'tests/custom_op/test_custom_op.py': 25,
    'tests/find/test_find.py': 25,
    'tests/stages/test_programs.py': 25,
    'tests/cli/test_cli.py': 20,
    'tests/reshard/test_reshard.py': 20,
    'tests/docs/test_notebooks.py': 20,
    'tests/interop/test_nnx.py': 20,
    'tests/rules/test_catalogue_models.py': 20,
    'tests/search/test_search.py': 20,
    'tests/find/test_found_page.py': 17,
    'tests/verify/test_reduce.py': 15,
    'tests/e2e/test_expert_parallel.py': 15,
    'tests/e2e/test_frameworks.py': 15,
    'tests/e2e/test_ring_attention.py': 15,
    'tests/plan/test_published.py': 15,
    'tests/plan/test_tpu.py': 15,
    'tests/cli/test_verify.py': 15,
    'tests/test_distributed.py': 15,
    'tests/watch/test_watch.py': 60,
    'tests/trace/test_constraints.py': 15,
    'tests/transforms/sjit/test_caches.py': 15,
    'tests/transforms/sjit/test_matrix.py': 15,
    'tests/transforms/test_shard_map.py': 15,
    'tests/doctor/test_doctor.py': 12,
    'tests/stages/test_calls.py': 12,
    'tests/stages/test_models.py': 12,
    'tests/e2e/test_ops.py': 12,
    'tests/follow/test_matrices.py': 12,
    'tests/plan/test_hbm_traffic.py': 12,
    'tests/tools/test_benchmarks.py': 12,
    'tests/transforms/sjit/test_copied.py': 12,
    'tests/transforms/sjit/test_counts.py': 12,
    'tests/transforms/sjit/test_explicit.py': 12,
    'tests/transforms/test_microbatch.py': 12,
    'tests/plan/test_batch.py': 10,
    'tests/plan/test_second_reader.py': 10,
    'tests/test_imports.py': 10,
    'tests/tools/test_limits.py': 10,
    'tests/axes/test_named_jit.py': 8,
    'tests/checkpoint/test_writer.py': 8,
    'tests/docs/test_site.py': 8,
    'tests/follow/test_kernels.py': 8,
    'tests/follow/test_rows_by_number.py': 12,
    'tests/plan/test_recorded.py': 8,
    'tests/rules/test_optimizer_state.py': 8,
    'tests/transforms/sjit/test_modes.py': 8,
    'tests/checkpoint/test_faults.py': 7,
    'tests/plan/test_page.py': 7,
    'tests/plan/test_programs_that_run.py': 7,
    'tests/rules/test_composition_laws.py': 7,
    'tests/benchmarks/test_unchanged_bounds.py': 6,
    'tests/checkpoint/test_checkpoint.py': 6,
    'tests/checkpoint/test_safetensors.py': 6,
    'tests/hostdata/test_prefetch.py': 6,
}
# Each takes five seconds of a processor or more; `make test` runs them, and the tests with the mark `long`.
NOT_IN_CHECK = [
    'tests/benchmarks/test_unchanged_bounds.py',
    'tests/benchmarks/test_unchanged_models.py',
    'tests/checkpoint/test_faults.py',
    'tests/checkpoint/test_processes.py',
    'tests/checkpoint/test_writer.py',
    'tests/cli',
    'tests/custom_op/test_custom_op.py',
    'tests/custom_op/test_gradients.py',
    'tests/docs/test_blocks.py',
    'tests/docs/test_contributing.py',
    'tests/docs/test_site.py',
    'tests/docs/test_notebooks.py',
    'tests/e2e',
    'tests/explain/test_browser.py',
    'tests/explain/test_html.py',
    'tests/find/test_found_page.py',
    'tests/hostdata/test_prefetch.py',
    'tests/hostdata/test_processes.py',
    'tests/jobs',
    'tests/plan/test_page.py',
    'tests/plan/test_programs_that_run.py',
    'tests/plan/test_published.py',
    'tests/plan/test_recorded.py',
    'tests/plan/test_recorded_memory.py',
    'tests/plan/test_roofline.py',
    'tests/plan/test_second_reader.py',
    'tests/plan/test_tpu.py',
    'tests/rules/test_catalogue_models.py',
    'tests/rules/test_composition_laws.py',
    'tests/rules/test_optimizer_state.py',
    'tests/search',
    'tests/test_distributed.py',
    'tests/tools',
    'tests/trace/test_constraints.py',
    'tests/transforms/sjit/test_copied.py',
    'tests/transforms/sjit/test_counts.py',
    'tests/transforms/sjit/test_explicit.py',
    'tests/transforms/sjit/test_jit_parity.py',
    'tests/transforms/sjit/test_matrix.py',
    'tests/transforms/test_microbatch.py',
    'tests/transforms/test_shard_map.py',
]


@dataclass
class Step:
    """One command, where its output goes, and what became of it."""

    name: str
    command: list[str]
    junit: Path | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    mark: str = field(default_factory=lambda: f'SCALAX_CHECKS_{os.getpid()}_{next(_numbers)}')
    process: subprocess.Popen[bytes] | None = None
    output: IO[bytes] | None = None
    said: str = ''
    started: float = 0.0
    seconds: float = 0.0
    problem: str = ''
    counts: Counter[str] = field(default_factory=Counter)

    def start(self) -> None:
        command = ' '.join(self.command[1:])
        title(f'{self.name}: {command if len(command) < 400 else command[:400] + " ..."}')
        self.started = time.monotonic()
        self.output = tempfile.TemporaryFile()  # noqa: SIM115 - closed in _keep_output
        # A session of its own: a terminal's Ctrl-C comes here only.
        self.process = subprocess.Popen(
            self.command,
            cwd=ROOT,
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            stdout=self.output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def environment(self) -> dict[str, str]:
        env = {**os.environ, self.mark: '1', 'SCALAX_RUNNING_TEST': str(self.running or '')}
        return {**env, **BYTECODE, **self.variables}

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
        self._keep_output()
        if processes := left_behind.end(self.mark):
            self.problem = self.problem or 'left processes behind'
            title(f'{self.name}: left behind, and ended now: {"; ".join(processes)}')
        if self.junit:
            self.read_counts(self.junit)

    def is_over(self) -> bool:
        """Whether there is nothing more to wait for."""
        assert self.process is not None
        return self.process.poll() is not None or time.monotonic() - self.started > TIMEOUT_S

    def show(self) -> None:
        """Prints the output of a step that has ended."""
        title(f'{self.name}: its output')
        print(self.said, flush=True)

    def _keep_output(self) -> None:
        if self.output:
            with self.output as output:
                output.seek(0)
                self.said = output.read().decode('utf-8', errors='replace')
            self.output = None

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
        self._keep_output()
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
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=True, timeout=60
    ).stdout.strip()


def static_steps(python: str) -> list[Step]:
    return [
        Step('format', [python, '-m', 'ruff', 'format', '--check', '.']),
        Step('lint', [python, '-m', 'ruff', 'check', '.']),
        Step('types', [python, '-m', 'mypy', *TYPED]),
    ]


def doctests(python: str, scratch: Path, variables: Mapping[str, str] | None = None) -> Step:
    report = scratch / 'doctests.xml'
    command = [python, *PYTEST, f'--junit-xml={report}', '--doctest-modules', 'scalax']
    return Step('docstrings', command, junit=report, variables=variables or {})


def test_steps(
    name: str,
    python: str,
    scratch: Path,
    parts: int = 1,
    options: Sequence[str] = QUICK,
    left_out: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
    keeps: bool = True,
) -> list[Step]:
    """The tests in so many processes, each of which gets files that take about as long as those of another.

    Args:
        name: for people.
        python: the interpreter.
        scratch: a folder for reports.
        parts: the number of processes.
        options: of pytest.
        left_out: files and folders that do not run.
        variables: of the environment.
        keeps: whether it keeps what it compiles.
    """
    files = sorted((ROOT / 'tests').rglob('test_*.py'))
    files = [file for file in files if not any(file.is_relative_to(ROOT / other) for other in left_out)]
    steps = []
    for part, own_files in enumerate(shares(files, parts)):
        label = f'{name}, {part + 1} of {parts}' if parts > 1 else name
        report = scratch / f'{label}.xml'
        own = [str(file.relative_to(ROOT)) for file in own_files]
        command = [python, *PYTEST, f'--junit-xml={report}', *options, *own]
        cache = {COMPILED: str(KEPT / label), **KEEP_ALL} if keeps else {}
        steps.append(Step(label, command, junit=report, variables={**(variables or {}), **cache}))
    return steps


def forget_old_programs() -> None:
    """Deletes what was compiled where it has grown large: nobody asks for most of that any more."""
    if sum(file.stat().st_size for file in KEPT.rglob('*')) > AT_MOST:
        shutil.rmtree(KEPT)


def shares(files: Sequence[Path], parts: int) -> list[list[Path]]:
    """Files in so many parts: the longest first, each goes to the part that has the least to do so far."""
    seconds = {file: SECONDS.get(str(file.relative_to(ROOT)), 1) for file in files}
    dealt: list[list[Path]] = [[] for _ in range(parts)]
    for file in sorted(files, key=lambda file: (-seconds[file], file)):
        min(dealt, key=lambda part: sum(seconds[other] for other in part)).append(file)
    return [sorted(part) for part in dealt]


def run(steps: Sequence[Step], workers: int | None = None) -> None:
    """Runs steps in their order, so many at a time; leaves no process behind."""
    workers = workers or min((os.cpu_count() or 1) + 1, 4)
    waiting: list[Step] = list(steps)
    running: list[Step] = []
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                running.append(waiting.pop(0))
                running[-1].start()
            for step in [step for step in running if step.is_over()]:
                running.remove(step)
                step.finish()
                step.show()
            time.sleep(POLL_S)
    finally:
        for step in steps:
            at_test = step.at_test()
            if step.end():
                title(f'{step.name}: ended{at_test}')
                step.show()


def summarise(steps: list[Step], seconds: float) -> bool:
    """Prints what became of each step, the counts last, and returns whether all passed."""
    title('summary')
    for step in steps:
        verdict = f'FAILED ({step.problem})' if step.problem else 'passed'
        counts = f': {describe_counts(step.counts)}' if step.junit else ''
        print(f'{step.name:<30} {verdict}{counts} in {step.seconds:.1f}s')
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
    parser.add_argument('what', choices=['check', 'release', 'all'])
    parser.add_argument('--oldest-python', help='the interpreter that has the oldest JAX')
    args = parser.parse_args()
    if args.what == 'all' and not args.oldest_python:
        parser.error('all needs --oldest-python')

    forget_old_programs()
    begun = time.monotonic()
    python, oldest = sys.executable, args.oldest_python
    with interruptible(), tempfile.TemporaryDirectory(prefix='scalax-checks-') as folder:
        scratch, steps = Path(folder), static_steps(python)
        if args.what == 'check':
            print(f'left out, for `make test`: {", ".join(NOT_IN_CHECK)}')
            steps += test_steps(
                'quick tests',
                python,
                scratch,
                3,
                IN_CHECK,
                NOT_IN_CHECK,
                variables=UNOPTIMISED,
            )
        elif args.what == 'release':
            print(describe_python(python))
            tests = test_steps('tests', python, scratch, 4, options=(), keeps=False)
            steps = [steps[-1], doctests(python, scratch), *tests]
        elif args.what == 'all':
            # Not resolved: that would lead out of the virtual environment.
            oldest = str(Path(oldest).absolute())
            print(f'newest: {describe_python(python)}\noldest: {describe_python(oldest)}', flush=True)
            steps += test_steps('tests (JAX newest)', python, scratch, 6, variables=UNOPTIMISED)
            steps += test_steps(
                'tests (JAX oldest)',
                oldest,
                scratch,
                2,
                ON_OLDEST,
                left_out=NOT_ON_OLDEST,
                variables=UNOPTIMISED_OLDEST,
            )
            steps.append(doctests(python, scratch, UNOPTIMISED))
        # None of *check* begins late: the last one would run alone.
        run(steps, len(steps) if args.what == 'check' else None)
        passed = summarise(steps, time.monotonic() - begun)
    sys.exit(0 if passed else 1)


if __name__ == '__main__':
    main()

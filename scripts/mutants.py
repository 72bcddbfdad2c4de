"""Mutates scalax/ in a copy of this folder, one change at a time, and lists the mutants that no test catches.

Usage: python -m scripts.mutants [--count 200] [--seed 0] [--jobs N] [--output mutants.json]

First every quick test runs once to record the lines that it reaches, which is cached in .mutants/ until the
source or the test's file changes. Then, for each mutant, the tests that reach its line run: those of its
package first, and the quickest first. A mutant is caught if a test fails, stops or runs out of time. Needs
Python 3.12.
"""

import argparse
import ast
import contextlib
import hashlib
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Queue

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / '.mutants'
FOLDERS = ['scalax', 'tests', 'scripts', 'examples', 'benchmarks', 'docs']
FILES = ['conftest.py', 'pyproject.toml', 'setup.py', 'README.md', 'CHANGELOG.md', 'Makefile', 'MANIFEST.in']
# These do not test scalax/, or test it in processes whose lines are not recorded.
IGNORED = [
    'tests/tools',
    'tests/docs',
    'tests/test_imports.py',
    'tests/test_distributed.py',
    'test_browser.py',
]
IGNORED += ['test_examples.py', 'test_launch.py', 'test_lost_processes.py', 'processes.py']
NOT_RUN = ('annotation', 'returns', 'type_params')
CPU_S, WALL_S, LEARN_S = 60, 240, 900
ROUNDS = [(5.0, 40), (20.0, 400)]  # the seconds and the number of tests that run together
SWAPPED = [(ast.Eq, ast.NotEq), (ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Is, ast.IsNot)]
SWAPPED += [(ast.In, ast.NotIn), (ast.And, ast.Or), (ast.Add, ast.Sub), (ast.Mult, ast.FloorDiv)]
SWAPS = {**dict(SWAPPED), **{b: a for a, b in SWAPPED}, ast.Div: ast.Mult, ast.Mod: ast.Mult}


@dataclass
class Mutant:
    """A change: the text of a node, and its replacement."""

    file: str
    lines: tuple[int, int]  # the line that a test reaches; if there is none, the entire file
    kind: str
    span: tuple[int, int, int, int]
    before: str
    after: str
    caught: str = ''

    def __str__(self) -> str:
        return f'{self.file}:{self.span[0]}: {self.kind}: {self.before} -> {self.after}'

    def applied(self, source: str) -> str:
        lines, (first, start, last, end) = source.encode().splitlines(keepends=True), self.span
        head = b''.join(lines[: first - 1]) + lines[first - 1][:start]
        return (head + self.after.encode() + lines[last - 1][end:] + b''.join(lines[last:])).decode()


def changes(node: ast.AST):
    """Yields replacements of a node: kinds, nodes and texts."""
    match node:
        case ast.Compare(ops=[op]):
            swapped = ast.Compare(node.left, [SWAPS[type(op)]()], node.comparators)
            yield 'comparison', node, ast.unparse(swapped)
        case ast.BoolOp():
            yield 'and/or', node, ast.unparse(ast.BoolOp(SWAPS[type(node.op)](), node.values))
        case ast.BinOp(op=op) if type(op) in SWAPS:
            if not any(isinstance(n, ast.JoinedStr) or text_of(n) for n in ast.walk(node)):
                yield 'arithmetic', node, ast.unparse(ast.BinOp(node.left, SWAPS[type(op)](), node.right))
        case ast.UnaryOp(op=ast.Not()):
            yield 'not', node, ast.unparse(node.operand)
        case ast.Constant(value=bool() as value):
            yield 'constant', node, str(not value)
        case ast.Constant(value=int() as value):
            yield 'constant', node, str(value + 1)
        case ast.Constant() if text_of(node).isidentifier():
            yield 'constant', node, repr(text_of(node) + '_')
        case ast.Return(value=ast.expr() as value) if ast.unparse(value) != 'None':
            yield 'return', value, 'None'
        case ast.Raise() | ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Break() | ast.Continue():
            yield 'statement', node, 'pass'
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        yield 'condition', node.test, f'not ({ast.unparse(node.test)})'
    for test in node.ifs if isinstance(node, ast.comprehension) else ():
        yield 'condition', test, f'not ({ast.unparse(test)})'


def text_of(node: ast.AST) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ''


def mutants_of(file: str, source: str):
    """Yields all mutants of a file, except in annotations, messages and code for type checkers."""

    def visit(node: ast.AST, function: bool, quiet: bool):
        context_nodes = [
            getattr(node, 'test', None),
            *getattr(node, 'targets', ()),
            *getattr(node, 'decorator_list', ()),
        ]
        marks = {
            ast.unparse(context_node).rpartition('.')[2] for context_node in context_nodes if context_node
        }
        if isinstance(node, ast.JoinedStr) or marks & {'TYPE_CHECKING', '__all__', 'overload'}:
            return
        for kind, old, text in () if quiet else changes(node):
            span = (old.lineno, old.col_offset, old.end_lineno, old.end_col_offset)
            after = text if kind in ('statement', 'constant') else f'({text})'
            reached = (span[0], span[2]) if function else (0, 0)
            yield Mutant(file, reached, kind, span, ast.unparse(old).splitlines()[0][:150], after)
        for name, value in ast.iter_fields(node):
            if name in NOT_RUN or (name == 'keywords' and isinstance(node, ast.ClassDef)):
                continue
            inner = function or (name == 'body' and isinstance(node, ast.FunctionDef))
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from visit(child, inner, quiet or isinstance(node, ast.Raise))

    yield from visit(ast.parse(source), False, False)


def chosen_mutants(count: int, seed: int) -> list[Mutant]:
    """Returns mutants of each package in proportion to its size, evenly by kind, at most one per line."""
    rooms: dict[str, dict[str, list[Mutant]]] = {}
    for path in sorted((ROOT / 'scalax').rglob('*.py')):
        for mutant in mutants_of(str(path.relative_to(ROOT)), path.read_text(encoding='utf-8')):
            rooms.setdefault(room_of(mutant.file), {}).setdefault(mutant.kind, []).append(mutant)
    rng, chosen = random.Random(seed), {}
    sizes = {room: sum(map(len, kinds.values())) for room, kinds in rooms.items()}
    while len(chosen) < count:
        (room,) = rng.choices(list(rooms), list(sizes.values()))
        mutant = rng.choice(rooms[room][rng.choice(list(rooms[room]))])
        chosen.setdefault((mutant.file, mutant.span[0]), mutant)
    return list(chosen.values())


def room_of(file: str) -> str:
    """Returns the tests of a file: scalax/errors.py -> tests/test_errors."""
    *folders, name = file.removesuffix('.py').split('/')[1:]
    names = [folder.removeprefix('_') for folder in folders] or ['test_' + name.lstrip('_')]
    while len(names) > 1 and not Path(ROOT, 'tests', *names).is_dir():
        names.pop()
    return '/'.join(['tests', *names])


class Tests:
    """A pytest plugin that selects the chosen tests; with a report, it writes the lines that each reaches."""

    def __init__(self, chosen: list[str] | None, report: str | None) -> None:
        self.order = {name: index for index, name in enumerate(chosen or ())}
        self.report, self.lines, self.failed = report, set(), ''
        if report:
            events, tool = sys.monitoring, sys.monitoring.COVERAGE_ID
            events.use_tool_id(tool, 'mutants')
            events.register_callback(tool, events.events.LINE, self.line)
            events.set_events(tool, events.events.LINE)

    def line(self, code, line: int):
        if '/scalax/' in code.co_filename:
            self.lines.add((code.co_filename, line))
        return sys.monitoring.DISABLE

    def pytest_collection_modifyitems(self, config, items: list) -> None:
        if self.order:
            # Snapshots of tests that do not run are not stale.
            config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in self.order])
            kept = [item for item in items if item.nodeid in self.order]
            items[:] = sorted(kept, key=lambda item: self.order[item.nodeid])

    def pytest_runtest_logreport(self, report) -> None:
        self.failed = self.failed or (report.nodeid if report.failed else '')

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        if self.report:
            lines, now = {}, time.monotonic()
            for file, line in sorted(self.lines):
                lines.setdefault(file[file.rindex('/scalax/') + 1 :], []).append(line)
            entry = {'test': nodeid, 'failed': bool(self.failed), 'seconds': now - self.begun, 'lines': lines}
            with open(self.report, 'a', encoding='utf-8') as out:
                out.write(json.dumps(entry) + '\n')

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.begun, self.failed = time.monotonic(), ''
        if self.report:
            self.lines.clear()
            sys.monitoring.restart_events()


def run_tests(folder: str, log: str, files: list[str], chosen: list[str] | None, report: str | None) -> None:
    """Runs tests in a new process that has imported JAX but not scalax."""
    os.setsid()
    os.chdir(folder)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1), os.dup2(out, 2)
    sys.path[:] = [folder, *(path for path in sys.path if path not in ('', str(ROOT)))]
    for name in [name for name in sys.modules if name.split('.')[0] in ('scripts', 'scalax')]:
        del sys.modules[name]
    if not report:
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    import pytest

    plugin = Tests(chosen, report)
    options = ['-q', '-p', 'no:cacheprovider', '--randomly-dont-reorganize', '-m', 'not slow', '--tb=line']
    code = pytest.main([*options, *([] if report else ['-x']), *files], plugins=[plugin])
    if plugin.failed and not report:
        os.write(2, f'\nFAILED-TEST {plugin.failed}\n'.encode())
    os._exit(int(code))


def in_process(seconds: float, *args) -> int:
    """Returns the exit status of tests in a process; negative if it had to be killed."""
    process = multiprocessing.get_context('forkserver').Process(target=run_tests, args=args)
    process.start()
    process.join(seconds)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join()
    return process.exitcode


def copy_of_root(folder: Path) -> Path:
    ignore = shutil.ignore_patterns('__pycache__', '*.pyc')
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    for name in FILES:
        shutil.copy2(ROOT / name, folder / name)
    subprocess.run([sys.executable, '-m', 'compileall', '-q', 'scalax', 'tests'], cwd=folder, check=True)
    return folder


def learned(folder: Path, logs: Path, jobs: int) -> list[dict]:
    """Returns the lines that each test reaches and its time; reruns tests whose source or file changed."""
    CACHE.mkdir(exist_ok=True)
    common = hashlib.sha256()
    for path in [*sorted((ROOT / 'scalax').rglob('*.py')), *sorted((ROOT / 'tests/support').rglob('*.py'))]:
        common.update(path.read_bytes())

    def learn(path: Path) -> list[dict]:
        name = str(path.relative_to(ROOT))
        key = hashlib.sha256(common.digest() + name.encode() + path.read_bytes()).hexdigest()[:20]
        cached, report = CACHE / f'{key}.json', logs / f'{key}.jsonl'
        if not cached.exists():
            status = in_process(LEARN_S, str(folder), str(logs / f'{key}.log'), [name], None, str(report))
            tests = [json.loads(line) for line in report.read_text().splitlines()] if report.exists() else []
            failed = sum(test['failed'] for test in tests)
            print(f'learned {name}: {len(tests)} tests, {failed} failed, exit status {status}', flush=True)
            cached.write_text(json.dumps(tests), encoding='utf-8')
        return json.loads(cached.read_text(encoding='utf-8'))

    files = sorted((ROOT / 'tests').rglob('test_*.py'))
    files = [path for path in files if not any(part in str(path) for part in IGNORED)]
    with ThreadPoolExecutor(jobs) as pool:
        passing = [test for tests in pool.map(learn, files) for test in tests if not test['failed']]
    for test in passing:
        test['lines'] = {file: set(lines) for file, lines in test['lines'].items()}
    return passing


def tests_of(mutant: Mutant, tests: list[dict]) -> list[list[str]]:
    """Returns the tests that could catch a mutant, in rounds."""
    changed_lines, room = set(range(mutant.lines[0], mutant.lines[1] + 1)), room_of(mutant.file)
    seen = [(test, test['lines'].get(mutant.file)) for test in tests]
    reaching = [test for test, lines in seen if lines and (lines & changed_lines or changed_lines == {0})]
    reaching = reaching or [test for test in tests if test['test'].startswith(room)]
    left = sorted(reaching, key=lambda test: (not test['test'].startswith(room), test['seconds']))
    rounds = []
    for seconds, number in ROUNDS:
        rounds.append([])
        while left and len(rounds[-1]) < number and (seconds := seconds - left[0]['seconds']) > 0:
            rounds[-1].append(left.pop(0)['test'])
    return [chosen for chosen in rounds if chosen]


def judge(mutant: Mutant, tests: list[dict], folder: Path, log: Path) -> None:
    """Runs the tests of a mutant, and records the test that caught it."""
    path = folder / mutant.file
    source = path.read_text(encoding='utf-8')
    path.write_text(mutant.applied(source), encoding='utf-8')
    shutil.rmtree(path.parent / '__pycache__', ignore_errors=True)
    try:
        for chosen in tests_of(mutant, tests):
            files = list(dict.fromkeys(name.split('::')[0] for name in chosen))
            status = in_process(WALL_S, str(folder), str(log), files, chosen, None)
            if status not in (0, 5):
                failure = log.read_text(errors='replace').rpartition('FAILED-TEST ')
                mutant.caught = failure[2].strip() if failure[1] else f'exit status {status}'
                return
    finally:
        path.write_text(source, encoding='utf-8')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--count', type=int, default=200)
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--jobs', type=int, default=os.cpu_count())
    parser.add_argument('--output', type=Path, help='a JSON file with what became of each mutant')
    args = parser.parse_args()
    os.environ.update(PYTHONDONTWRITEBYTECODE='1', JAX_PLATFORMS='cpu')
    os.environ.update(
        JAX_COMPILATION_CACHE_DIR=str(CACHE / 'jax'), JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS='0'
    )
    multiprocessing.get_context('forkserver').set_forkserver_preload(['jax', 'optax'])

    with tempfile.TemporaryDirectory(prefix='scalax-mutants-') as scratch:
        folders: Queue[Path] = Queue()
        for job in range(args.jobs):
            folders.put(copy_of_root(Path(scratch) / f'copy{job}'))
        tests = learned(Path(scratch) / 'copy0', Path(scratch), args.jobs)
        mutants = chosen_mutants(args.count, args.seed)

        def judge_one(mutant: Mutant) -> None:
            folder = folders.get()
            judge(mutant, tests, folder, folder.with_suffix('.log'))
            folders.put(folder)
            print(f'{"caught  " if mutant.caught else "SURVIVED"} {mutant}', flush=True)

        with ThreadPoolExecutor(args.jobs) as pool:
            list(pool.map(judge_one, mutants))
    if args.output:
        args.output.write_text(json.dumps([asdict(mutant) for mutant in mutants], indent=1), encoding='utf-8')
    print('\nSurvivors:', *(mutant for mutant in mutants if not mutant.caught), sep='\n')
    print(f'\ncaught {sum(bool(mutant.caught) for mutant in mutants)} of {len(mutants)}')


if __name__ == '__main__':
    main()

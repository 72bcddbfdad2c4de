"""Whole texts that tests compare with: `tests/snapshots` holds a file for each file of tests, to be read.

A test says ``snapshot(text)``, or ``with snapshot.raises(Kind)``. The text stands below a line with the name
of the test; the second text of one test has a 2 behind the name. ``pytest --rewrite-snapshots`` writes what
the tests say now. A text that no test of a file has said fails a run of that whole file.
"""

import contextlib
import re
from collections.abc import Container, Iterator
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent.parent / 'snapshots'
HEAD = '=== '


class Snapshots:
    """The texts of one file of tests."""

    def __init__(self, path: Path) -> None:
        self.path = path
        parts = re.split(f'(?m)^{HEAD}(.*)\n', path.read_text(encoding='utf-8') if path.exists() else '')
        self.known = {
            name: text.removesuffix('\n') for name, text in zip(parts[1::2], parts[2::2], strict=True)
        }
        self.said: dict[str, str] = {}
        self.asked: list[str] = []  # the tests of the file that are there, in their order
        self.left_out = False  # some of them have not run

    def unused(self) -> list[str]:
        return [] if self.left_out else [name for name in self.known if name not in self.said]

    def rewrite(self) -> None:
        if self.left_out:
            texts = {**self.known, **self.said}
        else:
            place = {name: number for number, name in enumerate(self.asked)}
            texts = dict(sorted(self.said.items(), key=lambda item: place[_test_of(item[0], place)]))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(
            ''.join(f'{HEAD}{name}\n{text}\n' for name, text in texts.items()), encoding='utf-8'
        )


def _test_of(name: str, tests: Container[str]) -> str:
    return name if name in tests else name.rpartition(' ')[0]


_files: dict[Path, Snapshots] = {}


def _snapshots_of(item: pytest.Item) -> Snapshots:
    path = FOLDER / item.path.relative_to(FOLDER.parent).with_suffix('.txt')
    if path not in _files:
        _files[path] = Snapshots(path)
    return _files[path]


class Snapshot:
    """What `snapshot` gives a test: compares texts, one after the other, with those that are written down."""

    def __init__(self, item: pytest.Item) -> None:
        self._texts, self._name, self._count = _snapshots_of(item), item.name, 0
        self._rewrites = item.config.getoption('rewrite_snapshots')

    def __call__(self, value: object) -> None:
        text = str(value)
        name = self._name if self._count < 2 else f'{self._name} {self._count}'
        if self._count and text == self._texts.said[name]:
            return  # as the one before
        self._count += 1
        name = self._name if self._count < 2 else f'{self._name} {self._count}'
        self._texts.said[name] = text
        if not self._rewrites:
            assert name in self._texts.known, f'pytest --rewrite-snapshots writes this down:\n{text}'
            assert text == self._texts.known[name]

    @contextlib.contextmanager
    def raises(self, kind: type[Exception]) -> Iterator[None]:
        """For an error, whose whole message is compared."""
        with pytest.raises(kind) as caught:
            yield
        self(caught.value)


@pytest.fixture
def snapshot(request: pytest.FixtureRequest) -> Snapshot:
    return Snapshot(request.node)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption('--rewrite-snapshots', action='store_true', help='write the texts that tests say')


def pytest_itemcollected(item: pytest.Item) -> None:
    if 'snapshot' in getattr(item, 'fixturenames', ()):
        _snapshots_of(item).asked.append(item.name)
        if '::' in ' '.join(map(str, item.config.args)):
            _snapshots_of(item).left_out = True


def pytest_deselected(items: list[pytest.Item]) -> None:
    for item in items:
        if 'snapshot' in getattr(item, 'fixturenames', ()):
            _snapshots_of(item).left_out = True


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.outcome != 'passed':
        for texts in _files.values():
            texts.left_out = texts.left_out or report.nodeid.rpartition('::')[2] in texts.asked


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    for texts in _files.values():
        if session.config.getoption('rewrite_snapshots'):
            texts.rewrite()
        elif exitstatus == pytest.ExitCode.OK and (unused := texts.unused()):
            print(f'\n{texts.path}: no test says: {", ".join(unused)} (--rewrite-snapshots drops them)')
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

"""Snapshot texts: `tests/snapshots` has a file for each test file, with the messages and tables it compares.

A test calls ``snapshot(text)``, or ``with snapshot.raises(Kind)`` for the message of an error. The text is
stored below a line with the name of the test; the second text of a test has a 2 after the name. ``pytest
--rewrite-snapshots FILE`` rewrites the texts of the tests in a file.
"""

import contextlib
import difflib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent.parent / 'snapshots'
HEADING = '=== '


class SnapshotFile:
    """The stored texts of one test file, by the name of the test."""

    def __init__(self, path: Path) -> None:
        self.path = path
        parts = re.split(f'(?m)^{HEADING}(.*)\n', path.read_text(encoding='utf-8') if path.exists() else '')
        self.texts = {
            name: text.removesuffix('\n') for name, text in zip(parts[1::2], parts[2::2], strict=True)
        }
        self.new_texts: dict[str, str] = {}
        self.tests: list[str] = []  # collected, in the order of the file
        self.is_complete = True  # every test of the file was collected

    def stale_names(self) -> list[str]:
        """Returns the names of stored texts whose test no longer exists."""
        return [name for name in self.texts if owner_of(name) not in self.tests] if self.is_complete else []

    def rewrite(self) -> None:
        texts = {**self.texts, **self.new_texts}
        for name in self.stale_names():
            del texts[name]
        for test in {owner_of(name) for name in self.new_texts}:
            surplus = [name for name in texts if owner_of(name) == test and name not in self.new_texts]
            for name in surplus:
                del texts[name]
        names = list(texts)
        if self.is_complete:
            names.sort(key=lambda name: self.tests.index(owner_of(name)))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(''.join(f'{HEADING}{name}\n{texts[name]}\n' for name in names), encoding='utf-8')


def owner_of(name: str) -> str:
    """Returns the test that a heading belongs to, without the number of a later text."""
    return re.sub(r'(?<=[\w\]]) \d+$', '', name)


files: dict[Path, SnapshotFile] = {}


def snapshot_file(item: pytest.Item) -> SnapshotFile:
    path = FOLDER / item.path.relative_to(FOLDER.parent).with_suffix('.txt')
    if path not in files:
        files[path] = SnapshotFile(path)
    return files[path]


class Snapshot:
    """The fixture that compares the texts of a test, in the order of its calls, with the stored ones."""

    def __init__(self, item: pytest.Item) -> None:
        self._file, self._test, self._count = snapshot_file(item), item.name, 0
        self._rewrites = item.config.getoption('rewrite_snapshots')

    def __call__(self, value: object) -> None:
        __tracebackhide__ = True
        text = str(value)
        if self._count and text == self._file.new_texts[self._name(self._count)]:
            return  # repeated texts are stored once
        self._count += 1
        name = self._name(self._count)
        self._file.new_texts[name] = text
        if self._rewrites:
            return
        if name not in self._file.texts:
            pytest.fail(f'no text is stored yet; `pytest --rewrite-snapshots` would store:\n{text}')
        if text != self._file.texts[name]:
            pytest.fail(
                f'the text of {name} differs (- stored, + now):\n{diff(self._file.texts[name], text)}'
            )

    def check_all_were_compared(self) -> None:
        if not self._rewrites and (name := self._name(self._count + 1)) in self._file.texts:
            pytest.fail(
                f'the test compared {self._count} texts, but {self._file.path.name} also stores {name}'
            )

    def _name(self, number: int) -> str:
        return self._test if number < 2 else f'{self._test} {number}'

    @contextlib.contextmanager
    def raises(self, kind: type[Exception]) -> Iterator[None]:
        """Compares the entire message of an error."""
        with pytest.raises(kind) as caught:
            yield
        self(caught.value)


def diff(stored: str, current: str) -> str:
    lines = difflib.ndiff(stored.splitlines(), current.splitlines())
    return '\n'.join(line.rstrip('\n') for line in lines)


@pytest.fixture
def snapshot(request: pytest.FixtureRequest) -> Snapshot:
    return Snapshot(request.node)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    result = yield
    if isinstance(snapshot := getattr(item, 'funcargs', {}).get('snapshot'), Snapshot):
        snapshot.check_all_were_compared()
    return result


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption('--rewrite-snapshots', action='store_true', help='store the texts that tests compare')


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption('rewrite_snapshots') and hasattr(config, 'workerinput'):
        raise pytest.UsageError('--rewrite-snapshots needs one process: leave out --numprocesses')


def pytest_itemcollected(item: pytest.Item) -> None:
    if 'snapshot' in getattr(item, 'fixturenames', ()):
        texts = snapshot_file(item)
        texts.tests.append(item.name)
        if '::' in ' '.join(map(str, item.config.args)):
            texts.is_complete = False


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.getoption('rewrite_snapshots'):
        for texts in files.values():
            texts.rewrite()

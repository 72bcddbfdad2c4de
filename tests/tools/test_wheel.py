"""Builds the distributions and uses the wheel as a user does: installed, instead of from the repository."""

import importlib.metadata
import re
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from scripts import make_dist
from tests.support import ROOT

NEEDED_BY_EXTRAS = ['jax', 'orbax-checkpoint', 'safetensors']

PACKAGE_FILES = sorted(
    str(path.relative_to(ROOT).as_posix())
    for path in (ROOT / 'scalax').rglob('*')
    if path.suffix == '.py' or path.name == 'py.typed' or path.parent.name == 'assets'
)


@pytest.fixture(scope='module')
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with the sdist and the wheel that was built from it, checked by twine."""
    folder = tmp_path_factory.mktemp('dist')
    make_dist.build(folder)
    return folder


@pytest.mark.slow
def test_wheel_holds_the_package_and_nothing_else(distributions: Path) -> None:
    [wheel] = distributions.glob('*.whl')
    names = zipfile.ZipFile(wheel).namelist()
    assert sorted(name for name in names if '.dist-info/' not in name) == PACKAGE_FILES
    assert any(name.endswith('.dist-info/licenses/LICENSE') for name in names)
    assert 'scalax/py.typed' in names


@pytest.mark.medium
def test_wheel_metadata(distributions: Path) -> None:
    [wheel] = distributions.glob('*.whl')
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith('.dist-info/METADATA')]
        metadata = archive.read(name).decode().splitlines()
    expected = {'Name: scalax', 'License-Expression: Apache-2.0', 'Requires-Python: >=3.11'}
    assert expected <= set(metadata)
    needed = [line for line in metadata if line.startswith('Requires-Dist') and 'extra ==' not in line]
    assert sorted(needed) == [f'Requires-Dist: {requirement}' for requirement in ('jax>=0.10', 'numpy')]


def test_sdist_holds_the_package(distributions: Path) -> None:
    [sdist] = distributions.glob('*.tar.gz')
    with tarfile.open(sdist) as archive:
        names = {name.partition('/')[2] for name in archive.getnames()}
    assert {*PACKAGE_FILES, 'LICENSE', 'README.md', 'setup.py', 'pyproject.toml'} <= names


def test_extras_are_metadata(distributions: Path) -> None:
    [wheel] = distributions.glob('*.whl')
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith('.dist-info/METADATA')]
        metadata = archive.read(name).decode().splitlines()
    package_names = {
        importlib.metadata.distribution(name).metadata['Name'].lower() for name in NEEDED_BY_EXTRAS
    }
    for extra in make_dist.EXTRAS:
        assert f'Provides-Extra: {extra}' in metadata
        lines = [line for line in metadata if line.endswith(f'extra == "{extra}"')]
        needed = [re.match(r'Requires-Dist: ([\w-]+)', line) for line in lines]
        assert lines and {match[1].lower() for match in needed if match} <= package_names


@pytest.mark.slow  # `make dist` does it, too
def test_the_installed_wheel_is_used(distributions: Path, tmp_path: Path) -> None:
    [wheel] = distributions.glob('*.whl')
    make_dist.run(sys.executable, '-m', 'venv', '--without-pip', 'clean', cwd=tmp_path)
    clean = tmp_path / 'clean'
    pip = [sys.executable, '-m', 'pip', '--disable-pip-version-check', '--python', clean / 'bin' / 'python']
    make_dist.run(*pip, 'install', '--quiet', '--no-index', '--no-deps', wheel, cwd=tmp_path)

    # JAX and other packages come from this environment instead of a download.
    # Folders named in a .pth file come after the clean environment's own, and .pth files inside
    # them, such as that of an editable scalax, are not read.
    borrowed = {sysconfig.get_path('purelib'), sysconfig.get_path('platlib')}
    [site_packages] = clean.glob('lib/python3*/site-packages')
    (site_packages / 'borrowed.pth').write_text('\n'.join(sorted(borrowed)) + '\n')

    imported, readme, version, doctor = make_dist.smoke_test(clean, tmp_path)
    assert re.fullmatch(r'imported \d+ modules', imported)
    assert readme.startswith('README: ')
    assert version.startswith('scalax ') and ', JAX ' in version
    assert doctor


def test_the_first_blocks_of_a_page() -> None:
    page = 'a\n```python\nx = 1\n```\nb\n```python\nprint(x)\n```\n<!-- prints -->\n```text\n1\n```\n'
    assert make_dist.first_blocks(page) == ('x = 1\nprint(x)\n', '1\n')
    with pytest.raises(RuntimeError, match='no text'):
        make_dist.first_blocks('```python\nx = 1\n```\n')


def test_a_use_that_fails_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r'(?s)failed:.*ZeroDivisionError'):
        make_dist.run(sys.executable, '-c', '1 / 0', cwd=tmp_path)

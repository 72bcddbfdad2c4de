"""Builds the distributions and uses the wheel the way a user gets it: installed, not from here."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.support import ROOT

PACKAGE_FILES = sorted(
    str(path.relative_to(ROOT).as_posix())
    for path in (ROOT / 'scalax').rglob('*')
    if path.suffix == '.py' or path.name == 'py.typed' or path.parent.name == 'assets'
)
BUILD_INPUTS = ['setup.py', 'pyproject.toml', 'MANIFEST.in', 'LICENSE', 'README.md', 'CHANGELOG.md']

# Run by the clean environment's interpreter.
IMPORT_EVERYTHING = """
import importlib, importlib.metadata, pkgutil, sys
import scalax

assert scalax.__file__.startswith(sys.prefix), f'imported from elsewhere: {scalax.__file__}'
assert importlib.metadata.version('scalax') == scalax.__version__
names = [module.name for module in pkgutil.walk_packages(scalax.__path__, 'scalax.')]
for name in names:
    if not name.endswith('.__main__'):  # importing that one would run it
        importlib.import_module(name)
print('imported', len(names))
"""


def run(*command: str | Path, cwd: Path) -> str:
    """Runs a command without what the environment of this test run would lend it."""
    lent = ('PYTHONPATH', 'PYTHONHOME', 'PYTHONWARNINGS')
    env = {key: value for key, value in os.environ.items() if key not in lent}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, f'{command} failed:\n{done.stdout}\n{done.stderr}'
    return done.stdout


@pytest.fixture(scope='module')
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that was built from it."""
    source = tmp_path_factory.mktemp('source')
    for name in BUILD_INPUTS:
        shutil.copy(ROOT / name, source)
    no_caches = shutil.ignore_patterns('__pycache__')
    shutil.copytree(ROOT / 'scalax', source / 'scalax', ignore=no_caches)
    run(sys.executable, '-m', 'build', '--no-isolation', '--outdir', source / 'dist', cwd=source)
    return source / 'dist'


def test_wheel_holds_the_package_and_nothing_else(distributions: Path) -> None:
    [wheel] = distributions.glob('*.whl')
    names = zipfile.ZipFile(wheel).namelist()
    assert sorted(name for name in names if '.dist-info/' not in name) == PACKAGE_FILES
    assert any(name.endswith('.dist-info/licenses/LICENSE') for name in names)
    assert 'scalax/py.typed' in names


def test_wheel_metadata(distributions: Path) -> None:
    [wheel] = distributions.glob('*.whl')
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith('.dist-info/METADATA')]
        metadata = archive.read(name).decode().splitlines()
    expected = {'Name: scalax', 'License-Expression: Apache-2.0', 'Requires-Python: >=3.11'}
    assert expected <= set(metadata)
    assert {'Requires-Dist: jax>=0.10', 'Requires-Dist: numpy'} == {
        line for line in metadata if line.startswith('Requires-Dist') and 'extra ==' not in line
    }


def test_sdist_holds_the_package(distributions: Path) -> None:
    [sdist] = distributions.glob('*.tar.gz')
    with tarfile.open(sdist) as archive:
        names = {name.partition('/')[2] for name in archive.getnames()}
    assert {*PACKAGE_FILES, 'LICENSE', 'README.md', 'setup.py', 'pyproject.toml'} <= names


def test_every_module_imports_from_the_installed_wheel(distributions: Path, tmp_path: Path) -> None:
    [wheel] = distributions.glob('*.whl')
    run(sys.executable, '-m', 'venv', '--without-pip', 'clean', cwd=tmp_path)
    clean = tmp_path / 'clean'
    python = clean / 'bin' / 'python'
    pip = [sys.executable, '-m', 'pip', '--disable-pip-version-check', '--python', python]
    run(*pip, 'install', '--quiet', '--no-index', '--no-deps', wheel, cwd=tmp_path)

    # JAX and the others are borrowed from this environment instead of being downloaded again.
    # Folders named in a .pth file come after the clean environment's own, and .pth files inside
    # them, such as that of an editable scalax, are not read.
    borrowed = {sysconfig.get_path('purelib'), sysconfig.get_path('platlib')}
    [site_packages] = clean.glob('lib/python3*/site-packages')
    (site_packages / 'borrowed.pth').write_text('\n'.join(sorted(borrowed)) + '\n')

    # -I: the current folder is not on the path.
    output = run(python, '-I', '-W', 'error', '-c', IMPORT_EVERYTHING, cwd=tmp_path)
    assert output.startswith('imported ')

    version = run(clean / 'bin' / 'scalax', '--version', cwd=tmp_path)
    assert version.startswith('scalax ') and ', JAX ' in version

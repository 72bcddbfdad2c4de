"""Builds the source distribution and the wheel, and uses them as a user does.

Usage: ``make dist``. They are built in dist/ and checked with twine. The wheel is installed in a clean
environment with packages from the index, and used: the first blocks of the README, ``scalax --version`` and
``scalax doctor``. Each extra is resolved, but not installed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
INPUTS = ['setup.py', 'pyproject.toml', 'MANIFEST.in', 'LICENSE', 'README.md', 'CHANGELOG.md']
EXTRAS = ['plan', 'checkpoint', 'all']
TIMEOUT_S = 1000

# The clean environment's interpreter runs this.
IMPORT_EVERYTHING = """
import importlib, importlib.metadata, pkgutil, sys
import scalax

assert scalax.__file__.startswith(sys.prefix), f'imported from elsewhere: {scalax.__file__}'
assert importlib.metadata.version('scalax') == scalax.__version__
names = [module.name for module in pkgutil.walk_packages(scalax.__path__, 'scalax.')]
lacking = []
for name in names:
    if name.endswith('.__main__'):  # importing that one would run it
        continue
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name.startswith('scalax'):
            raise
        lacking.append(f', {name} without {error.name}')
print(f'imported {len(names)} modules{"".join(lacking)}')
"""


def run(*command: str | Path, cwd: Path) -> str:
    """Runs a command without this process's Python settings; returns its output.

    Raises:
        RuntimeError: the command failed.
    """
    lent = ('PYTHONPATH', 'PYTHONHOME', 'PYTHONWARNINGS', 'XLA_FLAGS', 'JAX_NUM_CPU_DEVICES')
    env = {key: value for key, value in os.environ.items() if key not in lent}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode:
        raise RuntimeError(f'{" ".join(map(str, command))} failed:\n{done.stdout}\n{done.stderr}')
    return done.stdout


def build(folder: Path) -> Path:
    """Builds both, the wheel from the source distribution, and checks them with twine; returns the wheel."""
    with tempfile.TemporaryDirectory() as name:  # setuptools writes files next to the sources
        source = Path(name)
        for file in INPUTS:
            shutil.copy(ROOT / file, source)
        shutil.copytree(ROOT / 'scalax', source / 'scalax', ignore=shutil.ignore_patterns('__pycache__'))
        run(sys.executable, '-m', 'build', '--no-isolation', '--outdir', folder, cwd=source)
    archives = sorted(folder.iterdir())
    run(sys.executable, '-m', 'twine', 'check', '--strict', *archives, cwd=folder)
    [wheel] = folder.glob('*.whl')
    return wheel


def smoke_test(environment: Path, folder: Path) -> list[str]:
    """Uses the scalax that is installed in an environment; returns a line about each use.

    Args:
        environment: the environment.
        folder: where to run, outside of this repository.
    """
    python, script = environment / 'bin' / 'python', environment / 'bin' / 'scalax'
    # -I: the current folder is not on the path.
    outputs = [run(python, '-I', '-W', 'error', '-c', IMPORT_EVERYTHING, cwd=folder)]
    code, printed = first_blocks((ROOT / 'README.md').read_text(encoding='utf-8'))
    got = run(python, '-I', '-c', code, cwd=folder)
    if got != printed:
        raise RuntimeError(f'the first blocks of the README print\n{got}\nand not\n{printed}')
    outputs += [f'README: {len(code.splitlines())} lines run', run(script, '--version', cwd=folder)]
    return [line.strip() for line in [*outputs, run(script, 'doctor', cwd=folder).splitlines()[0]]]


def first_blocks(page: str) -> tuple[str, str]:
    """Returns the Python blocks of a page up to the first printed text, and that text."""
    code = ''
    for language, text in re.findall(r'^```(python|text)\n(.*?)^```$', page, re.MULTILINE | re.DOTALL):
        if language == 'text':
            return code, text
        code += text
    raise RuntimeError('the page has no text that its blocks print')


def main() -> int:
    folder = ROOT / 'dist'
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    wheel = build(folder)
    print(*(f'{file.name}: {file.stat().st_size:,} bytes' for file in sorted(folder.iterdir())), sep='\n')
    with tempfile.TemporaryDirectory() as name:
        clean = Path(name)
        run(sys.executable, '-m', 'venv', clean / 'venv', cwd=clean)
        pip = [
            clean / 'venv' / 'bin' / 'python',
            '-m',
            'pip',
            '--disable-pip-version-check',
            'install',
            '--quiet',
        ]
        for extra in EXTRAS:
            run(*pip, '--dry-run', f'{wheel}[{extra}]', cwd=clean)
            print(f'scalax[{extra}] can be installed')
        run(*pip, wheel, cwd=clean)
        print(*smoke_test(clean / 'venv', clean), sep='\n')
    return 0


if __name__ == '__main__':
    sys.exit(main())

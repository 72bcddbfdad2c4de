"""Compiles the programs of tests/support for absent TPUs and GPUs, and records them.

Usage: python -m scripts.record_programs [--dumps FOLDER] NAME ...
       python -m scripts.record_programs [--dumps FOLDER] --all
       python -m scripts.record_programs --check [NAME ...]

A recording is a file in tests/recorded, which tests/support/recorded.py reads: the partitioned program, the
optimized program, the compiler's memory tables and its statistics. The tests of plans read recordings, so
they need no compiler. Record again after a new release of JAX, or after a change of
tests/support/tpu_programs.py or gpu_programs.py, whose line numbers are in the programs.

--check compiles the programs again and counts the communication and FLOPs of their executables with a reader
that shares no code with scalax (tests/support/executable_reader.py). The counts must equal those of the
recordings and of quick plans.
--dumps keeps the compiler's dumps in a folder, and does not compile programs that are already there.

Needs the compilers: pip install "jax[tpu]" and "scalax[gpu-plan]". cuDNN attention also needs
nvidia-cudnn-cu12, with its library where the loader finds it; otherwise --check skips it. All default
compilations take about 1,100 CPU seconds and up to 3 GiB of memory.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ['JAX_PLATFORMS'] = 'cpu'

import jax

from benchmarks.published.decoder import has_cudnn
from scalax._core.mesh.gpu_topologies import installed_plugins
from scalax._planning.compiler.compilation import CUBLAS_OPTIONS
from scalax._planning.time.schedule import COST_MODEL_OPTION
from scalax.plan import make_plan
from tests.support import executable_reader, gpu_programs
from tests.support.executable_reader import Counts
from tests.support.recorded import TABLES, Recorded, recorded, write
from tests.support.tpu_programs import PROGRAMS as TPU_PROGRAMS

PROGRAMS = TPU_PROGRAMS | gpu_programs.PROGRAMS
DUMP = {'xla_dump_hlo_as_text': True, 'xla_dump_hlo_pass_re': '.*spmd-partitioning'}


def main() -> int:
    arguments = _arguments()
    wrong = []
    with tempfile.TemporaryDirectory() as temporary:
        for name in arguments.names or list(PROGRAMS):
            if arguments.check and name in gpu_programs.OF_CUDNN and not has_cudnn():
                print(f'{name}: not checked, because cuDNN is not here', flush=True)
                continue
            folder = Path(arguments.dumps or temporary) / name.replace(' ', '_') / 'full'
            if arguments.check:
                message = compared(name, folder)
                wrong += [name] if message else []
                print(f'{name}: {message or "as recorded"}', flush=True)
            else:
                print(f'{name}: {write(fully(name, folder)):,} bytes', flush=True)
    if wrong:
        print(f'not as recorded: {", ".join(wrong)}', file=sys.stderr)
    return int(bool(wrong))


def compile_fully(name: str, folder: Path) -> None:
    """Compiles a program as a user does, and writes the executable and the dumps to *folder*."""
    if (folder / 'memory.json').exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    lowered = _lowered(name)
    before = time.process_time()
    options = {'xla_dump_to': str(folder), **DUMP}
    if name in gpu_programs.PROGRAMS:
        options |= CUBLAS_OPTIONS
        if PROGRAMS[name].topology.partition(':')[0] not in gpu_programs.NOT_MODELLED:
            options[COST_MODEL_OPTION] = True
    executable = lowered.compile(compiler_options=options)
    stats = executable.memory_analysis()
    figures = {field: getattr(stats, field) for field in dir(stats) if field.endswith('bytes')}
    (folder / 'executable.txt').write_text(executable.as_text(), encoding='utf-8')
    content = {**figures, 'seconds': time.process_time() - before}
    (folder / 'memory.json').write_text(json.dumps(content), encoding='utf-8')


def fully(name: str, folder: Path) -> Recorded:
    """Returns the executable of the default compilation."""
    compile_fully(name, folder)
    memory = json.loads((folder / 'memory.json').read_text(encoding='utf-8'))
    executable, optimized = _dump(folder, 'executable'), _dump(folder, 'after_optimizations')
    report, assignment, live = (_dump(folder, table) for table in TABLES)
    return Recorded(
        **_program(name),
        partitioned=_dump(folder, 'after_*spmd-partitioning*'),
        optimized=optimized,
        tables=(report, assignment, live),
        memory={key: size for key, size in memory.items() if key.endswith('bytes')},
        executable=optimized if _counts(name, executable) == _counts(name, optimized) else executable,
        seconds=round(memory['seconds'], 1),
    )


def compared(name: str, folder: Path) -> str:
    """Returns the differences between an executable and the recording; empty if there are none."""
    compile_fully(name, folder)
    then = recorded(name)
    here, before = _counts(name, _dump(folder, 'executable')), _counts(name, then.executable)
    if here != before:
        return f'{here}, but recorded with {then.versions} is {before}'
    helper = PROGRAMS[name].helper()
    fun, arguments = PROGRAMS[name].make(helper)
    planned: dict[Any, tuple[int, int]] = {}
    for row in make_plan(helper, fun, arguments, {}, quick=True).collectives:
        count, size = planned.get((row.kind, row.axes), (0, 0))
        planned[row.kind, row.axes] = count + row.count, size + row.count * row.bytes
    return '' if planned == here.collectives else f'a quick plan has {planned}, and runs {here.collectives}'


def _counts(name: str, text: str) -> Counts:
    return executable_reader.read(text, PROGRAMS[name].mesh, PROGRAMS[name].slices)


def _lowered(name: str) -> Any:
    fun, arguments = PROGRAMS[name].make(PROGRAMS[name].helper())
    return fun.lower(*arguments)


def _program(name: str) -> dict[str, Any]:
    program = PROGRAMS[name]
    compiler = next(iter(installed_plugins())) if name in gpu_programs.PROGRAMS else 'libtpu'
    return {
        'name': name,
        'topology': program.topology,
        'mesh': program.mesh,
        'slices': program.slices,
        'versions': {package: importlib.metadata.version(package) for package in ('jax', compiler)},
    }


def _dump(folder: Path, name: str) -> str:
    *_, file = sorted(folder.glob(f'*{name}.txt'))  # a pass dumps its output after its input
    return file.read_text(encoding='utf-8')


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or '').partition('\n')[0])
    parser.add_argument('names', nargs='*', metavar='NAME', help='programs')
    parser.add_argument('--all', action='store_true', help='record all programs')
    parser.add_argument('--check', action='store_true', help='compare with the recordings')
    parser.add_argument('--dumps', metavar='FOLDER', help='keep what the compiler writes')
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(PROGRAMS):
        parser.error(f'no such program: {", ".join(sorted(unknown))}; there are {", ".join(PROGRAMS)}')
    if not (arguments.names or arguments.all or arguments.check):
        parser.error(f'say which recordings to replace, or --all; there are {", ".join(PROGRAMS)}')
    return arguments


if __name__ == '__main__':
    jax.config.update('jax_platforms', 'cpu')
    sys.exit(main())

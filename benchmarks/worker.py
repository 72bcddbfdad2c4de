"""Measures one library: run by path in a separate process; prints rows as JSON.

``python benchmarks/worker.py checkout|installed DEVICES ROUNDS ONLY``: *checkout* is the scalax of this
repository, *installed* the scalax of the interpreter's environment.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    library, devices, rounds, only = sys.argv[1:]
    del sys.path[0]  # the folder of this file, whose modules are imported as `benchmarks`
    if library == 'checkout':
        sys.path.insert(0, str(ROOT))
    else:
        sys.path.append(str(ROOT))  # after the environment's packages

    import jax

    jax.config.update('jax_platforms', 'cpu')
    jax.config.update('jax_num_cpu_devices', int(devices))

    import scalax
    from benchmarks.groups import run, shared_groups

    if Path(str(scalax.__file__)).is_relative_to(ROOT / 'scalax') != (library == 'checkout'):
        sys.exit(
            f'{sys.executable} finds scalax in {scalax.__file__}, which is not the one that is {library}'
        )
    rows = run(shared_groups(int(rounds)), only)
    version = getattr(scalax, '__version__', None) or importlib.metadata.version('scalax')
    measured = {
        'scalax': version,
        'jax': jax.__version__,
        'python': sys.version.split()[0],
        'rows': [dataclasses.asdict(row) for row in rows],
    }
    print(json.dumps(measured))


if __name__ == '__main__':
    main()

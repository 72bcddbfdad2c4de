"""Tests of the undocumented behavior of Orbax that `scalax.checkpoint` relies on."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from scalax._jax import orbax as known_of_orbax
from scalax.checkpoint._saved_step import complete_steps
from tests.support.contracts import contract


def test_the_barrier_of_saves() -> None:
    with contract('has a barrier of processes', 'before a step is committed', library='orbax-checkpoint'):
        known_of_orbax.wait_for_processes('scalax', None, 60)


def test_orbax_skips_unfinished_folders(tmp_path: Path) -> None:
    for name in (
        '1',
        f'2{known_of_orbax.unfinished_mark()}',
        f'3{known_of_orbax.unfinished_mark()}-of-somebody',
    ):
        (tmp_path / name).mkdir()
    with ocp.CheckpointManager(tmp_path) as manager:
        assert [*manager.all_steps()] == complete_steps(epath.Path(tmp_path)) == [1], (
            'Orbax takes folders for steps whose names hold the mark of its own unfinished ones'
        )


def test_where_steps_are_committed_by_a_file() -> None:
    kinds = ocp.path.atomicity
    for path in ('gs://bucket/run', '/run', 's3://bucket/run', 'relative'):
        kind = ocp.path.atomicity_defaults.get_default_temporary_path_class(epath.Path(path))
        expected = kinds.AtomicRenameTemporaryPath
        if not known_of_orbax.commits_by_rename(epath.Path(path)):
            expected = kinds.CommitFileTemporaryPath
        assert kind is expected, f'Orbax commits steps below {path} in another way: {kind.__name__}'
    assert kinds.COMMIT_SUCCESS_FILE == known_of_orbax.COMMITTED, 'Orbax marks complete steps by another file'


def test_a_folder_with_its_final_name_is_complete(tmp_path: Path) -> None:
    assert known_of_orbax.is_complete(epath.Path(tmp_path)), 'a step is complete when it has its name'


def test_the_folders_that_orbax_makes(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 2**32, (64, 64), np.uint32)  # does not compress
    root = tmp_path / 'tree'
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(root, {'w': jnp.asarray(noise)})
    largest = max(root.rglob('d/*'), key=lambda path: path.stat().st_size)
    assert root / known_of_orbax.folder_of_process(0) in largest.parents, (
        f'Orbax writes the arrays of process 0 elsewhere: in {largest.relative_to(root)}'
    )
    assert known_of_orbax.awaited_folder(root).is_dir(), (
        'Orbax makes no such folder any more: its processes may wait for another one'
    )

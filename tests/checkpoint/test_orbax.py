"""Failures of Orbax that scalax prevents.

If a test fails, Orbax has fixed the failure, and the file of scalax that prevents it can be removed.
"""

import asyncio
import os
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath


def state(value: float = 1) -> dict[str, jax.Array]:
    return {'w': jnp.full((64, 64), value), 'b': jnp.full(8, value)}


def saved(path: Path, tree: Any = None) -> Path:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, state() if tree is None else tree)
    return path


def largest_file(root: Path) -> Path:
    """Returns the largest file of array data."""
    return max(root.rglob('d/*'), key=lambda path: path.stat().st_size)


def test_orbax_replaces_the_step_of_another_writer(tmp_path: Path) -> None:
    with ocp.CheckpointManager(tmp_path) as first, ocp.CheckpointManager(tmp_path) as second:
        for value, manager in enumerate((first, second)):
            assert manager.save(1, args=ocp.args.StandardSave(state(value)))
            manager.wait_until_finished()
        assert first.restore(1)['w'][0, 0] == 1


def test_orbax_commits_half_written_steps_of_another_writer(tmp_path: Path) -> None:
    written, released = threading.Event(), threading.Event()

    def wait() -> None:
        written.set()
        assert released.wait(200)

    options = ocp.CheckpointManagerOptions(
        async_options=ocp.options.AsyncOptions(post_finalization_callback=wait)
    )
    manager = ocp.CheckpointManager(tmp_path, options=options)
    assert manager.save(1, args=ocp.args.StandardSave(state()))
    assert written.wait(200)
    # The start of the other save: it deletes the folder, and makes a new one with the same name.
    another = ocp.path.atomicity.AtomicRenameTemporaryPath.from_final(epath.Path(tmp_path / '1'))
    asyncio.run(another.create())
    released.set()
    manager.close()
    with ocp.CheckpointManager(tmp_path) as reader:
        assert reader.latest_step() == 1
    assert not [*(tmp_path / '1').glob('default')]


def test_orbax_continues_from_a_step_with_a_missing_file(tmp_path: Path) -> None:
    with ocp.CheckpointManager(tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, args=ocp.args.StandardSave({'w': jnp.ones(8)}))
    largest_file(tmp_path / '2').unlink()
    with ocp.CheckpointManager(tmp_path) as manager:
        assert manager.latest_step() == 2
        with pytest.raises(ValueError, match='Error opening'):
            manager.restore(2)


def test_orbax_restores_changed_bytes(tmp_path: Path) -> None:
    tree = {'w': jnp.asarray(np.random.default_rng(0).integers(0, 2**32, (64, 64), np.uint32))}
    root = saved(tmp_path / 'tree', tree)
    largest = largest_file(root)
    damaged = bytearray(largest.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    largest.write_bytes(damaged)
    assert not np.array_equal(ocp.StandardCheckpointer().restore(root)['w'], tree['w'])


def test_orbax_does_not_sync_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorStore syncs the files of arrays, but their names and the JSON files may be lost."""
    synced: list[int] = []
    monkeypatch.setattr(os, 'fsync', synced.append)
    saved(tmp_path / 'tree')
    assert synced == []


def test_orbax_ignores_the_requested_key_implementation(tmp_path: Path) -> None:
    root = saved(tmp_path / 'tree', {'key': jax.random.key(0)})
    structs = {'key': jax.eval_shape(lambda: jax.random.key(0, impl='rbg'))}
    assert ocp.StandardCheckpointer().restore(root, structs)['key'].dtype == jax.random.key(0).dtype


def test_orbax_saves_only_one_of_two_leaves_with_the_same_name(tmp_path: Path) -> None:
    root = saved(tmp_path / 'tree', {'a': {'b': jnp.zeros(2)}, 'a.b': jnp.ones(2)})
    restored = ocp.StandardCheckpointer().restore(root)
    assert restored['a']['b'].tolist() == restored['a.b'].tolist()


def test_orbax_does_not_restore_nodes_with_indices_and_names(tmp_path: Path) -> None:
    class Node(list[Any]):
        pass

    keys = (jax.tree_util.SequenceKey(0), jax.tree_util.GetAttrKey('name'))
    jax.tree_util.register_pytree_with_keys(
        Node, lambda node: (zip(keys, node, strict=True), None), lambda _, children: Node(children)
    )
    root = saved(tmp_path / 'tree', {'node': Node([jnp.ones(2), jnp.ones(2)])})
    with pytest.raises(TypeError, match='not supported between instances'):
        ocp.StandardCheckpointer().restore(root)

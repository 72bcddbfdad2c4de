"""Checkpoints: invalid arguments are errors before anything is written or read."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from scalax.checkpoint import Checkpointer, load_safetensors
from scalax.checkpoint._target import require_distinct
from scalax.errors import ArgumentError, CheckpointError
from scalax.sharding import MeshShardingHelper
from scalax.sharding import PartitionSpec as P
from tests.support.snapshots import Snapshot

HELPER = MeshShardingHelper([4, 2], ['fsdp', 'tp'])
STATE = {'params': {'w': np.ones(8, np.float32), 'b': np.ones(4, np.float32)}, 'count': np.int32(1)}


@pytest.fixture(scope='module')
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp('saved')
    with Checkpointer(folder) as checkpointer:
        checkpointer.save(3, STATE)
    return folder


def message(function: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(ArgumentError) as caught:
        function(*args, **kwargs)
    return str(caught.value)


@pytest.mark.parametrize(
    'options', [{'keep': 0}, {'keep': True}, {'save_every': 0}, {'save_every': 2.0}, {'timeout': -1}]
)
def test_options(tmp_path: Path, options: dict[str, Any]) -> None:
    [(name, value)] = options.items()
    with pytest.raises(ArgumentError) as caught:
        Checkpointer(tmp_path, **options)
    assert str(caught.value) == f'Checkpointer: {name} has to be a positive integer, got {value!r}'


@pytest.mark.parametrize('directory', ['', 3, None, b'run'], ids=repr)
def test_invalid_directories(directory: Any) -> None:
    assert message(Checkpointer, directory) == f'Checkpointer: directory has to be a path, got {directory!r}'


@pytest.mark.parametrize('data', [3, [1], 'position'], ids=repr)
def test_data_iterators_without_set_state(saved: Path, data: Any) -> None:
    assert message(Checkpointer(saved).restore, HELPER, P(), STATE, data=data) == (
        f'restore: data has to be an iterator with set_state(), got {data!r}. To read a data state that '
        'was saved as bytes or as a value, use Checkpointer.data()'
    )


@pytest.mark.parametrize('step', [7.0, 6.5, -1, True, '7', np.float32(7), None], ids=repr)
def test_invalid_steps(saved: Path, step: Any) -> None:
    with Checkpointer(saved) as checkpointer:
        expected = f'step has to be an integer of at least 0, got {step!r}'
        assert message(checkpointer.save, step, STATE) == expected
        if step is not None:  # for reads: the latest step
            assert message(checkpointer.restore, HELPER, P(), STATE, step=step) == expected
            assert message(checkpointer.describe, step) == expected
            assert message(checkpointer.data, step) == expected
    assert sorted(path.name for path in saved.iterdir()) == ['3', 'writer.json']


@pytest.mark.parametrize('step', [np.int64(12), jnp.int32(12)], ids=['numpy', 'jax'])
def test_steps_of_numpy_and_jax(tmp_path: Path, step: Any) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.save(step, STATE)
        assert not checkpointer.save(12, STATE)  # the same
        checkpointer.wait()
        assert checkpointer.restore(HELPER, P(), STATE, step=step)['count'] == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ['12', 'writer.json']


@pytest.mark.parametrize(
    'options, expected',
    [
        ({'only': '('}, "only: invalid regex '(': missing ), unterminated subpattern (position 0)"),
        ({'only': ['params']}, "only: the regex is a string, got ['params']"),
        (
            {'rename': [('[', 'x')]},
            "rename: invalid regex '[': unterminated character set (position 0)",
        ),
        (
            {'rename': ('^a/', 'b/')},
            "rename: expected a list of pairs (regex, replacement), got '^a/' in it",
        ),
        (
            {'rename': [('a', 3)]},
            "rename: expected a list of pairs (regex, replacement), got ('a', 3) in it",
        ),
        ({'rename': 3}, 'rename: expected a list of pairs (regex, replacement), got 3'),
        (
            {'rename': {'a': 'b'}},
            "rename: expected a list of pairs (regex, replacement), got {'a': 'b'}",
        ),
    ],
)
def test_regexes(saved: Path, options: dict[str, Any], expected: str) -> None:
    assert message(Checkpointer(saved).restore, HELPER, P(), STATE, **options) == expected


def test_only_that_matches_no_leaf(saved: Path, snapshot: Snapshot) -> None:
    checkpointer = Checkpointer(saved)
    with snapshot.raises(CheckpointError):
        checkpointer.restore(HELPER, P(), STATE, only='^parms/')
    assert checkpointer.restored_step is None
    assert checkpointer.restore(HELPER, P(), {}, only='^params/') == {}


@pytest.mark.parametrize(
    'mapping, expected',
    [
        ([('(', 'x')], "mapping: invalid regex '(': missing ), unterminated subpattern (position 0)"),
        ([('a', 'x', (0,), 1)], 'mapping: expected a list of pairs (regex, replacement), got '),
        (3, 'mapping: expected a list of pairs (regex, replacement), got 3'),
    ],
)
def test_mappings_of_safetensors(tmp_path: Path, mapping: Any, expected: str) -> None:
    file = tmp_path / 'model.safetensors'
    save_file({'w': np.ones(8, np.float32)}, file)
    assert message(load_safetensors, HELPER, file, P(), mapping).startswith(expected)


@pytest.mark.parametrize(
    'destination',
    [3, ('x',), ('x', 3), ('x', ('a',)), ('x', '01'), ('x', (1.0,)), ('x', (False,)), ('x', None), (3, (0,))],
    ids=repr,
)
@pytest.mark.parametrize('kind', ['dict', 'function'])
def test_invalid_destinations(tmp_path: Path, destination: Any, kind: str) -> None:
    file = tmp_path / 'model.safetensors'
    tree = {'w': np.ones(8, np.float32), 'b': np.ones(8, np.float32)}
    save_file(tree, file)
    destinations = {'w': destination, 'b': 'b'}
    mapping = destinations if kind == 'dict' else destinations.get
    expected = (
        f'mapping: these destinations are not paths:\n  w: {destination!r}\n'
        "What to do: give a path ('norm/scale'), a path and axes for a transpose ('norm/scale', (1, 0)), or "
        'None to leave the leaf out.'
    )
    assert message(load_safetensors, HELPER, file, P(), mapping) == expected
    assert message(HELPER.reshard, HELPER.shard(tree, P()), P(), mapping=mapping) == expected


def test_invalid_axes(tmp_path: Path) -> None:
    tree = HELPER.shard({'p': np.ones(8, np.float32), 'b': np.ones(8, np.float32)}, P())
    error = message(HELPER.reshard, tree, P(), mapping=[('p', 'q', 3), ('b', 'b')])
    assert error.startswith("mapping: these destinations are not paths:\n  p: ('q', 3)\n")


@pytest.mark.parametrize(
    'replacement, problem',
    [
        (
            r'\2',
            r"the replacement '\\2' does not fit the regex '(w)': invalid group reference 2 at position 1",
        ),
        (r'\g<name>', r"the replacement '\\g<name>' does not fit the regex '(w)': unknown group name 'name'"),
        (lambda match: 3, "the replacement for '(w)' has to return a string, and returned 3"),
    ],
    ids=['number', 'name', 'function'],
)
def test_invalid_replacements(saved: Path, tmp_path: Path, replacement: Any, problem: str) -> None:
    file = tmp_path / 'model.safetensors'
    save_file({'w': np.ones(8, np.float32)}, file)
    pairs = [('(w)', replacement)]
    assert message(load_safetensors, HELPER, file, P(), pairs) == f'mapping: {problem}'
    assert message(Checkpointer(saved).restore, HELPER, P(), STATE, rename=pairs) == f'rename: {problem}'


@pytest.mark.parametrize('files', [3, None, b'x'], ids=repr)
def test_invalid_files_of_safetensors(files: Any) -> None:
    assert message(load_safetensors, HELPER, files, P()) == (
        f'load_safetensors: files has to be a path or a list of paths, got {files!r}'
    )
    assert message(load_safetensors, HELPER, ['a', files], P()) == (
        f'load_safetensors: files has to be a list of paths, and {files!r} in it is not a path'
    )


# --- Leaves with dtypes that JAX changes ----------------------------------------------------------


def test_64_bit_arrays_are_saved_in_the_dtype_of_jax(tmp_path: Path) -> None:
    """They are restored as saved, without cast=True."""

    def init() -> Any:
        return {
            'mean': np.float64(0.1),
            'steps': np.arange(-4, 4),
            'wide': np.array([2**31, 2**32 - 1], np.uint64),
            'inf': np.array([np.inf, np.nan, 1e-300]),
            'complex': np.complex128(1j),
        }

    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, init())
        checkpointer.wait()
        rows = checkpointer.describe()
        assert [rows[name].dtype for name in ('mean', 'steps', 'wide')] == ['float32', 'int32', 'uint32']
        for like in (init, init()):
            restored = checkpointer.restore(HELPER, P(), like)
            for name, leaf in restored.items():
                expected = HELPER.shard(init()[name], P())
                assert leaf.dtype == expected.dtype
                np.testing.assert_array_equal(leaf, expected)
        with jax.enable_x64(True):
            checkpointer.save(2, init())
            checkpointer.wait()
            assert checkpointer.restore(HELPER, P(), init)['mean'] == np.float64(0.1)


@pytest.mark.slow
def test_narrow_dtypes(tmp_path: Path) -> None:
    names = ('bool', 'bfloat16', 'float8_e4m3fn', 'float8_e8m0fnu', 'float4_e2m1fn', 'int4', 'int2')
    arrays = {name: np.ones((8, 3), name) for name in names}
    state = {'numpy': arrays, 'placed': HELPER.shard(arrays, P('fsdp'))}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state)
        checkpointer.wait()
        restored = checkpointer.restore(HELPER, P('fsdp'), state)
    for leaves in restored.values():
        for name, array in leaves.items():
            assert array.dtype == name
            np.testing.assert_array_equal(np.asarray(array), arrays[name])


def test_dtypes_unsupported_by_orbax(tmp_path: Path) -> None:
    arrays = {name: np.ones(8, name) for name in ('uint2', 'uint4')}
    state = {'numpy': arrays, 'placed': HELPER.shard(arrays, P('fsdp'))}
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(CheckpointError) as caught:
        checkpointer.save(1, state)
    why = 'Orbax does not write this dtype; cast it to a wider one'
    assert str(caught.value) == (
        'some leaves of the state cannot be saved:\n'
        f'  numpy/uint2: uint2[8]: {why}\n'
        f'  numpy/uint4: uint4[8]: {why}\n'
        f'  placed/uint2: uint2[8]: {why}\n'
        f'  placed/uint4: uint4[8]: {why}'
    )
    assert not list(tmp_path.iterdir())


def test_values_that_overflow_the_dtype_of_jax(tmp_path: Path) -> None:
    state = {
        'a': np.array([0, 2**31]),
        'b': np.float64(1e300),
        'c': np.ones(2, '>f4'),
        'd': np.longdouble(1),
        'e': 2**64,
    }
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(CheckpointError) as caught:
        checkpointer.save(1, state)
    do = 'set jax_enable_x64, or save a Python number'
    assert str(caught.value) == (
        'some leaves of the state cannot be saved:\n'
        f'  a: int64[2]: it holds values that do not fit in int32, to which JAX converts int64; {do}\n'
        f'  b: float64[]: it holds values that do not fit in float32, to which JAX converts float64; {do}\n'
        '  c: >f4[2]: JAX has no arrays of dtype >f4\n'
        f'  d: {np.dtype(np.longdouble)}[]: JAX has no arrays of dtype {np.dtype(np.longdouble)}\n'
        '  e: Python int: it has more than 64 bits'
    )
    assert not list(tmp_path.iterdir())


def test_repeated_paths_are_found_in_one_pass() -> None:
    passes = []

    class Paths(list[str]):
        def __iter__(self) -> Iterator[str]:
            passes.append(1)
            return super().__iter__()

    names = [f'layers/{i}' for i in range(100)]
    require_distinct(Paths(names), 'like')
    two = r"like has several leaves with the same path: 'layers/3', 'layers/50'\. "
    with pytest.raises(CheckpointError, match=two):
        require_distinct(Paths([*names, 'layers/50', 'layers/3']), 'like')
    assert len(passes) <= 4

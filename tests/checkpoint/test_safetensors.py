"""Loading of safetensors files: every shard is bit-identical."""

import json
import os
import re
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from scalax._core.util.strict_json import printable
from scalax.checkpoint import load_safetensors
from scalax.checkpoint._safetensors_header import DTYPES
from scalax.errors import ArgumentError, CheckpointError, ShardingError
from scalax.sharding import MeshShardingHelper, PolicyShardingRule
from scalax.sharding import PartitionSpec as P
from tests.support.snapshots import Snapshot

WIDE = ('int64', 'uint64', 'float64')


@pytest.fixture
def helper() -> MeshShardingHelper:
    return MeshShardingHelper([4, 2], ['fsdp', 'tp'])


def bits(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    dtype = np.dtype(dtype)
    data = np.random.default_rng(1).integers(
        0, 2 if dtype.kind == 'b' else 256, (*shape, dtype.itemsize), np.uint8
    )
    return data.view(dtype).reshape(shape)


def write(path: Path, tensors: dict[str, np.ndarray]) -> Path:
    save_file(tensors, path)
    return path


def test_every_dtype_is_bit_identical(tmp_path: Path, helper: MeshShardingHelper) -> None:
    names = {name: np.dtype(dtype) for name, dtype in DTYPES.items()}
    tensors = {f'a.{name}': bits((8, 4), dtype) for name, dtype in names.items() if dtype.name not in WIDE}
    assert len(tensors) == 16
    tree = load_safetensors(helper, write(tmp_path / 'x.safetensors', tensors), P('fsdp', 'tp'))
    for name, expected in tensors.items():
        array = tree['a'][name.removeprefix('a.')]
        assert (array.dtype, array.sharding.spec) == (expected.dtype, P('fsdp', 'tp'))
        assert np.asarray(array).tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    'spec', [P(), P('fsdp'), P('tp', 'fsdp'), P(None, None, ('fsdp', 'tp')), P(None, 'tp')], ids=str
)
def test_every_sharding(tmp_path: Path, helper: MeshShardingHelper, spec: P) -> None:
    x = bits((8, 4, 16), ml_dtypes.bfloat16)
    file = write(
        tmp_path / 'x.safetensors', {'x': x, 'scalar': bits((), 'int32'), 'none': bits((0, 3), 'int8')}
    )
    rule = PolicyShardingRule(lambda path, leaf: spec if path == 'x' else P())
    tree = load_safetensors(helper, file, rule)
    assert np.asarray(tree['x']).tobytes() == x.tobytes()
    assert tree['x'].sharding == helper.match_sharding_rule(spec, x)
    assert (tree['scalar'].shape, tree['none'].shape) == ((), (0, 3))
    assert np.asarray(tree['scalar']).tobytes() == bits((), 'int32').tobytes()


@pytest.mark.parametrize('axes', [(1, 0, 2), (2, 0, 1), (2, 1, 0)])
def test_transposed(tmp_path: Path, helper: MeshShardingHelper, axes: tuple[int, ...]) -> None:
    x = bits((8, 4, 16), 'int16')
    file = write(tmp_path / 'x.safetensors', {'x': x})
    tree = load_safetensors(helper, file, P('tp', 'fsdp'), {'x': ('layer/kernel', axes)})
    np.testing.assert_array_equal(tree['layer']['kernel'], x.transpose(axes))
    assert tree['layer']['kernel'].sharding.spec == P('tp', 'fsdp')


def sharded_files(folder: Path) -> dict[str, np.ndarray]:
    tensors = {f'model.layers.{i}.mlp.up_proj.weight': bits((8, 4), 'float16') for i in range(3)}
    tensors |= {'model.norm.weight': bits((8,), 'float32'), 'lm_head.weight': bits((4, 8), 'float32')}
    first = dict(list(tensors.items())[:2])
    second = {name: tensor for name, tensor in tensors.items() if name not in first}
    places = {}
    for number, part in enumerate((first, second), 1):
        file = f'model-0000{number}-of-00002.safetensors'
        write(folder / file, part)
        places |= dict.fromkeys(part, file)
    index = {'metadata': {'total_size': 0}, 'weight_map': places}
    (folder / 'model.safetensors.index.json').write_text(json.dumps(index))
    return tensors


PAIRS = [
    (r'^model\.layers\.(\d+)\.mlp\.up_proj\.weight$', r'layers/\1/up/kernel', (1, 0)),
    (r'^model\.norm\.weight$', 'norm/scale'),
    ('^lm_head', None),
]


@pytest.mark.parametrize('source', ['folder', 'index', 'list'])
def test_files_in_parts(tmp_path: Path, helper: MeshShardingHelper, source: str) -> None:
    tensors = sharded_files(tmp_path)
    files: Any = {
        'folder': tmp_path,
        'index': str(tmp_path / 'model.safetensors.index.json'),
        'list': sorted(tmp_path.glob('*.safetensors')),
    }[source]
    rule = PolicyShardingRule(lambda path, leaf: P('fsdp', 'tp') if len(leaf.shape) == 2 else P())
    tree = load_safetensors(helper, files, rule, PAIRS)
    assert sorted(tree) == ['layers', 'norm']
    assert sorted(tree['layers']) == ['0', '1', '2']
    for i in range(3):
        kernel = tree['layers'][str(i)]['up']['kernel']
        expected = tensors[f'model.layers.{i}.mlp.up_proj.weight'].T
        assert np.asarray(kernel).tobytes() == expected.tobytes()
    assert np.asarray(tree['norm']['scale']).tobytes() == tensors['model.norm.weight'].tobytes()


def test_names_by_a_function(tmp_path: Path, helper: MeshShardingHelper) -> None:
    file = write(tmp_path / 'x.safetensors', {'a.b': bits((2,), 'int8'), 'skip': bits((2,), 'int8')})
    tree = load_safetensors(helper, file, P(), lambda name: None if name == 'skip' else name.upper())
    assert list(tree) == ['A.B']


def test_function_without_some_names(tmp_path: Path, helper: MeshShardingHelper) -> None:
    file = write(tmp_path / 'x.safetensors', {'a': bits((2,), 'int8'), 'b': bits((2,), 'int8')})
    assert '\n  b: not in the mapping\n' in error_of(helper, file, P(), lambda name: {'a': 'x'}[name])


def test_error_in_a_function_of_names(tmp_path: Path, helper: MeshShardingHelper) -> None:
    file = write(tmp_path / 'x.safetensors', {'a': bits((2,), 'int8')})
    settings: dict[str, str] = {}
    with pytest.raises(KeyError, match='prefix'):
        load_safetensors(helper, file, P(), lambda name: settings['prefix'] + name)


def error_of(helper: MeshShardingHelper, *args: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_safetensors(helper, *args)
    return str(caught.value)


def test_errors_about_names(tmp_path: Path, helper: MeshShardingHelper) -> None:
    names = ('a.b', 'a.c', 'd', 'd.e')
    file = write(tmp_path / 'x.safetensors', {name: bits((2,), 'int8') for name in names})
    do = '\nWhat to do: give every tensor its own path, or None to leave it out.'
    head = 'the mapping does not fit the tensors of the files:\n'
    overlaps = 'which overlaps the path of another tensor'
    assert error_of(helper, file, P()) == f'{head}  d.e: goes to d/e, {overlaps}{do}'
    mapping: Any = {'a.b': 'x', 'd': 'x', 'd.e': None}
    assert error_of(helper, file, P(), mapping) == (
        f'{head}  a.c: not in the mapping\n  d: goes to x, {overlaps}{do}'
    )
    mapping = [('^a.', 'z/')]
    assert error_of(helper, file, P(), mapping) == (
        f'{head}  d: not in the mapping\n  d.e: not in the mapping{do}'
    )
    mapping = {'a.b': 'x/y', 'a.c': 'x', 'd': None, 'd.e': None}
    assert error_of(helper, file, P(), mapping) == f'{head}  a.c: goes to x, {overlaps}{do}'
    mapping = [('a.b', 'x', (1, 0)), ('', None)]
    assert error_of(helper, file, P(), mapping) == (f'{head}  a.b: int8[2] does not have the axes (1, 0){do}')


def test_rules_that_do_not_fit_the_tree(tmp_path: Path, helper: MeshShardingHelper) -> None:
    file = write(tmp_path / 'x.safetensors', {'a.b': bits((3,), 'int8')})
    with pytest.raises(ShardingError, match=re.escape('a/b: int8[3]')):
        load_safetensors(helper, file, P('fsdp'))


def test_64_bits(tmp_path: Path, helper: MeshShardingHelper, snapshot: Snapshot) -> None:
    file = write(tmp_path / 'x.safetensors', {'ids': np.arange(3), 'x': bits((2,), 'int8')})
    snapshot(error_of(helper, file, P()))
    with jax.enable_x64(True):
        assert load_safetensors(helper, file, P())['ids'].dtype == np.int64


def test_arrays_do_not_change_with_their_file(tmp_path: Path, helper: MeshShardingHelper) -> None:
    x = bits((8, 4), 'int8')
    file = write(tmp_path / 'x.safetensors', {'x': x})
    loaded = load_safetensors(helper, file, P())['x']
    size = file.stat().st_size
    with file.open('r+b') as opened:
        opened.seek(size - x.nbytes)
        opened.write(bytes(x.nbytes))
    np.testing.assert_array_equal(loaded, x)


def test_errors_about_files(tmp_path: Path, helper: MeshShardingHelper) -> None:
    sharded_files(tmp_path)
    first, second = (tmp_path / f'model-0000{number}-of-00002.safetensors' for number in (1, 2))
    index = tmp_path / 'model.safetensors.index.json'
    second.write_bytes(second.read_bytes()[:-1])
    for files in (tmp_path, index, second, [first, second]):
        assert error_of(helper, files, P()).startswith(
            f'{second} is not a safetensors file, or is damaged:\n'
        )
    second.unlink()
    for files in (tmp_path, index, second, [second]):
        assert error_of(helper, files, P()) == f'{second} cannot be read: No such file or directory'
    write(second, {'model.layers.0.mlp.up_proj.weight': bits((4,), 'int8')})
    assert error_of(helper, [first, second], P()) == (
        f'the files do not fit together:\n  model.layers.0.mlp.up_proj.weight is in {first} and in {second}'
    )
    (tmp_path / 'empty').mkdir()
    assert error_of(helper, tmp_path / 'empty', P()) == (
        f'{tmp_path / "empty"} has no .safetensors files; name the file, the files or the index'
    )
    assert error_of(helper, [], P()) == 'load_safetensors: the list of files is empty'


def test_invalid_files(tmp_path: Path, helper: MeshShardingHelper) -> None:
    """Pipes and endless files are not read."""
    os.mkfifo(tmp_path / 'pipe')
    (tmp_path / 'zero').symlink_to('/dev/zero')
    (tmp_path / 'loop').symlink_to(tmp_path / 'loop')
    for name, why in (
        ('pipe', 'it is not a regular file'),
        ('zero', 'it is not a regular file'),
        ('loop', 'Too many levels of symbolic links'),
        ('folder.safetensors', 'Is a directory'),
        ('a' * 300, 'File name too long'),
        ('a\0b', 'embedded null byte'),
    ):
        if name.startswith('folder'):
            (tmp_path / name).mkdir()
        file = tmp_path / name
        assert error_of(helper, [file], P()) == f'{printable(str(file))} cannot be read: {why}'


def test_file_replaced_while_loading(tmp_path: Path, helper: MeshShardingHelper) -> None:
    """The data are from the file whose header was read."""
    x = bits((8, 4), 'int8')
    file = write(tmp_path / 'x.safetensors', {'x': x})
    other = write(tmp_path / 'other', {'x': x[::-1].copy()})

    def mapping(name: str) -> str:
        os.replace(other, file)
        return name

    np.testing.assert_array_equal(load_safetensors(helper, file, P('fsdp'), mapping)['x'], x)


def test_file_truncated_while_loading(tmp_path: Path, helper: MeshShardingHelper) -> None:
    """It is an error, because reading its memory would kill the process."""
    file = write(tmp_path / 'x.safetensors', {'x': bits((1 << 16,), 'int8')})

    def mapping(name: str) -> str:
        os.truncate(file, 100)
        return name

    assert error_of(helper, file, P('fsdp'), mapping) == (
        f'{file} became shorter while it was loaded: another program writes to it. What to do: load it when '
        'it is complete; a program that replaces a file writes another one, and renames it.'
    )


def test_git_lfs_pointer(tmp_path: Path, helper: MeshShardingHelper) -> None:
    file = tmp_path / 'model.safetensors'
    file.write_text('version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4976698672\n')
    assert error_of(helper, tmp_path, P()) == (
        f'{file} is a pointer of Git LFS, which stands for the file. What to do: run `git lfs pull` in the '
        'repository, or download the file.'
    )


def test_missing_paths(tmp_path: Path, helper: MeshShardingHelper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    why = 'cannot be read: No such file or directory'
    assert error_of(helper, 'scalax/model', P()) == f'scalax/model {why} in {tmp_path}'
    assert error_of(helper, '~/model', P()) == (
        f'~/model {why}. What to do: give os.path.expanduser(path); ~ is not expanded'
    )


@pytest.mark.parametrize(
    ('files', 'text'),
    [
        ('', "files is an empty path; the current folder is '.'"),
        (
            ['a.safetensors', 'model.safetensors.index.json'],
            'model.safetensors.index.json in the list of files is an index: give it alone, in place of the '
            'list, or list the files that it names',
        ),
    ],
    ids=['empty', 'index'],
)
def test_invalid_lists_of_files(files: Any, text: str, helper: MeshShardingHelper) -> None:
    with pytest.raises(ArgumentError) as error:
        load_safetensors(helper, files, P())
    assert str(error.value) == f'load_safetensors: {text}'


@pytest.mark.parametrize(
    'destination', [5, ('y',), (None, (0,)), ('x', 5), ('x', 'a'), ('x', (0.0,))], ids=repr
)
def test_destinations_of_other_types(destination: Any, tmp_path: Path, helper: MeshShardingHelper) -> None:
    file = write(tmp_path / 'x.safetensors', {'x': bits((2,), 'int8')})
    with pytest.raises(ArgumentError) as error:
        load_safetensors(helper, file, P(), {'x': destination})
    assert str(error.value) == (
        'mapping: these destinations are not paths:\n'
        f'  x: {destination!r}\n'
        "What to do: give a path ('norm/scale'), a path and axes for a transpose ('norm/scale', (1, 0)), or "
        'None to leave the leaf out.'
    )


@pytest.mark.parametrize('axes', [(1,), ()], ids=repr)
def test_axes_out_of_range(axes: Any, tmp_path: Path, helper: MeshShardingHelper) -> None:
    file = write(tmp_path / 'x.safetensors', {'x': bits((2,), 'int8')})
    assert error_of(helper, file, P(), {'x': ('x', axes)}) == (
        'the mapping does not fit the tensors of the files:\n'
        f'  x: int8[2] does not have the axes {axes!r}\n'
        'What to do: give every tensor its own path, or None to leave it out.'
    )


def test_deep_leaf_paths(tmp_path: Path, helper: MeshShardingHelper) -> None:
    file = write(tmp_path / 'x.safetensors', {'.'.join('a' * 100): bits((2,), 'int8')})
    assert jax.tree.leaves(load_safetensors(helper, file, P()))[0].shape == (2,)
    write(file, {'.'.join('a' * 10**5): bits((2,), 'int8')})
    message = error_of(helper, file, P())
    assert message.startswith('the mapping does not fit the tensors of the files:\n  a.a.a.')
    assert ': goes to a path of more than 100 keys\nWhat to do: ' in message and len(message) < 500


def test_control_characters_in_names(tmp_path: Path, helper: MeshShardingHelper) -> None:
    file = write(tmp_path / 'x.safetensors', {'\x1b[2J': bits((2,), 'int8')})
    assert '\n  \\x1b[2J: not in the mapping\n' in error_of(helper, file, P(), {})

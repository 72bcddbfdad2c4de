"""safetensors files: every tensor lands in its shards bit by bit, from the bytes that are needed."""

import errno
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

from scalax.checkpoint import load_safetensors
from scalax.checkpoint._safetensors_blocks import read_block
from scalax.checkpoint._safetensors_header import DTYPES, Tensor
from scalax.checkpoint._safetensors_header import tensors_of as tensors_of_opened
from scalax.errors import CheckpointError, ShardingError
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


def tensors_of(file: Path) -> list[Tensor]:
    with file.open('rb', buffering=0) as opened:
        return tensors_of_opened(file, opened)


def test_every_dtype_bit_by_bit(tmp_path: Path, helper: MeshShardingHelper) -> None:
    names = {name: np.dtype(dtype) for name, dtype in DTYPES.items()}
    tensors = {f'a.{name}': bits((8, 4), dtype) for name, dtype in names.items() if dtype.name not in WIDE}
    assert len(tensors) == 16
    tree = load_safetensors(helper, write(tmp_path / 'x.safetensors', tensors), P('fsdp', 'tp'))
    for name, wanted in tensors.items():
        array = tree['a'][name.removeprefix('a.')]
        assert (array.dtype, array.sharding.spec) == (wanted.dtype, P('fsdp', 'tp'))
        assert np.asarray(array).tobytes() == wanted.tobytes()


@pytest.mark.parametrize(
    'spec', [P(), P('fsdp'), P('tp', 'fsdp'), P(None, None, ('fsdp', 'tp')), P(None, 'tp')], ids=str
)
def test_every_way_of_cutting(tmp_path: Path, helper: MeshShardingHelper, spec: P) -> None:
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


def test_only_the_bytes_of_a_block_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = bits((16, 8, 4096), 'int16')
    file = write(tmp_path / 'x.safetensors', {'before': bits((100,), 'int8'), 'x': x})
    [tensor] = [one for one in tensors_of(file) if one.name == 'x']
    calls: list[tuple[int, int]] = []
    preadv = os.preadv

    def counted(descriptor: int, buffers: list[memoryview], position: int) -> int:
        calls.append((position, sum(memoryview(buffer).nbytes for buffer in buffers)))
        return preadv(descriptor, buffers, position)

    monkeypatch.setattr(os, 'preadv', counted)
    for box, reads in [
        ((slice(4, 8), slice(0, 8), slice(0, 4096)), 1),  # rows that follow one another
        ((slice(4, 8), slice(2, 6), slice(0, 4096)), 4),
        ((slice(4, 8), slice(2, 6), slice(1, 3)), 16),
        ((slice(0, 16), slice(0, 8), slice(0, 4096)), 1),
    ]:
        calls.clear()
        with file.open('rb') as opened:
            np.testing.assert_array_equal(read_block(opened.fileno(), tensor, box), x[box])
        assert len(calls) == reads
        assert sum(size for _, size in calls) == x[box].nbytes
        assert all(start >= tensor.begin for start, _ in calls)


def test_parts_within_a_page_are_read_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = bits((3, 2000, 512), 'int16')
    file = write(tmp_path / 'x.safetensors', {'x': x})
    [tensor] = tensors_of(file)
    box = (slice(1, 3), slice(100, 1900), slice(64, 128))
    read: list[int] = []
    preadv = os.preadv
    monkeypatch.setattr(os, 'preadv', lambda *args: read.append(preadv(*args)) or read[-1])
    with file.open('rb') as opened:
        np.testing.assert_array_equal(read_block(opened.fileno(), tensor, box), x[box])
    assert len(read) == 2 * 2  # no more than 1 MiB at once, whatever the tensor
    assert max(read) <= 2**20


@pytest.mark.parametrize('seed', range(20))
def test_any_blocks(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    parts = [int(rng.choice([1, 2, 4])) for _ in range(rng.integers(1, 5))]
    sizes = [
        int(rng.choice([1, 3, 5, 700 if len(parts) == 1 or not dim else 9])) for dim in range(len(parts))
    ]
    x = bits(
        tuple(part * size for part, size in zip(parts, sizes, strict=True)), rng.choice(['int8', 'int16'])
    )
    file = write(tmp_path / 'x.safetensors', {'before': bits((3,), 'int8'), 'x': x})
    [tensor] = [one for one in tensors_of(file) if one.name == 'x']
    boxes = [
        tuple(slice(i * size, (i + 1) * size) for i, size in zip(place, sizes, strict=True))
        for place in np.ndindex(*parts)
        if rng.random() < 0.8
    ]
    with file.open('rb') as opened:
        for box in boxes:
            np.testing.assert_array_equal(read_block(opened.fileno(), tensor, box), x[box])


def test_short_reads_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = bits((8, 5000), 'int8')
    file = write(tmp_path / 'x.safetensors', {'x': x})
    [tensor] = tensors_of(file)
    preadv = os.preadv
    read: list[int] = []

    def short(descriptor: int, buffers: list[Any], position: int) -> int:
        read.append(preadv(descriptor, [memoryview(buffers[0]).cast('B')[:999]], position))
        return read[-1]

    monkeypatch.setattr(os, 'preadv', short)
    with file.open('rb') as opened:
        box = (slice(1, 8), slice(7, 4000))
        np.testing.assert_array_equal(read_block(opened.fileno(), tensor, box), x[box])
        assert sum(read) == x[box].nbytes  # each byte once: what a read has brought is not asked for again
        os.truncate(file, file.stat().st_size - 1500)
        with pytest.raises(CheckpointError, match='became shorter while it was read: x ends early'):
            read_block(opened.fileno(), tensor, box)


def test_a_process_reads_the_rows_of_its_own_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, helper: MeshShardingHelper
) -> None:
    file = write(tmp_path / 'x.safetensors', {'x': bits((8, 8192), 'int8'), 'y': bits((8, 8192), 'int8')})
    helper = MeshShardingHelper([2], ['fsdp'], devices=jax.devices()[:2])
    read = []
    preadv = os.preadv
    monkeypatch.setattr(os, 'preadv', lambda *args: read.append(preadv(*args)) or read[-1])
    load_safetensors(helper, file, P(None, 'fsdp'), {'x': 'x', 'y': None})
    assert sum(read) == 8 * 8192
    read.clear()
    load_safetensors(helper, file, P())  # replicated: read once, for both devices
    assert sum(read) == 2 * 8 * 8192


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


@pytest.mark.parametrize('what', ['folder', 'index', 'list'])
def test_files_in_parts(tmp_path: Path, helper: MeshShardingHelper, what: str) -> None:
    tensors = sharded_files(tmp_path)
    files: Any = {
        'folder': tmp_path,
        'index': str(tmp_path / 'model.safetensors.index.json'),
        'list': sorted(tmp_path.glob('*.safetensors')),
    }[what]
    rule = PolicyShardingRule(lambda path, leaf: P('fsdp', 'tp') if len(leaf.shape) == 2 else P())
    tree = load_safetensors(helper, files, rule, PAIRS)
    assert sorted(tree) == ['layers', 'norm']
    assert sorted(tree['layers']) == ['0', '1', '2']
    for i in range(3):
        kernel = tree['layers'][str(i)]['up']['kernel']
        wanted = tensors[f'model.layers.{i}.mlp.up_proj.weight'].T
        assert np.asarray(kernel).tobytes() == wanted.tobytes()
    assert np.asarray(tree['norm']['scale']).tobytes() == tensors['model.norm.weight'].tobytes()


def test_names_by_a_function(tmp_path: Path, helper: MeshShardingHelper) -> None:
    file = write(tmp_path / 'x.safetensors', {'a.b': bits((2,), 'int8'), 'skip': bits((2,), 'int8')})
    tree = load_safetensors(helper, file, P(), lambda name: None if name == 'skip' else name.upper())
    assert list(tree) == ['A.B']


def test_names_by_a_function_that_knows_some_only(tmp_path: Path, helper: MeshShardingHelper) -> None:
    file = write(tmp_path / 'x.safetensors', {'a': bits((2,), 'int8'), 'b': bits((2,), 'int8')})
    assert '\n  b: not in the mapping\n' in error_of(helper, file, P(), lambda name: {'a': 'x'}[name])


def test_a_mistake_in_a_function_of_names(tmp_path: Path, helper: MeshShardingHelper) -> None:
    file = write(tmp_path / 'x.safetensors', {'a': bits((2,), 'int8')})
    settings: dict[str, str] = {}
    with pytest.raises(KeyError, match='prefix') as raised:
        load_safetensors(helper, file, P(), lambda name: settings['prefix'] + name)
    assert raised.value.__notes__ == ['mapping was asked about a']


def error_of(helper: MeshShardingHelper, *args: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_safetensors(helper, *args)
    return str(caught.value)


def test_errors_about_names(tmp_path: Path, helper: MeshShardingHelper, snapshot: Snapshot) -> None:
    names = ('a.b', 'a.c', 'd', 'd.e')
    file = write(tmp_path / 'x.safetensors', {name: bits((2,), 'int8') for name in names})
    do = '\nWhat to do: give every tensor one path of its own, or None to leave it out.'
    head = 'the mapping does not fit the tensors of the files:\n'
    assert error_of(helper, file, P()) == head + '  d.e goes to d/e, which is inside d, where d goes' + do
    mapping: Any = {'a.b': 'x', 'a.cc': 'y', 'd': 'x', 'd.e': None}
    assert error_of(helper, file, P(), mapping) == (
        head + '  a.cc: not in the files; did you mean a.c?\n'
        '  a.c: not in the mapping\n'
        '  d and a.b both go to x' + do
    )
    mapping = [('^a.', 'z/')]
    assert error_of(helper, file, P(), mapping) == (
        head + '  d: not in the mapping\n  d.e: not in the mapping' + do
    )
    mapping = [('a.b', 'x', (1, 0)), ('', None)]
    snapshot(error_of(helper, file, P(), mapping))


def test_rules_that_do_not_fit(tmp_path: Path, helper: MeshShardingHelper) -> None:
    file = write(tmp_path / 'x.safetensors', {'a.b': bits((3,), 'int8')})
    with pytest.raises(ShardingError, match=re.escape('a/b: int8[3]')):
        load_safetensors(helper, file, P('fsdp'))


def test_64_bits(tmp_path: Path, helper: MeshShardingHelper, snapshot: Snapshot) -> None:
    file = write(tmp_path / 'x.safetensors', {'ids': np.arange(3), 'x': bits((2,), 'int8')})
    snapshot(error_of(helper, file, P()))
    with jax.enable_x64(True):
        assert load_safetensors(helper, file, P())['ids'].dtype == np.int64


def test_errors_about_files(tmp_path: Path, helper: MeshShardingHelper) -> None:
    sharded_files(tmp_path)
    second = tmp_path / 'model-00002-of-00002.safetensors'
    index = tmp_path / 'model.safetensors.index.json'
    whole = second.read_bytes()
    second.write_bytes(whole[:-1])
    assert error_of(helper, tmp_path, P()) == (
        f'{second} is truncated: it has {len(whole) - 1} bytes, and its tensors need {len(whole)}'
    )
    second.write_bytes(whole[:20])
    assert f'{second} is truncated: its header has ' in error_of(helper, tmp_path, P())
    second.write_bytes(b'')
    assert error_of(helper, tmp_path, P()).startswith(
        f'{second} is no safetensors file: its header cannot have 0 bytes'
    )
    second.write_bytes(len(b'{"a": 3}').to_bytes(8, 'little') + b'{"a": 3}')
    assert error_of(helper, tmp_path, P()) == (
        f'{second} is no safetensors file: a is not an object with dtype, shape, data_offsets, but 3'
    )
    write(second, {'lm_head.weight': bits((4,), 'int8')})
    text = error_of(helper, index, P())
    assert text.startswith('the files do not fit together:\n  model.layers.2.mlp.up_proj.weight is not in ')
    second.unlink()
    missing = f'{second}: No such file or directory'
    assert error_of(helper, index, P()) == f'files that the index names cannot be read:\n  {missing}'
    for files in (second, [second]):
        assert error_of(helper, files, P()) == f'files cannot be read:\n  {missing}'
    first = tmp_path / 'model-00001-of-00002.safetensors'
    write(second, {'model.layers.0.mlp.up_proj.weight': bits((4,), 'int8')})
    assert error_of(helper, [first, second], P()) == (
        f'the files do not fit together:\n  model.layers.0.mlp.up_proj.weight is in {first} and in {second}'
    )
    empty = tmp_path / 'empty'
    empty.mkdir()
    assert error_of(helper, empty, P()) == (
        f'{empty} has no .safetensors files; name the file, the files or the index'
    )


def no_index(index: Path, helper: MeshShardingHelper, content: bytes | str) -> str:
    index.write_bytes(content if isinstance(content, bytes) else content.encode())
    said = error_of(helper, index, P())
    head = f'{index} is no index: '
    assert said.startswith(head)
    return said.removeprefix(head)


def test_what_is_no_index(tmp_path: Path, helper: MeshShardingHelper) -> None:
    index = tmp_path / 'model.safetensors.index.json'
    maps = ['3', '{"a": 3}', '["a"]', '{}', '[]', 'null']
    for text in ('{}', '[]', '3', *(f'{{"weight_map": {places}}}' for places in maps)):
        said = no_index(index, helper, text)
        assert said == 'it has no weight_map that gives a file for each tensor'
    for content, message in [
        ('', 'Expecting value: line 1 column 1 (char 0)'),
        ('{"weight_map": {"a": "b", "a": "c"}}', "the key 'a' is there twice in one object"),
        ('{"weight_map": ' * 10**5, 'it is nested too deep'),
        (
            '{"weight_map": {}}'.encode('utf-16'),
            "'utf-8' codec can't decode byte 0xff in position 0: invalid start byte",
        ),
    ]:
        assert no_index(index, helper, content) == message
    index.unlink()
    assert error_of(helper, index, P()) == f'{index} is no index: No such file or directory'
    index.mkdir()
    assert error_of(helper, index / 'x.index.json', P()).endswith('is no index: No such file or directory')
    os.mkfifo(tmp_path / 'pipe.safetensors.index.json')
    said = error_of(helper, tmp_path / 'pipe.safetensors.index.json', P())
    assert said.endswith('is no index: it is no regular file')
    large = tmp_path / 'large.safetensors.index.json'
    large.touch()
    os.truncate(large, 1 << 40)
    assert error_of(helper, large, P()).endswith('bytes, and 100,000,000 are taken at most')


@pytest.mark.parametrize('name', ['../x.safetensors', '/{}/x.safetensors', 'a/../../x.safetensors'])
def test_an_index_names_files_in_its_own_folder(
    tmp_path: Path, helper: MeshShardingHelper, name: str
) -> None:
    write(tmp_path / 'x.safetensors', {'x': bits((2,), 'int8')})
    folder = tmp_path / 'model'
    (folder / 'a').mkdir(parents=True)
    index = folder / 'model.safetensors.index.json'
    name = name.format(tmp_path)
    index.write_text(json.dumps({'weight_map': {'x': name}}))
    for files in (index, folder):
        assert error_of(helper, files, P()) == (
            f'{index} names files outside of its folder:\n'
            f'  x: {name!r}\n'
            'What to do: name the files themselves in place of the index, if they are what is wanted.'
        )
    # Below it is fine, and so are links: the cache of the Hugging Face Hub is made of them.
    (folder / 'a' / 'x.safetensors').symlink_to(tmp_path / 'x.safetensors')
    index.write_text(json.dumps({'weight_map': {'x': 'a/x.safetensors'}}))
    assert load_safetensors(helper, folder, P())['x'].shape == (2,)


def test_files_that_are_none(tmp_path: Path, helper: MeshShardingHelper) -> None:
    index = tmp_path / 'model.safetensors.index.json'
    names = ['a' * 5000, 'a\0b', '', '.', 'pipe', 'zero', 'gone', 'loop', 'folder']
    os.mkfifo(tmp_path / 'pipe')
    (tmp_path / 'zero').symlink_to('/dev/zero')
    (tmp_path / 'gone').symlink_to(tmp_path / 'nowhere')
    (tmp_path / 'loop').symlink_to(tmp_path / 'loop')
    (tmp_path / 'folder').mkdir()
    index.write_text(json.dumps({'weight_map': {f't{i}': name for i, name in enumerate(names)}}))
    said = error_of(helper, index, P()).splitlines()
    assert said[0] == 'files that the index names cannot be read:'
    assert [line.rpartition(': ')[2] for line in said[1:]] == [
        'File name too long',
        'embedded null byte',
        'Is a directory',
        'it is no regular file',
        'it is no regular file',
        'No such file or directory',
        'Too many levels of symbolic links',
        'Is a directory',
    ]
    assert len(said[1]) < 200
    for file in (tmp_path / 'pipe', '/dev/zero', ['/dev/zero']):
        assert error_of(helper, file, P()).endswith(': it is no regular file')
    assert error_of(helper, 'a' * 5000, P()).endswith(': File name too long')
    with tmp_path.joinpath('sparse').open('wb') as file:
        file.write((10**8).to_bytes(8, 'little'))
        file.truncate(1 << 40)
    assert error_of(helper, tmp_path / 'sparse', P()) == (
        f'{tmp_path / "sparse"} is no safetensors file: Expecting value: line 1 column 1 (char 0)'
    )


def test_a_file_that_is_replaced_while_it_is_loaded(tmp_path: Path, helper: MeshShardingHelper) -> None:
    """What is read is what the header was read of."""
    x = bits((8, 4), 'int8')
    file = write(tmp_path / 'x.safetensors', {'x': x})
    other = write(tmp_path / 'other', {'x': x[::-1].copy()})

    def mapping(name: str) -> str:
        os.replace(other, file)
        return name

    np.testing.assert_array_equal(load_safetensors(helper, file, P('fsdp'), mapping)['x'], x)


def test_a_disk_that_fails(
    tmp_path: Path, helper: MeshShardingHelper, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / 'x.safetensors', {'x': bits((8, 4), 'int8')})

    def broken(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, 'preadv', broken)
    assert error_of(helper, file, P()) == f'{file} cannot be read: x: {os.strerror(errno.EIO)}'


def test_names_that_make_deep_trees(tmp_path: Path, helper: MeshShardingHelper) -> None:
    deep = '.'.join('a' * 100)
    file = write(tmp_path / 'x.safetensors', {deep: bits((2,), 'int8')})
    assert jax.tree.leaves(load_safetensors(helper, file, P()))[0].shape == (2,)
    file = write(tmp_path / 'x.safetensors', {'.'.join('a' * 10**5): bits((2,), 'int8')})
    said = error_of(helper, file, P())
    assert ' goes to a path of more than 100 keys' in said
    assert len(said) < 500


@pytest.mark.parametrize(
    ('changes', 'wanted'),
    [
        ({'data_offsets': [-16, 0]}, 'the shape [4] and the offsets [-16, 0]'),
        ({'data_offsets': [-160, -144]}, 'the shape [4] and the offsets [-160, -144]'),
        ({'data_offsets': [0, 16.0]}, 'the shape [4] and the offsets [0, 16.0]'),
        ({'shape': [-2, -2]}, 'the shape [-2, -2] and the offsets [0, 16]'),
        ({'shape': [4.7]}, 'the shape [4.7] and the offsets [0, 16]'),
    ],
)
def test_headers_that_make_no_sense(
    tmp_path: Path, helper: MeshShardingHelper, changes: dict[str, Any], wanted: str
) -> None:
    file = tmp_path / 'x.safetensors'
    entry = {'dtype': 'F32', 'shape': [4], 'data_offsets': [0, 16]}

    def write_header(header: dict[str, Any], size: int = 16) -> None:
        text = json.dumps(header).encode()
        file.write_bytes(len(text).to_bytes(8, 'little') + text + bytes(size))

    write_header({'x': {**entry, **changes}})
    assert error_of(helper, file, P()) == (
        f'{file} is damaged: x has {wanted}; both are lists of whole numbers, at least 0, and offsets are two'
    )
    write_header({'x': entry, 'none': {**entry, 'shape': [0], 'data_offsets': [16, 16]}})
    assert load_safetensors(helper, file, P())['x'].shape == (4,)
    write_header({'x': entry, 'y': {**entry, 'data_offsets': [8, 24]}}, 24)
    assert error_of(helper, file, P()) == f'{file} is damaged: x and y overlap'

"""safetensors files: every tensor lands in its shards bit by bit, from the bytes that are needed."""

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
from scalax.checkpoint._safetensors_file import DTYPES, read_boxes, tensors_of
from scalax.errors import CheckpointError, ShardingError
from scalax.sharding import MeshShardingHelper, PolicyShardingRule
from scalax.sharding import PartitionSpec as P

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


def test_every_dtype_bit_by_bit(tmp_path: Path, helper: MeshShardingHelper) -> None:
    names = {name: np.dtype(dtype) for name, dtype in DTYPES.items()}
    tensors = {f'a.{name}': bits((8, 4), dtype) for name, dtype in names.items() if dtype.name not in WIDE}
    assert len(tensors) == 14
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
            np.testing.assert_array_equal(*read_boxes(opened.fileno(), tensor, [box]), x[box])
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
        np.testing.assert_array_equal(*read_boxes(opened.fileno(), tensor, [box]), x[box])
    assert len(read) == 2 * 2  # no more than 1 MiB at once, whatever the tensor
    assert max(read) <= 2**20


def test_blocks_that_follow_one_another_are_read_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = bits((32, 4, 4096), 'int16')
    file = write(tmp_path / 'x.safetensors', {'x': x})
    [tensor] = tensors_of(file)
    read: list[int] = []
    preadv = os.preadv
    monkeypatch.setattr(os, 'preadv', lambda *args: read.append(preadv(*args)) or read[-1])
    columns = [(slice(0, 32), slice(0, 4), slice(i, i + 512)) for i in range(0, 4096, 512)]
    for boxes, calls in [
        (columns, 1),  # 32 * 4 * 8 parts, which are as many as a call takes
        (columns[::-1], 1),
        (columns[2:4], 32 * 4),
        ([columns[0], columns[2]], 32 * 4 * 2),
        (columns[:1], 32 * 4),
        ([(slice(0, 32), slice(i, i + 2), slice(0, 4096)) for i in (0, 2)], 1),
        ([], 0),
    ]:
        read.clear()
        with file.open('rb') as opened:
            blocks = read_boxes(opened.fileno(), tensor, boxes)
        for box, block in zip(boxes, blocks, strict=True):
            np.testing.assert_array_equal(block, x[box])
        assert (len(read), sum(read)) == (calls, sum(block.nbytes for block in blocks))


@pytest.mark.parametrize('seed', range(20))
def test_any_blocks(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    parts = [int(rng.choice([1, 2, 4])) for _ in range(rng.integers(1, 5))]
    sizes = [
        int(rng.choice([1, 3, 5, 700 if len(parts) == 1 or not dim else 20])) for dim in range(len(parts))
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
        for box, block in zip(boxes, read_boxes(opened.fileno(), tensor, boxes), strict=True):
            np.testing.assert_array_equal(block, x[box])


def test_how_many_blocks_are_read_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, helper: MeshShardingHelper
) -> None:
    """As many as fit into the memory of the largest; or all of a tensor, where they are the array."""
    read: list[list[int]] = []

    def counted(descriptor: int, tensor: Any, boxes: Any) -> Any:
        blocks = read_boxes(descriptor, tensor, boxes)
        read.append([block.nbytes for block in blocks])
        return blocks

    monkeypatch.setattr('scalax.checkpoint._safetensors.read_boxes', counted)
    tensors = {'x': bits((8, 64), 'int8'), 'y': bits((8, 192), 'int8')}
    file = write(tmp_path / 'x.safetensors', tensors)
    cut = P(('fsdp', 'tp'))
    load_safetensors(helper, file, cut)
    assert read == [[64] * 8, [192] * 8]
    read.clear()
    tree = load_safetensors(helper, file, P(None, ('fsdp', 'tp')), {name: (name, (1, 0)) for name in tensors})
    assert read == [[64] * 3, [64] * 3, [64] * 2, *[[192]] * 8]
    for name, wanted in tensors.items():
        np.testing.assert_array_equal(tree[name], wanted.T)


def test_short_reads_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = bits((8, 5000), 'int8')
    file = write(tmp_path / 'x.safetensors', {'x': x})
    [tensor] = tensors_of(file)
    preadv = os.preadv

    def short(descriptor: int, buffers: list[Any], position: int) -> int:
        return preadv(descriptor, [memoryview(buffers[0]).cast('B')[:999]], position)

    monkeypatch.setattr(os, 'preadv', short)
    with file.open('rb') as opened:
        box = (slice(1, 8), slice(7, 4000))
        np.testing.assert_array_equal(*read_boxes(opened.fileno(), tensor, [box]), x[box])
        os.truncate(file, file.stat().st_size - 1500)
        with pytest.raises(CheckpointError, match='became shorter while it was read: x ends early'):
            read_boxes(opened.fileno(), tensor, [box])


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


def error_of(helper: MeshShardingHelper, *args: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_safetensors(helper, *args)
    return str(caught.value)


def test_errors_about_names(tmp_path: Path, helper: MeshShardingHelper) -> None:
    names = ('a.b', 'a.c', 'd', 'd.e')
    file = write(tmp_path / 'x.safetensors', {name: bits((2,), 'int8') for name in names})
    do = '\nWhat to do: give every tensor one path of its own, or None to leave it out.'
    head = 'the mapping does not fit the tensors of the files:\n'
    assert error_of(helper, file, P()) == head + '  d.e goes to d/e, which is inside d, where d goes' + do
    mapping: Any = {'a.b': 'x', 'a.cc': 'y', 'd': 'x', 'd.e': None}
    assert error_of(helper, file, P(), mapping) == (
        head + '  a.cc: the files have no such tensor; did you mean a.c?\n'
        '  a.c: the mapping says nothing of it\n'
        '  d and a.b both go to x' + do
    )
    mapping = [('^a.', 'z/')]
    assert error_of(helper, file, P(), mapping) == (
        head + '  d: the mapping says nothing of it\n  d.e: the mapping says nothing of it' + do
    )
    mapping = [('a.b', 'x', (1, 0)), ('', None)]
    assert error_of(helper, file, P(), mapping) == (
        'a.b is int8[2], and the mapping gives it the axes (1, 0): '
        'they are the numbers 0 to 0 in another order'
    )


def test_rules_that_do_not_fit(tmp_path: Path, helper: MeshShardingHelper) -> None:
    file = write(tmp_path / 'x.safetensors', {'a.b': bits((3,), 'int8')})
    with pytest.raises(ShardingError, match=re.escape('a/b: int8[3]')):
        load_safetensors(helper, file, P('fsdp'))


def test_64_bits(tmp_path: Path, helper: MeshShardingHelper) -> None:
    file = write(tmp_path / 'x.safetensors', {'ids': np.arange(3), 'x': bits((2,), 'int8')})
    assert error_of(helper, file, P()) == (
        'JAX has no 64-bit numbers as it is set up:\n'
        '  ids: int64[3] would become int32\n'
        'What to do: set jax_enable_x64, or leave these tensors out of the mapping.'
    )
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
        f'{second} is no safetensors file: its header cannot be'
    )
    second.write_bytes(len(b'{"a": 3}').to_bytes(8, 'little') + b'{"a": 3}')
    assert error_of(helper, tmp_path, P()).startswith(f'{second} is no safetensors file: TypeError')
    write(second, {'lm_head.weight': bits((4,), 'int8')})
    text = error_of(helper, index, P())
    assert text.startswith('the files do not fit together:\n  model.layers.2.mlp.up_proj.weight is not in ')
    second.unlink()
    assert error_of(helper, index, P()) == (f'files that {index.name} names are not there:\n  {second}')
    for files in (second, [second]):
        assert error_of(helper, files, P()) == f'files are not there:\n  {second}'
    first = tmp_path / 'model-00001-of-00002.safetensors'
    write(second, {'model.layers.0.mlp.up_proj.weight': bits((4,), 'int8')})
    assert error_of(helper, [first, second], P()) == (
        f'the files do not fit together:\n  model.layers.0.mlp.up_proj.weight is in {first} and in {second}'
    )
    index.write_text('{}')
    assert error_of(helper, tmp_path, P()) == f"{index} is no index: KeyError: 'weight_map'"
    empty = tmp_path / 'empty'
    empty.mkdir()
    assert error_of(helper, empty, P()) == (
        f'{empty} has no .safetensors files; name the file, the files or the index'
    )
    for wrong in (3, {'a': 3}):
        index.write_text(json.dumps({'weight_map': wrong}))
        assert error_of(helper, tmp_path, P()) == (
            f'{index} is no index: its weight_map does not give a file for each tensor'
        )


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

    def write_header(header: dict[str, Any]) -> None:
        text = json.dumps(header).encode()
        file.write_bytes(len(text).to_bytes(8, 'little') + text + bytes(64))

    write_header({'x': {**entry, **changes}})
    assert error_of(helper, file, P()) == (
        f'{file} is damaged: x has {wanted}; both are whole numbers, at least 0'
    )
    write_header({'x': entry, 'none': {**entry, 'shape': [0], 'data_offsets': [8, 8]}})
    assert load_safetensors(helper, file, P())['x'].shape == (4,)
    write_header({'x': entry, 'y': {**entry, 'data_offsets': [8, 24]}})
    assert error_of(helper, file, P()) == f'{file} is damaged: x and y overlap'

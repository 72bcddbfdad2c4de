"""Indices of safetensors files: the files that they may list, and the cache of the Hugging Face Hub."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from scalax.checkpoint import load_safetensors
from scalax.errors import CheckpointError
from scalax.sharding import MeshShardingHelper
from scalax.sharding import PartitionSpec as P

INDEX = 'model.safetensors.index.json'
FILE = 'model-00001-of-00001.safetensors'
X = np.arange(8, dtype=np.int8)


@pytest.fixture(scope='module')
def helper() -> MeshShardingHelper:
    return MeshShardingHelper([8], ['x'])


def error_of(helper: MeshShardingHelper, files: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_safetensors(helper, files, P())
    return str(caught.value)


def write(file: Path, name: str = 'x') -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: X}, file)
    return file


def write_index(folder: Path, **places: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    index = folder / INDEX
    index.write_text(json.dumps({'weight_map': places}))
    return index


def assert_loads(helper: MeshShardingHelper, files: Any) -> None:
    np.testing.assert_array_equal(load_safetensors(helper, files, P())['x'], X)


NO_MAP = 'it has no weight_map, an object with the file of each tensor'


@pytest.mark.parametrize(
    ('content', 'why'),
    [
        ('', 'Expecting value: line 1 column 1 (char 0)'),
        ('{}', NO_MAP),
        ('[]', NO_MAP),
        ('null', NO_MAP),
        ('{"weight_map": {}}', NO_MAP),
        ('{"weight_map": null}', NO_MAP),
        ('{"weight_map": ["a"]}', NO_MAP),
        ('{"weight_map": {"a": 1, "b": "b", "c": null}}', None),
        ('{"weight_map": {"a": "b", "a": "c"}}', "weight_map: the key 'a' occurs twice"),
        ('{"weight_map": {"a": "b"}, "weight_map": {}}', "the key 'weight_map' occurs twice"),
        ('{"metadata": {"b": {"a": 1, "a": 2}}}', "metadata/b: the key 'a' occurs twice"),
        ('[' * 10**5, 'it is nested more than 127 deep'),
        ('{"weight_map": ' * 10**5, 'weight_map: it is nested more than 127 deep'),
        ('{"weight_map": {"\\ud800": "a"}}', "weight_map: the string '\\ud800' has half of a surrogate pair"),
        (b'\xff', "'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"),
    ],
)
def test_invalid_indices(
    tmp_path: Path, helper: MeshShardingHelper, content: str | bytes, why: str | None
) -> None:
    index = tmp_path / INDEX
    index.write_bytes(content if isinstance(content, bytes) else content.encode())
    head = f'{index} is not an index of .safetensors files:'
    listed = '\n  a: 1 is not the name of a file\n  c: None is not the name of a file'
    assert error_of(helper, index) == head + (listed if why is None else f' {why}')


def test_indices_that_are_not_regular_files(tmp_path: Path, helper: MeshShardingHelper) -> None:
    for name, make, why in (
        ('none', lambda path: None, 'No such file or directory'),
        ('pipe', os.mkfifo, 'it is not a regular file'),
        ('zero', lambda path: path.symlink_to('/dev/zero'), 'it is not a regular file'),
        ('large', lambda path: path.touch(), 'it has 1,099,511,627,776 bytes; the limit is 100,000,000'),
    ):
        index = tmp_path / f'{name}.safetensors.index.json'
        make(index)
        if name == 'large':  # a sparse file of this size takes no disk space
            os.truncate(index, 1 << 40)
        assert error_of(helper, index) == f'{index} is not an index of .safetensors files: {why}'


def test_tensors_missing_from_their_file(tmp_path: Path, helper: MeshShardingHelper) -> None:
    """A tensor in another file than the index lists is also an error."""
    first, second = write(tmp_path / 'a.safetensors', 'a'), write(tmp_path / 'b.safetensors', 'b')
    index = write_index(tmp_path, a=second.name, b=second.name, c=first.name)
    assert error_of(helper, index) == (
        'the files do not fit together:\n'
        f'  a is not in {second}, where the index says it is\n'
        f'  c is not in {first}, where the index says it is'
    )


def outside(index: Path, line: str) -> str:
    return (
        f'{index} names files outside of its folder:\n  {line}\nWhat to do: if these are the files that you '
        'want, give load_safetensors a list of the files in place of the index.'
    )


@pytest.mark.parametrize(
    'name',
    ['../x.safetensors', '{}/x.safetensors', 'a/../../x.safetensors', 'a/../y.safetensors', '..', '//x', '/'],
)
def test_names_outside_of_the_folder(tmp_path: Path, helper: MeshShardingHelper, name: str) -> None:
    write(tmp_path / 'x.safetensors')
    write(tmp_path / 'model' / 'y.safetensors')
    (tmp_path / 'model' / 'a').mkdir()
    name = name.format(tmp_path)
    index = write_index(tmp_path / 'model', x=name)
    for files in (index, index.parent):
        assert error_of(helper, files) == outside(index, f'x: {name!r}')


def test_names_of_unreadable_files(tmp_path: Path, helper: MeshShardingHelper) -> None:
    (tmp_path / 'folder').mkdir()
    os.mkfifo(tmp_path / 'pipe')
    (tmp_path / 'loop').symlink_to('loop')
    for name, why in (
        ('', 'Is a directory'),
        ('.', 'Is a directory'),
        ('folder', 'Is a directory'),
        ('none', 'No such file or directory'),
        ('pipe', 'it is not a regular file'),
        ('loop', 'Too many levels of symbolic links'),
        ('a' * 300, 'File name too long'),
        ('a\0b', 'embedded null byte'),
    ):
        index = write_index(tmp_path, x=name)
        message = error_of(helper, index)
        assert message.endswith(f' cannot be read: {why}') and message.isprintable() and len(message) < 400


@pytest.mark.parametrize('kind', ['file', 'relative', 'folder', 'chain', 'device'])
def test_links_out_of_the_folder(tmp_path: Path, helper: MeshShardingHelper, kind: str) -> None:
    """A list of the files loads them: the user has chosen them."""
    target = write(tmp_path / 'private' / FILE)
    folder, name = tmp_path / 'model', FILE
    folder.mkdir()
    if kind == 'file':
        (folder / name).symlink_to(target)
    elif kind == 'relative':
        (folder / name).symlink_to(Path('..', 'private', FILE))
    elif kind == 'folder':
        (folder / 'sub').symlink_to(target.parent)
        name = f'sub/{FILE}'
    elif kind == 'chain':
        (folder / name).symlink_to('next')
        (folder / 'next').symlink_to(target)
    else:
        (folder / name).symlink_to('/dev/zero')
        target = Path('/dev/zero')
    index = write_index(folder, x=name)
    for files in (index, folder):
        assert error_of(helper, files) == outside(index, f'x: {name!r} is a link to {target}')
    if kind != 'device':
        assert_loads(helper, [folder / name])


def test_links_inside_the_folder(tmp_path: Path, helper: MeshShardingHelper) -> None:
    """The folder itself may be a link, and may have subfolders."""
    target = write(tmp_path / 'model' / 'sub' / FILE)
    (target.parents[1] / 'other').symlink_to(Path('sub', FILE))
    for name in (f'sub/{FILE}', 'other', f'./sub//{FILE}'):
        assert_loads(helper, write_index(target.parents[1], x=name))
    (tmp_path / 'link').symlink_to('model')
    assert_loads(helper, tmp_path / 'link')
    # In a folder without an index, links may lead anywhere: no index lists them.
    (tmp_path / 'files').mkdir()
    (tmp_path / 'files' / FILE).symlink_to(target)
    assert_loads(helper, tmp_path / 'files')


def hub_cache(cache: Path, below: str = '') -> Path:
    """Makes the folder of a model as the Hub's library does: each file is a link into the blobs."""
    repo = cache / 'models--scalax--model'
    blobs, folder = repo / 'blobs', repo / 'snapshots' / ('0' * 40) / below
    folder.mkdir(parents=True)
    write(blobs / ('a' * 64))
    index = write_index(blobs, x=FILE)
    index.rename(blobs / ('b' * 40))
    up = Path(*['..'] * (3 if below else 2), 'blobs')
    (folder / FILE).symlink_to(up / ('a' * 64))
    (folder / INDEX).symlink_to(up / ('b' * 40))
    return folder


@pytest.mark.parametrize('below', ['', 'transformer'])
def test_hugging_face_hub_cache(tmp_path: Path, helper: MeshShardingHelper, below: str) -> None:
    folder = hub_cache(tmp_path / 'cache', below)
    (tmp_path / 'link').symlink_to('cache')
    (tmp_path / 'model').symlink_to(folder)
    for path in (folder, tmp_path / 'link' / folder.relative_to(tmp_path / 'cache'), tmp_path / 'model'):
        assert_loads(helper, path)
        assert_loads(helper, path / INDEX)


@pytest.mark.parametrize(
    'kind', ['another repository', 'below blobs', 'blobs are a link', 'beside', 'no snapshot']
)
def test_links_out_of_the_hub_cache(tmp_path: Path, helper: MeshShardingHelper, kind: str) -> None:
    folder = hub_cache(tmp_path / 'cache')
    repo = folder.parents[1]
    if kind == 'another repository':
        target = write(tmp_path / 'cache' / 'models--other' / 'blobs' / ('a' * 64))
    elif kind == 'below blobs':
        target = write(repo / 'blobs' / 'more' / ('a' * 64))
    elif kind == 'blobs are a link':
        (repo / 'blobs').rename(tmp_path / 'private')
        (repo / 'blobs').symlink_to(tmp_path / 'private')
        target = tmp_path / 'private' / ('a' * 64)
    elif kind == 'beside':
        target = write(repo / ('a' * 64))
    else:
        folder.parent.rename(repo / 'other')
        folder = repo / 'other' / folder.name
        target = repo / 'blobs' / ('a' * 64)
    if kind not in ('blobs are a link', 'no snapshot'):
        (folder / FILE).unlink()
        (folder / FILE).symlink_to(target)
    assert error_of(helper, folder) == outside(folder / INDEX, f'x: {FILE!r} is a link to {target}')

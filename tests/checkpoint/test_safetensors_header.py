"""Headers of safetensors files: all headers that the library rejects are errors naming file and entry."""

import json
import os
import random
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import safetensors

from scalax.checkpoint import load_safetensors
from scalax.checkpoint._safetensors_header import DTYPES, LENGTH, parse_header
from scalax.errors import CheckpointError
from scalax.sharding import MeshShardingHelper
from scalax.sharding import PartitionSpec as P
from tests.support.random_examples import examples
from tests.support.safetensors_headers import SMALL_BITS, random_header

DATA = bytes(range(1, 256)) * 10
WHAT_TO_DO = 'What to do: download or save the file again.'


def file_of(header: bytes, data: bytes) -> bytes:
    return len(header).to_bytes(LENGTH, 'little') + header + data


def entry(**changes: Any) -> str:
    return json.dumps({'dtype': 'F32', 'shape': [4], 'data_offsets': [0, 16], **changes})


def x(**changes: Any) -> str:
    """Makes a header with one entry of 16 bytes."""
    return f'{{"x":{entry(**changes)}}}'


X = entry()
VALID = X[1:-1]
LISTS = 'which is not a list of non-negative integers'
PAIRS = 'which are not two non-negative integers'
ONES = '[1, 1, 1, 1, 1, 1, 1, 1, ...]'
HUGE = '9' * 5000

# (header as text or bytes, lines of the error). The data have 16 bytes.
CASES: dict[str, tuple[str | bytes, str]] = {
    # JSON
    'empty': ('', 'its header is not valid: Expecting value: line 1 column 1 (char 0)'),
    'a list': ('[]', 'its header is not an object with an entry for each tensor'),
    'cut off': (
        '{"x":',
        'its header is not valid: Expecting value: line 1 column 6 (char 5)',
    ),
    'not UTF-8': (
        b'{"\xff":3}',
        "its header is not valid: 'utf-8' codec can't decode byte 0xff in position 2: invalid start byte",
    ),
    'UTF-16': (
        x().encode('utf-16'),
        "its header is not valid: 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte",
    ),
    'two values': ('{}{}', 'its header is not valid: Extra data: line 1 column 3 (char 2)'),
    'brackets': ('[' * 10**5, 'its header is not valid: it is nested more than 127 deep'),
    'brackets in an entry': (
        f'{{"w":{X},"x":{{"shape":{"[" * 10**5}',
        'its header is not valid: x: it is nested more than 127 deep',
    ),
    'brackets that are closed': (
        f'{{"x":{{{VALID},"more":{"[" * 10**5}{"]" * 10**5}}}}}',
        'its header is not valid: x: it is nested more than 127 deep',
    ),
    'objects': ('{"x":' * 10**5, 'its header is not valid: x: it is nested more than 127 deep'),
    # Names and keys
    'a name twice': (f'{{"x":{X},"x":{X}}}', "its header is not valid: the key 'x' occurs twice"),
    'a name twice, once escaped': (
        f'{{"x":{X},"\\u0078":{X}}}',
        "its header is not valid: the key 'x' occurs twice",
    ),
    'a key twice': (
        f'{{"x":{{"dtype":"F16",{VALID}}}}}',
        "its header is not valid: x: the key 'dtype' occurs twice",
    ),
    'metadata twice': (
        f'{{"__metadata__":{{}},"x":{X},"__metadata__":{{}}}}',
        "its header is not valid: the key '__metadata__' occurs twice",
    ),
    'a key of metadata twice': (
        f'{{"__metadata__":{{"a":"1","a":"2"}},"x":{X}}}',
        "its header is not valid: __metadata__: the key 'a' occurs twice",
    ),
    'half of a surrogate pair': (
        f'{{"\\ud800":{X}}}',
        "its header is not valid: the string '\\ud800' has half of a surrogate pair",
    ),
    'control characters in a name': (
        '{"\\u001b[2J":3}',
        '\\x1b[2J: 3 is not an object with dtype, shape, data_offsets',
    ),
    # Entries
    'a number': ('{"x":3}', 'x: 3 is not an object with dtype, shape, data_offsets'),
    'a list as an entry': (
        '{"x":["F32",[4],[0,16]]}',
        "x: ['F32', [4], [0, 16]] is not an object with dtype, shape, data_offsets",
    ),
    'no keys': ('{"x":{}}', 'x: has the keys [], but an entry has dtype, shape, data_offsets'),
    'a key more': (
        x(more=1),
        "x: has the keys ['dtype', 'shape', 'data_offsets', 'more'], but an entry has dtype, shape, "
        'data_offsets',
    ),
    'every entry is named': (
        '{"x":3,"y":{}}',
        'x: 3 is not an object with dtype, shape, data_offsets\n  '
        'y: has the keys [], but an entry has dtype, shape, data_offsets',
    ),
    # Metadata
    'metadata of numbers': (
        f'{{"__metadata__":{{"a":3}},"x":{X}}}',
        "__metadata__: {'a': 3} is not an object of strings",
    ),
    'metadata is a list': (
        f'{{"__metadata__":["a"],"x":{X}}}',
        "__metadata__: ['a'] is not an object of strings",
    ),
    # Dtypes
    'unknown dtype': (x(dtype='F33\x1b[2J'), "x: has the dtype 'F33\\x1b[2J', which cannot be loaded"),
    'a dtype of half a byte': (x(dtype='F4', shape=[32]), "x: has the dtype 'F4', which cannot be loaded"),
    'a list as a dtype': (x(dtype=['F32']), "x: has the dtype ['F32'], which cannot be loaded"),
    'an object as a dtype': (
        x(dtype={'F32': None}),
        "x: has the dtype {'F32': None}, which cannot be loaded",
    ),
    # Shapes
    'an object as a shape': (x(shape={}), f'x: has the shape {{}}, {LISTS}'),
    'a string as a shape': (x(shape='4'), f"x: has the shape '4', {LISTS}"),
    'null as a shape': (x(shape=None), f'x: has the shape None, {LISTS}'),
    'a string in a shape': (x(shape=['4']), f"x: has the shape ['4'], {LISTS}"),
    'a list in a shape': (x(shape=[[4]]), f'x: has the shape [[4]], {LISTS}'),
    'a bool in a shape': (x(shape=[4, True]), f'x: has the shape [4, True], {LISTS}'),
    'a float in a shape': (x(shape=[4.0]), f'x: has the shape [4.0], {LISTS}'),
    'NaN in a shape': (x(shape=[float('nan')]), f'x: has the shape [nan], {LISTS}'),
    'infinity in a shape': (x(shape=[float('inf')]), f'x: has the shape [inf], {LISTS}'),
    'minus zero in a shape': (
        '{"x":{"dtype":"F32","shape":[-0],"data_offsets":[0,0]}}',
        f'x: has the shape [-0.0], {LISTS}',
    ),
    'thousands of digits': (
        f'{{"x":{{"dtype":"F32","shape":[{HUGE}],"data_offsets":[0,16]}}}}',
        f'x: has the shape [inf], {LISTS}',
    ),
    'a negative size': (x(shape=[-4]), f'x: has the shape [-4], {LISTS}'),
    'two negative sizes': (x(shape=[-2, -2]), f'x: has the shape [-2, -2], {LISTS}'),
    '65 dimensions': (x(shape=[1] * 65), 'x: has 65 dimensions; an array has at most 64'),
    '100 dimensions': (x(shape=[4] + [1] * 99), 'x: has 100 dimensions; an array has at most 64'),
    'a million dimensions': (x(shape=[2**60] * 10**5), 'x: has 100000 dimensions; an array has at most 64'),
    'a size of 2**80': (x(shape=[2**80]), f'x: has the shape [{2**80}], which no array of float32 can have'),
    'no elements of 2**80 columns': (
        x(shape=[0, 2**80], data_offsets=[0, 0]),
        f'x: has the shape [0, {2**80}], which no array of float32 can have',
    ),
    'sizes whose product is 0 in 64 bits': (
        x(shape=[2**32, 2**32], data_offsets=[0, 0]),
        'x: has the shape [4294967296, 4294967296], which no array of float32 can have',
    ),
    'sizes whose product is 4 in 64 bits': (
        x(shape=[2**62 + 1, 4], data_offsets=[0, 16]),
        'x: has the shape [4611686018427387905, 4], which no array of float32 can have',
    ),
    # Offsets
    'one offset': (x(data_offsets=[16]), f'x: has the data_offsets [16], {PAIRS}'),
    'three offsets': (x(data_offsets=[0, 8, 16]), f'x: has the data_offsets [0, 8, 16], {PAIRS}'),
    'a float as an offset': (x(data_offsets=[0, 16.0]), f'x: has the data_offsets [0, 16.0], {PAIRS}'),
    'a bool as an offset': (x(data_offsets=[False, 16]), f'x: has the data_offsets [False, 16], {PAIRS}'),
    'NaN as an offset': (x(data_offsets=[0, float('nan')]), f'x: has the data_offsets [0, nan], {PAIRS}'),
    'a negative offset': (x(data_offsets=[-16, 0]), f'x: has the data_offsets [-16, 0], {PAIRS}'),
    'an object as offsets': (x(data_offsets={'0': 16}), f"x: has the data_offsets {{'0': 16}}, {PAIRS}"),
    'offsets in reverse': (
        x(data_offsets=[16, 0]),
        'x: has the data_offsets [16, 0], which end before they begin',
    ),
    'offsets beyond the file': (
        x(shape=[5], data_offsets=[0, 20]),
        'x: has the data_offsets [0, 20], but the file has only 16 bytes of data',
    ),
    'offsets of 2**80': (
        x(data_offsets=[2**80, 2**80 + 16]),
        f'x: has the data_offsets [{2**80}, {2**80 + 16}], but the file has only 16 bytes of data',
    ),
    'fewer bytes than the shape': (
        x(shape=[5]),
        'x: is float32[5], which has 20 bytes, but has the data_offsets [0, 16]',
    ),
    'more bytes than the shape': (
        x(shape=[3]),
        'x: is float32[3], which has 12 bytes, but has the data_offsets [0, 16]',
    ),
    'another dtype than the bytes': (
        x(dtype='F16'),
        'x: is float16[4], which has 8 bytes, but has the data_offsets [0, 16]',
    ),
    # The data
    'a gap in front': (
        x(shape=[2], data_offsets=[8, 16]),
        'x: 8 bytes between the header and it belong to no tensor',
    ),
    'a gap': (
        f'{{"y":{entry(shape=[1], data_offsets=[12, 16])},"x":{entry(shape=[2], data_offsets=[0, 8])}}}',
        'y: 4 bytes between x and it belong to no tensor',
    ),
    'an overlap': (
        f'{{"x":{entry(shape=[3], data_offsets=[0, 12])},"y":{entry(shape=[2], data_offsets=[8, 16])}}}',
        'y: begins at byte 8, and x ends at byte 12: they overlap',
    ),
    'the same bytes twice': (
        f'{{"x":{X},"y":{X}}}',
        'y: begins at byte 0, and x ends at byte 16: they overlap',
    ),
    'a tensor inside of another': (
        f'{{"x":{X},"y":{entry(shape=[1], data_offsets=[4, 8])}}}',
        'y: begins at byte 4, and x ends at byte 16: they overlap',
    ),
    'an empty tensor inside of another': (
        f'{{"x":{X},"y":{entry(shape=[0], data_offsets=[4, 4])}}}',
        'y: begins at byte 4, and x ends at byte 16: they overlap',
    ),
    'trailing bytes': (x(shape=[3], data_offsets=[0, 12]), 'x: 4 bytes after it belong to no tensor'),
    'no tensors, but bytes': ('{}', 'the header: 16 bytes after it belong to no tensor'),
}


@pytest.fixture(scope='module')
def helper() -> MeshShardingHelper:
    return MeshShardingHelper([8], ['x'])


def error_of(helper: MeshShardingHelper, file: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Returns the error of a file, which has to be raised before memory is allocated for its tensors."""
    with monkeypatch.context() as patched, pytest.raises(CheckpointError) as caught:
        patched.delattr(np, 'memmap')
        load_safetensors(helper, file, P())
    return str(caught.value)


@pytest.mark.parametrize('case', CASES)
def test_hostile_headers(
    tmp_path: Path, helper: MeshShardingHelper, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    header, problems = CASES[case]
    header = header.encode() if isinstance(header, str) else header
    file = tmp_path / 'model.safetensors'
    file.write_bytes(file_of(header, bytes(16)))
    assert error_of(helper, file, monkeypatch) == (
        f'{file} is not a safetensors file, or is damaged:\n  {problems}\n{WHAT_TO_DO}'
    )


WHOLE = file_of(x().encode(), bytes(16))


@pytest.mark.parametrize(
    ('content', 'size', 'problem'),
    [
        (b'', 0, 'it has 0 bytes, but the length of the header alone has 8'),
        (b'\2\0\0\0', 4, 'it has 4 bytes, but the length of the header alone has 8'),
        (WHOLE, 20, f'its header has {len(x())} bytes, but the file ends after 12 of them'),
        (bytes([255] * 8), 8, f'its header would have {2**64 - 1:,} bytes; the limit is 100,000,000'),
        (bytes(7) + b'\x80', 8, f'its header would have {2**63:,} bytes; the limit is 100,000,000'),
        # A sparse file: its terabyte needs no space on the disk.
        (
            (10**8 + 1).to_bytes(8, 'little'),
            1 << 40,
            'its header would have 100,000,001 bytes; the limit is 100,000,000',
        ),
        (WHOLE, 1 << 40, f'x: {(1 << 40) - len(WHOLE)} bytes after it belong to no tensor'),
        (WHOLE, len(WHOLE) - 1, 'x: has the data_offsets [0, 16], but the file has only 15 bytes of data'),
    ],
    ids=['empty', '4 bytes', 'cut header', '2**64', '2**63', 'above the limit', 'a terabyte', 'cut data'],
)
def test_file_sizes_that_contradict_the_header(
    tmp_path: Path,
    helper: MeshShardingHelper,
    monkeypatch: pytest.MonkeyPatch,
    content: bytes,
    size: int,
    problem: str,
) -> None:
    file = tmp_path / 'model.safetensors'
    file.write_bytes(content)
    os.truncate(file, size)
    assert error_of(helper, file, monkeypatch) == (
        f'{file} is not a safetensors file, or is damaged:\n  {problem}\n{WHAT_TO_DO}'
    )


def test_messages_are_short(
    tmp_path: Path, helper: MeshShardingHelper, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / 'model.safetensors'
    for header in (
        {'a' * 10**6: 3},
        {'x': ['a' * 10**6] * 10},
        {'x': {'a' * 1000 + str(i): [i] * 100 for i in range(1000)}},
        {str(i): {'dtype': 'F32', 'shape': [i] * 100, 'data_offsets': [0, i]} for i in range(500)},
    ):
        file.write_bytes(file_of(json.dumps(header).encode(), b''))
        assert len(error_of(helper, file, monkeypatch)) < 3000


def test_valid_headers(tmp_path: Path, helper: MeshShardingHelper) -> None:
    """Unusual headers that are valid."""
    file = tmp_path / 'model.safetensors'
    nothing = entry(shape=[0, 3], data_offsets=[16, 16])
    header = f'{{"__metadata__":{{"format":"pt","a":"{{[["}},"[{{":{nothing},"é.\\ud83d\\ude00":{X}}}   '
    file.write_bytes(file_of(header.encode(), DATA[:16]))
    tree = load_safetensors(helper, file, P())
    assert tree['[{'].shape == (0, 3)
    assert np.asarray(tree['é']['\N{GRINNING FACE}']).tobytes() == DATA[:16]
    most = x(dtype='U8', shape=[2] * 4 + [1] * 60)
    file.write_bytes(file_of(most.encode(), DATA[:16]))
    assert load_safetensors(helper, file, P())['x'].shape == (2,) * 4 + (1,) * 60
    for header in ('{}', '{"__metadata__":null}'):
        file.write_bytes(file_of(header.encode(), b''))
        assert load_safetensors(helper, file, P()) == {}


# --- The safetensors library, and random headers ---------------------------------------------------

# Headers that only scalax rejects: see scalax/checkpoint/_safetensors_header.py.
STRICTER = [
    *(f"has the dtype '{name}', which cannot be loaded" for name in SMALL_BITS),
    'has the dtype {',
    'is not an object with dtype, shape, data_offsets',
    'but an entry has dtype, shape, data_offsets',
    'occurs twice',
    'which no array of ',
    'dimensions; an array has at most 64',
]


def ours(header: bytes, data: bytes) -> tuple[list[tuple[object, ...]], str]:
    try:
        tensors = parse_header(Path('x.safetensors'), header, len(data))
    except CheckpointError as error:
        assert str(error).startswith('x.safetensors is not a safetensors file, or is damaged:\n  ')
        return [], str(error)
    return sorted(((*tensor[:3], data[tensor.begin : tensor.end]) for tensor in tensors), key=str), ''


def by_library(header: bytes, data: bytes) -> tuple[list[tuple[object, ...]], str]:
    try:
        tensors = safetensors.deserialize(file_of(header, data))
    except safetensors.SafetensorError as error:
        return [], str(error)
    rows = [
        (name, it['dtype'] in DTYPES and np.dtype(DTYPES[it['dtype']]), tuple(it['shape']), bytes(it['data']))
        for name, it in tensors
    ]
    return sorted(rows, key=str), ''


def compare(header: bytes, data: bytes) -> str:
    """Compares both parsers: returns 'valid', 'rejected', or 'stricter' if only scalax rejects the header."""
    (by_scalax, rejected), (expected, why) = ours(header, data), by_library(header, data)
    if not rejected:
        assert not why, f'{header!r} is accepted, but the library rejects it: {why}'
        assert by_scalax == expected, header
        return 'valid'
    if why:
        return 'rejected'
    assert any(reason in rejected for reason in STRICTER), f'{header!r} is rejected: {rejected}'
    return 'stricter'


@hypothesis.given(st.randoms(use_true_random=False))
@examples(200)
def test_mutated_headers_against_the_library(rng: random.Random) -> None:
    header, size = random_header(rng)
    hypothesis.event(compare(header, DATA[:size]))


def test_mutations_give_valid_and_invalid_headers() -> None:
    counts = dict.fromkeys(('valid', 'rejected', 'stricter'), 0)
    for seed in range(600):
        header, size = random_header(random.Random(seed))
        counts[compare(header, DATA[:size])] += 1
    assert min(counts['valid'], counts['rejected']) > 60 and counts['stricter'], counts


@pytest.mark.parametrize('case', CASES)
def test_hostile_headers_in_the_library(case: str) -> None:
    header, _ = CASES[case]
    assert compare(header.encode() if isinstance(header, str) else header, bytes(16)) != 'valid'


@hypothesis.given(st.randoms(use_true_random=False))
@hypothesis.settings(examples(50), suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
def test_mutated_files_raise_only_checkpoint_errors(
    tmp_path: Path, helper: MeshShardingHelper, rng: random.Random
) -> None:
    header, size = random_header(rng)
    content = bytearray(file_of(header, DATA[:size]))
    for _ in range(rng.choice((0, 0, 1, 2))):
        position = rng.randrange(len(content) + 1)
        content[position : position + rng.randrange(4)] = bytes(
            rng.randrange(256) for _ in range(rng.randrange(4))
        )
    file = tmp_path / 'model.safetensors'
    file.write_bytes(content)
    try:
        load_safetensors(helper, file, P(), lambda name: name.encode().hex() or 'none')
    except CheckpointError:
        hypothesis.event('rejected')


def test_dtypes_match_the_library() -> None:
    _, why = by_library(x(dtype='none').encode(), bytes(16))
    dtypes = why.partition('expected one of ')[2].partition(' at line')[0].replace('`', '').split(', ')
    assert sorted(dtypes) == sorted([*DTYPES, *SMALL_BITS])

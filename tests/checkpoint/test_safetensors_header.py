"""Headers of safetensors files: what the library of that name refuses is refused here."""

import itertools
import json
import os
from pathlib import Path

import numpy as np
import pytest
import safetensors

from scalax.checkpoint._safetensors_header import DTYPES, LENGTH, parse_header
from scalax.errors import CheckpointError
from tests.support.safetensors_headers import SMALL_BITS, random_header

FILE = Path('x.safetensors')
ENTRY = '"dtype":"F32","shape":[4],"data_offsets":[0,16]'

# What is refused here, and accepted there: see scalax/checkpoint/_safetensors_header.py.
STRICTER = [
    *(f'has the dtype {name}, which cannot be loaded' for name in SMALL_BITS),
    'is not an object with dtype, shape, data_offsets, but [',
    'has the dtype {',
    'is there twice in one object',
    'which no array of ',
]


def file_of(header: bytes, data: bytes) -> bytes:
    return len(header).to_bytes(LENGTH, 'little') + header + data


def ours(header: bytes, data: bytes) -> tuple[list[tuple[object, ...]], str]:
    whole = file_of(header, data)
    try:
        tensors = parse_header(FILE, header, len(whole))
    except CheckpointError as error:
        assert str(error).startswith(str(FILE)), error
        assert len(str(error)) < 1000, error
        return [], str(error)
    found = [
        (tensor.name, tensor.dtype, tensor.shape, whole[tensor.begin : tensor.begin + tensor.size])
        for tensor in tensors
    ]
    return sorted(found, key=str), ''


def theirs(header: bytes, data: bytes) -> tuple[list[tuple[object, ...]], str]:
    try:
        tensors = safetensors.deserialize(file_of(header, data))
    except safetensors.SafetensorError as error:
        return [], str(error)
    found = [
        (name, it['dtype'] in DTYPES and np.dtype(DTYPES[it['dtype']]), tuple(it['shape']), bytes(it['data']))
        for name, it in tensors
    ]
    return sorted(found, key=str), ''


def compare(header: bytes, data: bytes) -> str:
    """Whether both readers say the same: 'read', 'refused', or 'stricter' where only ours refuses."""
    (mine, refused), (wanted, why) = ours(header, data), theirs(header, data)
    if not refused:
        # What Python's reader takes and the library's does not: NaN, -0, halves of surrogate pairs.
        assert not why or 'invalid JSON' in why, f'{header!r} is read, and the library refuses it: {why}'
        assert why or mine == wanted, header
        return 'read'
    if why:
        return 'refused'
    assert any(reason in refused for reason in STRICTER), f'{header!r} is refused: {refused}'
    return 'stricter'


def test_mutated_headers() -> None:
    """Others, and more of them, in `make fuzz`."""
    first, count = int(os.environ.get('FUZZ_SEED', '0')), int(os.environ.get('FUZZ_HEADERS', '6000'))
    data = bytes(range(1, 256)) * 10
    seen = dict.fromkeys(('read', 'refused', 'stricter'), 0)
    for seed in range(first, first + count):
        header, size = random_header(seed)
        seen[compare(header, data[:size])] += 1
    # Otherwise the mutations would be too wild, or too tame.
    assert all(20 * number > count for number in (seen['read'], seen['refused'])), seen
    assert seen['stricter'], seen


def test_the_dtypes_are_those_of_the_library() -> None:
    header = b'{"x":{"dtype":"none","shape":[],"data_offsets":[0,0]}}'
    _, why = theirs(header, b'')
    known = why.partition('expected one of ')[2].partition(' at line')[0].replace('`', '').split(', ')
    assert sorted(known) == sorted([*DTYPES, *SMALL_BITS])


def entry(**changes: object) -> str:
    return json.dumps({'dtype': 'F32', 'shape': [4], 'data_offsets': [0, 16], **changes})


LISTS = 'both are lists of whole numbers, at least 0, and offsets are two'


@pytest.mark.parametrize(
    ('header', 'message'),
    [
        (
            f'{{"x":{{{ENTRY}}},"x":{{{ENTRY}}}}}',
            "is no safetensors file: the key 'x' is there twice in one object",
        ),
        (
            f'{{"x":{{"dtype":"F16",{ENTRY}}}}}',
            "is no safetensors file: the key 'dtype' is there twice in one object",
        ),
        (
            f'{{"__metadata__":{{}},"x":{{{ENTRY}}},"__metadata__":{{}}}}',
            "is no safetensors file: the key '__metadata__' is there twice in one object",
        ),
        (
            f'{{"__metadata__":{{"a":3}},"x":{{{ENTRY}}}}}',
            'is no safetensors file: __metadata__ is not from text to text',
        ),
        (f'{{"x":{entry(shape={})}}}', f'is damaged: x has the shape {{}} and the offsets [0, 16]; {LISTS}'),
        (
            f'{{"x":{entry(shape=[True])}}}',
            f'is damaged: x has the shape [True] and the offsets [0, 16]; {LISTS}',
        ),
        (
            f'{{"x":{entry(data_offsets=[0])}}}',
            f'is damaged: x has the shape [4] and the offsets [0]; {LISTS}',
        ),
        (
            f'{{"x":{entry(data_offsets=[16, 0])}}}',
            'is damaged: x is float32[4], which is 16 bytes, and has -16',
        ),
        (
            f'{{"x":{entry(shape=[2], data_offsets=[8, 16])}}}',
            'is damaged: 8 bytes between the header and x belong to no tensor',
        ),
        (
            f'{{"x":{entry(shape=[3], data_offsets=[0, 12])}}}',
            'is damaged: 4 bytes behind x belong to no tensor',
        ),
        (f'{{"x":{entry()},"y":{entry()}}}', 'is damaged: x and y overlap'),
        (
            f'{{"x":{entry(shape=[5], data_offsets=[0, 20])}}}',
            'is truncated: it has 85 bytes, and its tensors need 89',
        ),
        ('{"x":3}', 'is no safetensors file: x is not an object with dtype, shape, data_offsets, but 3'),
        (
            '{"x":["F32",[4],[0,16]]}',
            'is no safetensors file: x is not an object with dtype, shape, data_offsets, but '
            "['F32', [4], [0, 16]]",
        ),
        (f'{{"x":{entry(dtype=["F32"])}}}', "is no safetensors file: x has the dtype ['F32']"),
        ('[]', 'is no safetensors file: its header is no object of tensors'),
        (
            '{',
            'is no safetensors file: Expecting property name enclosed in double quotes: '
            'line 1 column 2 (char 1)',
        ),
        (f'{{"x":{{"a":{"[" * 10**5},{ENTRY}}}}}', 'is no safetensors file: it is nested too deep'),
    ],
    ids=itertools.count(),
)
def test_messages(header: str, message: str) -> None:
    data = bytes(16)
    _, refused = ours(header.encode(), data)
    assert refused == f'{FILE} {message}'
    # There the last of equal names counts, and an entry may be a list.
    assert theirs(header.encode(), data)[1] or 'is there twice' in message or "but ['F32'" in message


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'dtype': 'F4', 'data_offsets': [0, 2]}, 'x has the dtype F4, which cannot be loaded'),
        ({'dtype': 'F33\x1b[2J'}, "x has the dtype 'F33\\x1b[2J', which cannot be loaded"),
        (
            {'shape': [0, 2**80]},
            'x has the shape [0, 1208925819614629174706176], which no array of float32 can have',
        ),
        (
            {'shape': [0, 2**62]},
            'x has the shape [0, 4611686018427387904], which no array of float32 can have',
        ),
    ],
)
def test_what_cannot_be_loaded(changes: dict[str, object], message: str) -> None:
    _, refused = ours(f'{{"x":{entry(**changes)}}}'.encode(), b'')
    assert refused == f'{FILE}: {message}'


def test_too_many_dimensions() -> None:
    _, refused = ours(f'{{"x":{entry(shape=[1] * 100)}}}'.encode(), b'')
    assert refused.startswith(f'{FILE}: x has the shape [1, 1, ')
    assert refused.endswith(' 1, 1], which no array of float32 can have')


def test_names_in_messages_are_short_and_printable() -> None:
    for name in ('a' * 10**6, '\x1b[2J', 'a\nb'):
        _, refused = ours(json.dumps({name: 3}).encode(), b'')
        assert len(refused) < 300
        assert refused.isprintable()

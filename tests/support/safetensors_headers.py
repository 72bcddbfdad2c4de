"""Random headers of safetensors files: valid ones, and ones with one or several errors."""

import json
import random
from collections.abc import Callable
from typing import Any

BITS = {
    **dict.fromkeys(('BOOL', 'U8', 'I8', 'F8_E5M2', 'F8_E4M3', 'F8_E8M0', 'F8_E4M3FNUZ', 'F8_E5M2FNUZ'), 8),
    **dict.fromkeys(('I16', 'U16', 'F16', 'BF16'), 16),
    **dict.fromkeys(('I32', 'U32', 'F32'), 32),
    **dict.fromkeys(('I64', 'U64', 'F64', 'C64'), 64),
}
SMALL_BITS = {'F4': 4, 'F6_E2M3': 6, 'F6_E3M2': 6}
NUMBERS = [
    *(0, 1, 2, 3, 4, 8, 16, -1, 255, 2**31, 2**32, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 2**80),
    *(1.0, 4.0, -0.0, 0.5, 1e300),
]
TOKENS = [
    *('NaN', 'Infinity', '-Infinity', '1e999', '-0', '00', '1.', '+1', '0x1', '1e5', '9' * 350, '9' * 320),
    *(
        '"\\ud800"',
        '"\\udc00\\ud800"',
        '"\\ud83d\\ude00"',
        '"\\u0000"',
        '"\\q"',
        '"a\x01"',
        '"a\nb"',
        '"\x7f"',
    ),
    *('[' * 130, '[' * 125 + ']' * 125, '[' * 126 + ']' * 126, '{"a":' * 125 + '1' + '}' * 125, '[' * 2000),
    *('\ufeff', '\0', '/**/', ',', ':', '}', ']', '{}', '[]', 'null', 'true', "'a'", 'é', '\u2028', '\u00a0'),
    *(
        '"dtype"',
        '"shape":[1],',
        '"dtype":"F32",',
        '"__metadata__":{},',
        '"__metadata__":null,',
        '"x":',
        ' \t\r\n',
    ),
]

Pairs = list[tuple[str, Any]]


class Object(list[Any]):
    """A JSON object as pairs, so that a key may occur twice."""


def write(value: Any) -> str:
    """Returns JSON of values and `Object`."""
    if isinstance(value, Object):
        return '{' + ','.join(f'{json.dumps(key)}:{write(item)}' for key, item in value) + '}'
    if isinstance(value, list):
        return '[' + ','.join(map(write, value)) + ']'
    return json.dumps(value)


def valid(rng: random.Random) -> tuple[Object, int]:
    """Returns a header, and the bytes of the tensors after it."""
    entries, end = Object(), 0
    dtypes = list(BITS) if rng.random() < 0.9 else [*BITS, *SMALL_BITS]
    for i in range(rng.randint(0, 4)):
        dtype = rng.choice(dtypes)
        shape = [rng.choice((0, 1, 2, 3, 4, 8)) for _ in range(rng.randint(0, 3))]
        bits = {**BITS, **SMALL_BITS}[dtype]
        for size in shape:
            bits *= size
        begin, end = end, end + bits // 8
        pairs = Object([('dtype', dtype), ('shape', shape), ('data_offsets', [begin, end])])
        rng.shuffle(pairs)
        entries.append((rng.choice(('a', 'model.w', '', 'é', 'x/y')) + str(i), pairs))
    if rng.random() < 0.3:
        entries.append(('__metadata__', rng.choice((Object([('format', 'pt')]), Object(), None))))
    rng.shuffle(entries)
    return entries, end


def anything(rng: random.Random, depth: int = 0) -> Any:
    """Returns a JSON value."""
    kind = rng.randint(0, 8 if depth < 3 else 5)
    if kind < 3:
        return rng.choice(NUMBERS)
    if kind < 6:
        return rng.choice((None, True, False, '', 'F32', 'dtype', 'a' * 300))
    inner = [anything(rng, depth + 1) for _ in range(rng.randint(0, 3))]
    return inner if kind < 8 else Object([(rng.choice('abc'), item) for item in inner])


def _tensor(rng: random.Random, header: Object) -> Object | None:
    tensors = [entry for name, entry in header if isinstance(entry, Object) and name != '__metadata__']
    return rng.choice(tensors) if tensors else None


def _set(pairs: Object, key: str, change: Callable[[Any], Any]) -> None:
    pairs[:] = [(name, change(value) if name == key else value) for name, value in pairs]


def _change_number(rng: random.Random, numbers: Any) -> Any:
    if not isinstance(numbers, list) or not numbers:
        return [rng.choice(NUMBERS)]
    numbers = [*numbers]
    index = rng.randrange(len(numbers))
    near = isinstance(numbers[index], int) and rng.random() < 0.5
    numbers[index] = numbers[index] + rng.choice((-1, 1, 8, -8)) if near else rng.choice(NUMBERS)
    return numbers


def _moved(numbers: Any, by: int) -> Any:
    return (
        [number + by for number in numbers]
        if isinstance(numbers, list) and all(type(n) is int for n in numbers)
        else numbers
    )


def change_structure(rng: random.Random, header: Object) -> None:
    """Changes one thing in a header and keeps it valid JSON."""
    tensor = _tensor(rng, header)
    kind = rng.randint(0, 12)
    if kind == 12:
        # Moves all later tensors: a hole, an overlap, or a valid header if the first tensor is missing.
        by = rng.choice((-8, -1, 1, 8))
        for pairs in [entry for _, entry in header if isinstance(entry, Object)][rng.randint(0, 2) :]:
            _set(pairs, 'data_offsets', lambda numbers: _moved(numbers, by))
    elif kind == 0 and header:
        header.insert(rng.randint(0, len(header)), rng.choice(header))
    elif kind == 1:
        header.append((rng.choice(('__metadata__', 'new', '\ud800', 'dtype')), anything(rng)))
    elif kind == 2 and header:
        header.pop(rng.randrange(len(header)))
    elif kind == 3:
        # Changes both, so that they often match.
        for pairs in [entry for _, entry in header if isinstance(entry, Object)][:2]:
            _set(pairs, 'data_offsets', lambda numbers: _change_number(rng, numbers))
    elif tensor is None:
        header.append(('x', anything(rng)))
    elif kind == 4:
        names = [*BITS, *SMALL_BITS, 'f32', 'F128', '', 3, None, Object([('F32', None)]), ['F32']]
        _set(tensor, 'dtype', lambda _: rng.choice(names))
    elif kind in (5, 6):
        _set(tensor, 'shape', lambda numbers: _change_number(rng, numbers))
    elif kind == 7:
        _set(tensor, 'data_offsets', lambda numbers: _change_number(rng, numbers))
    elif kind == 8:
        _set(tensor, rng.choice(('shape', 'data_offsets', 'dtype')), lambda _: anything(rng))
    elif kind == 9:
        tensor.insert(rng.randint(0, len(tensor)), (rng.choice(('more', 'dtype', 'shape')), anything(rng)))
    elif kind == 10:
        shape = [1] * rng.choice((63, 64, 65, 100, 3000))
        _set(tensor, 'shape', lambda sizes: [*sizes, *shape] if isinstance(sizes, list) else shape)
    else:
        items = [value for _, value in tensor]
        header[:] = [(name, items if entry is tensor else entry) for name, entry in header]


def change_text(rng: random.Random, text: bytes) -> bytes:
    """Changes one thing in the bytes of a header."""
    at, kind = rng.randint(0, len(text)), rng.randint(0, 6)
    if kind == 0:
        return text[:at] + bytes([rng.randrange(256)]) + text[at + 1 :]
    if kind == 1:
        return text[:at] + text[at + rng.randint(1, 4) :]
    if kind in (2, 3):
        return text[:at] + rng.choice(TOKENS).encode() + text[at + rng.choice((0, 0, 1, 5)) :]
    if kind == 4:
        other = rng.randint(0, len(text))
        return text[:at] + text[min(at, other) : max(at, other)] + text[at:]
    if kind == 5:
        return text + rng.choice((b' ', b'   ', b'\n', b'\0', b'x', b'{}'))
    if rng.random() < 0.1:
        return text.decode('utf-8', 'replace').encode(
            rng.choice(('utf-16', 'utf-16-le', 'utf-8-sig', 'utf-32'))
        )
    return text.replace(
        *rng.choice(((b'[', b'{'), (b'"', b"'"), (b':', b','), (b'0', b'-0'), (b',', b',,'))), 1
    )


def random_header(rng: random.Random) -> tuple[bytes, int]:
    """Returns a header, usually an invalid one, and the number of bytes after it."""
    header, size = valid(rng)
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        change_structure(rng, header)
    text = write(header).encode('utf-8', 'surrogatepass')
    for _ in range(rng.choice((0, 0, 0, 1, 1, 2))):
        text = change_text(rng, text)
    if rng.random() < 0.1:
        size = max(0, size + rng.choice((-8, -1, 1, 8, 64)))
    return text, size

"""An independent reader of collectives, to check the one of `scalax.plan`.

It *runs* the program instead of multiplying trip counts: it computes integers, represents arrays by their
types, and counts each collective as it executes. To find the mesh axes of a collective, it enumerates the
groups of every set of axes. Unknown instructions fail an assertion.
"""

import collections
import itertools
import re
import tempfile
from pathlib import Path

BYTES = {'pred': 1, 's8': 1, 'u8': 1, 'bf16': 2, 'f16': 2, 's32': 4, 'u32': 4, 'f32': 4, 's64': 8, 'f64': 8}
PARTS = ('reduce-scatter', 'all-to-all', 'collective-permute')
KINDS = ('all-gather', 'all-reduce', *PARTS)
COMPARED = {
    'LT': int.__lt__,
    'LE': int.__le__,
    'GT': int.__gt__,
    'GE': int.__ge__,
    'EQ': int.__eq__,
    'NE': int.__ne__,
}
COMPUTED = {'add': int.__add__, 'subtract': int.__sub__, 'multiply': int.__mul__}
SAME = ('copy', 'convert', 'bitcast', 'reshape', 'opt-barrier')


def after_partitioning(lowered, **options):
    """Returns the HLO after the partitioner from the compiler's dump, even if compiling fails."""
    with tempfile.TemporaryDirectory() as folder:
        dump = {
            'xla_dump_to': folder,
            'xla_dump_hlo_as_text': True,
            'xla_dump_hlo_pass_re': '.*partitioning.*',
        }
        try:
            lowered.compile(compiler_options={**dump, **options})
        except RuntimeError as error:
            assert 'exceeds available HBM' in str(error)
        [text] = [
            path.read_text()
            for path in Path(folder).iterdir()
            if re.search(r'\.after_(tpu-)?spmd-partitioning', path.name)
        ]
    return text


def read(text, mesh):
    """Returns (kind, mesh axes) -> (executions, bytes of all executions), for a mesh of name -> size."""
    reader = Reader(text, mesh)
    reader.run(reader.entry, [None] * 10_000)
    return {key: tuple(value) for key, value in reader.collectives.items()}


class Reader:
    def __init__(self, text, mesh):
        self.mesh, self.bodies, self.entry = mesh, {}, ''
        self.collectives = collections.defaultdict(lambda: [0, 0])
        body = None
        for line in text.splitlines():
            if line.endswith('{') and not line.startswith((' ', 'HloModule')):
                name = line.removeprefix('ENTRY ').split()[0].lstrip('%')
                body = self.bodies[name] = []
                self.entry = name if line.startswith('ENTRY') else self.entry
            elif line.startswith('}'):
                body = None
            elif body is not None:
                body.append(instruction(line))

    def run(self, name, arguments):
        values, result, gathered = {}, None, set()
        for root, target, type_, opcode, inside, rest in self.bodies[name]:
            words = re.findall(r'%([\w.\-]+)(?:#(\d+))?', inside)
            operands = [element(values.get(word), index) for word, index in words]
            if opcode == 'all-gather':
                # The partitioner writes one per use; the compiler later merges equal values.
                same = inside, type_, str(self.groups(rest)), re.search(r'dimensions=\{\d*\}', rest)[0]
                if same in gathered:
                    continue
                gathered.add(same)
            if opcode == 'parameter':
                value = arguments[int(inside)]
            elif opcode == 'constant':
                value = {'true': 1, 'false': 0}.get(inside)
                value = int(inside) if re.fullmatch(r'-?\d+', inside) else value
            else:
                value = self.value(opcode, operands, type_, rest)
            values[target] = value
            result = value if root else result
        return result

    def value(self, opcode, operands, type_, rest):
        if opcode == 'tuple':
            return tuple(operands)
        if opcode == 'get-tuple-element':
            return operands[0] and operands[0][int(re.search(r'index=(\d+)', rest)[1])]
        if opcode in SAME:
            return operands[0]
        if opcode in COMPUTED and None not in operands:
            return COMPUTED[opcode](*operands)
        if opcode == 'compare' and None not in operands:
            return int(COMPARED[re.search(r'direction=(\w+)', rest)[1]](*operands))
        if opcode == 'while':
            condition, body = (re.search(rf'{key}=%?([\w.\-]+)', rest)[1] for key in ('condition', 'body'))
            state = operands[0]
            while True:
                again = self.run(condition, [state])
                assert again is not None, 'a loop whose length depends on data'
                if not again:
                    return state
                state = self.run(body, [state])
        if opcode in ('call', 'fusion'):
            return self.run(re.search(r'(?:to_apply|calls)=%?([\w.\-]+)', rest)[1], operands)
        assert opcode != 'conditional'
        if opcode in KINDS:
            self.count(opcode, type_, rest)
        assert opcode in KINDS or not any(kind in opcode for kind in KINDS), opcode
        return None

    def count(self, kind, type_, rest):
        if kind == 'collective-permute':
            pairs = re.search(r'source_target_pairs=\{(\{[^=]*\})\}', rest)[1]
            groups = [
                {int(number) for number in pair.split(',')} for pair in re.findall(r'\{([\d,]+)\}', pairs)
            ]
        else:
            groups = [set(group) for group in self.groups(rest)]
        axes = min(
            (
                axes
                for axes in self.sets_of_axes()
                if all(any(group <= devices for devices in self.along(axes)) for group in groups)
            ),
            key=len,
        )
        size = len(self.along(axes)[0]) if kind == 'collective-permute' else len(groups[0])
        if size == 1:
            return
        moved = sum(
            BYTES[dtype] * product(int(dim) for dim in dims.split(',') if dim)
            for dtype, dims in re.findall(r'(\w+)\[([\d,]*)\]', type_)
        )
        cell = self.collectives[kind, axes]
        cell[0] += 1
        cell[1] += moved * (size if kind in PARTS else 1)

    def groups(self, rest):
        text = rest[rest.index('replica_groups=') + len('replica_groups=') :]
        if text.startswith('{'):
            listed = re.match(r'\{((?:\{[\d,]*\},?)*)\}', text)[1]
            return [
                [int(number) for number in group.split(',')] for group in re.findall(r'\{([\d,]+)\}', listed)
            ]
        if text.startswith('['):
            rows, ids = re.match(r'\[(\d+),\d+\]<=(\[[\d,]+\](?:T\([\d,]+\))?)', text).groups()
            order = in_order(ids)
            group_size = len(order) // int(rows)
            return [order[start : start + group_size] for start in range(0, len(order), group_size)]
        # As in mesh['a'=4,'b'=2], device_ids=([4,2]T(1,0)) {'a'}
        sizes, ids, named = re.match(
            r'mesh\[([^\]]+)\](?:, device_ids=\((\[[\d,]+\](?:T\([\d,]+\))?)\))? \{([^}]*)\}', text
        ).groups()
        mesh = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", sizes)}
        order = in_order(ids or f'[{product(mesh.values())}]')
        axes = re.findall(r"'(\w+)'", named)
        assert ':' not in named
        return [[order[position] for position in group] for group in along(mesh, axes)]

    def sets_of_axes(self):
        for count in range(len(self.mesh) + 1):
            yield from itertools.combinations(self.mesh, count)

    def along(self, axes):
        return [set(group) for group in along(self.mesh, axes)]


def instruction(line):
    """Parses a line: (is it the root, name, type, operation, text in its brackets, text after them)."""
    root, name, text = re.match(r'\s+(ROOT )?%?([\w.\-]+) = (.*)', re.sub(r'/\*.*?\*/', '', line)).groups()
    end = closing(text, 0) + 1 if text.startswith('(') else text.index(' ')
    type_, text = text[:end], text[end:].strip()
    start = text.index('(')
    end = closing(text, start)
    return bool(root), name, type_, text[:start], text[start + 1 : end], text[end + 1 :]


def element(value, index):
    """Returns the element of a tuple that ``%name#2`` names; without a number, the value itself."""
    return value if not index or value is None else value[int(index)]


def closing(text, start):
    depth = 0
    for position in range(start, len(text)):
        depth += {'(': 1, ')': -1}.get(text[position], 0)
        if depth == 0:
            return position
    raise AssertionError(text)


def product(numbers):
    result = 1
    for number in numbers:
        result *= number
    return result


def in_order(text):
    """``[4,2]T(1,0)``: returns the numbers of a 4 x 2 table, read by columns."""
    shape, turned = re.match(r'\[([\d,]+)\](?:T\(([\d,]+)\))?', text).groups()
    shape = [int(size) for size in shape.split(',')]
    turned = [int(axis) for axis in turned.split(',')] if turned else list(range(len(shape)))
    strides = [product(shape[axis + 1 :]) for axis in range(len(shape))]
    return [
        sum(index * strides[axis] for index, axis in zip(indices, turned, strict=True))
        for indices in itertools.product(*(range(shape[axis]) for axis in turned))
    ]


def along(mesh, axes):
    """Returns the devices of a mesh in groups, within which positions differ along *axes* only."""
    groups = collections.defaultdict(list)
    for device, indices in enumerate(itertools.product(*map(range, mesh.values()))):
        groups[tuple(i for name, i in zip(mesh, indices, strict=True) if name not in axes)].append(device)
    return list(groups.values())

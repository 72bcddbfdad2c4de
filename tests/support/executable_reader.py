"""An independent reader of executables of the TPU compiler, to check the one of `scalax.plan`.

It *runs* a program instead of reading trip counts: it computes integers, represents arrays by their types,
and counts each collective, matmul and host transfer as it executes. Unknown instructions fail an assertion.
It reads both ``Compiled.as_text()`` and the dump ``after_optimizations``.

Forms that the TPU compiler writes:

- An asynchronous collective that overlaps with other work occurs several times: in a fusion with
  ``AsyncCollectiveStart``, in the fusions that it overlaps with, and in one with ``AsyncCollectiveDone``.
  Each consumes the result of the one before. All of them are one execution, which is counted at the first.
- An all-reduce and a slice of its result in one fusion are counted as a reduce-scatter.
- A collective across slices is a ``send`` and a ``recv`` whose attributes name its kind and its slices. The
  groups of other collectives are within one slice, whose devices are numbered from 0.
- A type with ``S(5)`` in its layout is in host memory.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import json
import math
import operator
import re
from typing import Any, NamedTuple

BYTES = {
    **dict.fromkeys(('pred', 's8', 'u8', 'f8e4m3fn', 'f8e5m2'), 1),
    **dict.fromkeys(('s16', 'u16', 'bf16', 'f16'), 2),
    **dict.fromkeys(('s32', 'u32', 'f32'), 4),
    **dict.fromkeys(('s64', 'u64', 'f64', 'c64'), 8),
}
# Collectives whose result is one shard of the group's array.
PARTS = ('reduce-scatter', 'all-to-all', 'collective-permute', 'ragged-all-to-all')
KINDS = ('all-gather', 'all-reduce', 'collective-broadcast', *PARTS)
HOST = 5

WHOLE_NUMBERS = ('s32', 'u32', 's64', 'u64', 's8', 'u8', 'pred')
COMPARED = {'LT': operator.lt, 'LE': operator.le, 'GT': operator.gt, 'GE': operator.ge}
COMPARED |= {'EQ': operator.eq, 'NE': operator.ne}
COMPUTED = {
    'add': operator.add,
    'subtract': operator.sub,
    'multiply': operator.mul,
    'maximum': max,
    'minimum': min,
    'and': operator.and_,
    'or': operator.or_,
    'clamp': lambda low, x, high: min(max(low, x), high),
    'select': lambda condition, yes, no: yes if condition else no,
}
SAME = ('copy', 'convert', 'bitcast', 'reshape', 'opt-barrier')
# Operations on the arrays of one device, which are not counted.
LOCAL = {
    *(
        'abs',
        'add-dependency',
        'after-all',
        'atan2',
        'bitcast-convert',
        'broadcast',
        'cbrt',
        'ceil',
        'compare',
    ),
    *('concatenate', 'cosine', 'divide', 'dynamic-slice', 'dynamic-update-slice', 'erf', 'exponential'),
    *(
        'exponential-minus-one',
        'floor',
        'gather',
        'iota',
        'is-finite',
        'log',
        'log-plus-one',
        'map',
        'negate',
    ),
    *('not', 'pad', 'partition-id', 'power', 'reduce', 'reduce-precision', 'reduce-window', 'remainder'),
    *('replica-id', 'reverse', 'rng-bit-generator', 'round-nearest-afz', 'round-nearest-even', 'rsqrt'),
    *('scatter', 'select-and-scatter', 'shift-left', 'shift-right-arithmetic', 'shift-right-logical', 'sign'),
    *('sine', 'slice', 'sort', 'sqrt', 'tan', 'tanh', 'transpose', 'xor'),
    *COMPUTED,
}
# Attributes that name the computation of a fusion, loop, branch or asynchronous operation.
CALLED = ('calls', 'to_apply', 'body', 'condition')
# Moves nothing: an alias, or a call to a computation whose instructions are counted.
STILL = (
    *('parameter', 'constant', 'tuple', 'get-tuple-element', 'bitcast', 'while', 'conditional', 'call'),
    *('after-all', 'add-dependency', 'opt-barrier', 'partition-id', 'replica-id'),
    *('async-update', 'call-update'),
)
CUSTOM = (
    *('AllocateBuffer', 'ConcatBitcast', 'AssumeGatherIndicesInBound', 'GatherScatterIndicesBitpacked'),
    *('tpu_custom_call', 'AsyncCollectiveStart', 'AsyncCollectiveDone', 'SliceId', 'ZeroCrop'),
)
# The kinds of collectives between slices.
ACROSS_SLICES = {
    'ALL_GATHER': 'all-gather',
    'ALL_REDUCE': 'all-reduce',
    'REDUCE_SCATTER': 'reduce-scatter',
    'ALL_TO_ALL': 'all-to-all',
    'ONE_TO_ONE': 'collective-permute',
}

Key = tuple[str, tuple[str, ...]]


@dataclasses.dataclass
class Counts:
    """The work of one device in one step.

    Attributes:
        collectives: (kind, mesh axes) -> (executions, bytes of all executions). The bytes are the full array
            of one group: the result of an all-gather, the operand of a reduce-scatter.
        flops: the FLOPs of matmuls and convolutions (``dot`` and ``convolution``), two for each
            multiplication, except by padding.
        to_host: the bytes that are written to host memory.
        from_host: the bytes that are read from host memory.
        hbm: an upper bound of the bytes that are read from and written to device memory: all operands and
            results of each instruction that moves data.
        modelled: microseconds of the kernels that the GPU compiler has a model for.
    """

    collectives: dict[Key, tuple[int, int]] = dataclasses.field(default_factory=dict)
    flops: int = 0
    to_host: int = 0
    from_host: int = 0
    hbm: int = 0
    modelled: float = 0.0

    def add(self, other: Counts) -> None:
        for key, (count, moved) in other.collectives.items():
            before = self.collectives.get(key, (0, 0))
            self.collectives[key] = before[0] + count, before[1] + moved
        self.flops += other.flops
        self.to_host += other.to_host
        self.from_host += other.from_host
        self.hbm += other.hbm
        self.modelled += other.modelled


def read(text: str, mesh: dict[str, int], slices: int = 1) -> Counts:
    """Returns the counts of the program in *text*, on a mesh given as name -> size.

    Slices are blocks of the first mesh axis.
    """
    reader = _Reader(_module(text), mesh, slices)
    reader.run(reader.module.entry, [None] * 100_000)
    return reader.counts


# --- Running -----------------------------------------------------------------------------------------


class _Underway(NamedTuple):
    """The value that an asynchronous collective passes from one of its fusions to the next."""

    kind: str
    channel: str
    chain: str


class _Reader:
    def __init__(self, module: _Module, mesh: dict[str, int], slices: int) -> None:
        self.module, self.mesh, self.slices, self.counts = module, mesh, slices, Counts()

    def run(self, name: str, arguments: list[Any]) -> Any:
        """Runs a computation, and returns the value of its root: None for an array, a tuple for a tuple."""
        values: dict[str, Any] = {}
        result = None
        for line in self.module.bodies[name]:
            if line.opcode == 'parameter':
                value = arguments[int(line.inside)]
            elif line.opcode == 'constant':
                value = _constant(line)
            else:
                operands = [_element(values[word], path) for word, path in line.operands]
                if name not in self.module.fused:
                    self.counts.hbm += self.hbm(line)
                self.counts.modelled += self.modelled(line)
                value = self.value(line, operands)
            values[line.name] = value
            if line.root:
                result = value
        return result

    def value(self, line: _Line, operands: list[Any]) -> Any:
        opcode = line.opcode
        if opcode == 'tuple':
            return tuple(operands)
        if opcode == 'get-tuple-element':
            return _element(operands[0], (int(line.attributes['index']),))
        if opcode in ('fusion', 'fusion-start'):
            called = line.attributes['calls']
            return self.run(called, operands) if self.matters(called) else None
        if opcode == 'while':
            return self.loop(line, operands[0])
        if opcode == 'conditional':
            return self.branch(line, operands)
        if opcode in ('call', 'async-start', 'call-start'):
            # An operation on another core may get its operands later, by an update.
            later = [None] * 100
            return self.run(line.attributes.get('calls') or line.attributes['to_apply'], [*operands, *later])
        if opcode == 'custom-call':
            return self.custom(line, operands)
        if opcode in ('convolution', 'dot'):
            self.counts.flops += self.flops(line)
            return None
        kind = opcode.removesuffix('-start')
        if kind in KINDS:
            return self.collective(line, kind, operands)
        if opcode in ('send', 'recv'):
            return self.between_slices(line)
        if opcode.endswith(('-done', '-update')):
            started = opcode.rpartition('-')[0]
            assert started in (*KINDS, *LOCAL, *SAME, 'async', 'call', 'fusion', 'send', 'recv'), opcode
            return None
        self.transfer(line, kind)
        if kind in SAME:
            return operands[0]
        assert kind in LOCAL, opcode
        if opcode != kind or None in operands or not operands or line.shape.dtype not in WHOLE_NUMBERS:
            return None
        if opcode == 'compare':
            return int(COMPARED[line.attributes['direction']](*operands))
        if opcode in COMPUTED:
            bits = 1 if line.shape.dtype == 'pred' else 8 * BYTES[line.shape.dtype]
            value = COMPUTED[opcode](*operands) % 2**bits
            return value - 2**bits if line.shape.dtype[0] == 's' and value >= 2 ** (bits - 1) else value
        return None

    def loop(self, line: _Line, state: Any) -> Any:
        condition, body = line.attributes['condition'], line.attributes['body']
        rounds = 0
        while again := self.run(condition, [state]):
            state = self.run(body, [state])
            rounds += 1
        if again is None:
            trip_count = line.config().get('known_trip_count')
            assert trip_count, f'a loop whose length depends on data: {line.name}'
            for _ in range(rounds, int(trip_count['n'])):
                state = self.run(body, [state])
        return state

    def branch(self, line: _Line, operands: list[Any]) -> None:
        """Runs all branches; counts collectives, matmuls and transfers of the one with the most of each."""
        if 'branch_computations' in line.attributes:
            branches = re.findall(r'%([\w.\-]+)', line.attributes['branch_computations'])
        else:
            branches = [line.attributes[f'{way}_computation'].lstrip('%') for way in ('true', 'false')]
        before, counts = self.counts, []
        for branch, operand in zip(branches, operands[1:], strict=True):
            self.counts = Counts()
            self.run(branch, [operand])
            counts.append(self.counts)
        self.counts = before
        self.counts.add(
            Counts(
                max(
                    (total.collectives for total in counts),
                    key=lambda collectives: sum(moved for _, moved in collectives.values()),
                ),
                max(total.flops for total in counts),
                max(total.to_host for total in counts),
                max(total.from_host for total in counts),
                max(total.hbm for total in counts),
                max(total.modelled for total in counts),
            )
        )

    def custom(self, line: _Line, operands: list[Any]) -> Any:
        target = line.attributes['custom_call_target'].strip('"')
        if target.startswith(('__cublas$', '__cudnn$conv')):
            self.counts.flops += self.flops_of_library(line, target)
            return None
        if target.startswith('__cudnn$fmha'):
            self.counts.flops += self.flops_of_attention(line, target)
            return None
        assert target in CUSTOM, target
        if target == 'AsyncCollectiveStart':
            [underway] = operands
            assert isinstance(underway, _Underway), line.name
            return (underway,) * len(line.shape)
        assert target != 'AsyncCollectiveDone' or any(isinstance(value, _Underway) for value in operands)
        return None

    # --- What is counted --------------------------------------------------------------------------

    def collective(self, line: _Line, kind: str, operands: list[Any]) -> Any:
        underway = None
        if fusion := line.config().get('async_collective_fusion_config'):
            chain = line.attributes.get('frontend_attributes', '')
            underway = _Underway(kind, line.attributes['channel_id'], chain)
            if underway in operands:
                return underway
            assert fusion['flag_start'] == '-1', f'not the first of its fusions: {line.name}'
        assert not any(isinstance(value, _Underway) for value in operands), line.name
        scattered = kind == 'all-reduce' and self.scattered(line)
        axes, size = self.across(kind, line)
        if not axes:
            return underway
        moved = _bytes(_result(line)) * (size if kind in PARTS else 1)
        self.counts.add(Counts({('reduce-scatter' if scattered else kind, axes): (1, moved)}))
        return underway

    @functools.cache  # noqa: B019 - a reader lives for one test
    def across(self, kind: str, line: _Line) -> tuple[tuple[str, ...], int]:
        """Returns the mesh axes along which a collective runs, and the devices of a group."""
        if kind == 'collective-permute':
            groups = [list(pair) for pair in _listed(line.attributes['source_target_pairs'])]
        else:
            groups = replica_groups(line.attributes['replica_groups'])
            assert sum(map(len, groups)) == math.prod(self.mesh.values()) // self.slices
        axes = axes_of(groups, self.mesh)
        size = math.prod(self.mesh[axis] for axis in axes)
        return axes, size if kind == 'collective-permute' else max(map(len, groups))

    def between_slices(self, line: _Line) -> None:
        words = dict(
            re.findall(r'(_xla_\w+)=((?:"[^"]*")|\{\{.*?\}\})', line.attributes['frontend_attributes'])
        )
        assert words['_xla_host_transfer_handler_name'] == '"xla_megascale_runtime"', 'a transfer to the host'
        if line.opcode == 'send':
            return
        kind = ACROSS_SLICES[words['_xla_megascale_transfer_type'].strip('"')]
        groups = slice_groups(words['_xla_megascale_target'])
        # The first device of each slice represents the others.
        slice_size = math.prod(self.mesh.values()) // self.slices
        axes = axes_of([[(number - 1) * slice_size for number in group] for group in groups], self.mesh)
        size = max(map(len, groups))
        if kind == 'collective-permute':
            size = math.prod(self.mesh[axis] for axis in axes)
        moved = _bytes(line.shape[0]) * (size if kind in PARTS else 1)
        self.counts.add(Counts({(kind, axes): (1, moved)}))

    @functools.cache  # noqa: B019 - a reader lives for one test
    def scattered(self, line: _Line) -> bool:
        """Returns whether an all-reduce is in a fusion that only uses slices of it."""
        [name] = [name for name, body in self.module.bodies.items() if line in body]
        body = self.module.bodies[name]
        parts = {line.name} | {
            user.name
            for user in body
            if user.opcode == 'get-tuple-element' and user.operands[0][0] == line.name
        }
        users = [user for user in body if any(word in parts for word, _ in user.operands)]
        opcodes = {user.opcode for user in users if user.name not in parts}
        result = name in self.module.fused and opcodes == {'dynamic-slice'}
        assert result == name.startswith('all-reduce-scatter'), name
        return result

    @functools.cache  # noqa: B019 - a reader lives for one test
    def flops(self, line: _Line) -> int:
        left, right = (self.module.shape(line, index) for index in (0, 1))
        if line.opcode == 'dot':
            over = [int(index) for index in re.findall(r'\d+', line.attributes['lhs_contracting_dims'])]
            return 2 * math.prod(line.shape.dims) * math.prod(left.dims[index] for index in over)
        return 2 * _multiplications(line, left, right)

    @functools.cache  # noqa: B019 - a reader lives for one test
    def flops_of_library(self, line: _Line, target: str) -> int:
        """Returns the FLOPs of a cuBLAS matmul or cuDNN convolution; its result also has scratch space."""
        left, right, result = (*(self.module.shape(line, index) for index in (0, 1)), line.shape[0])
        if target.startswith('__cublas$'):
            numbers = json.loads(line.attributes['backend_config'])['gemm_backend_config']
            over = map(int, numbers['dot_dimension_numbers']['lhs_contracting_dimensions'])
            return 2 * math.prod(result.dims) * math.prod(left.dims[index] for index in over)
        # A gradient has the window of the forward convolution.
        if target == '__cudnn$convBackwardInput':
            left, result = result, left
        elif target == '__cudnn$convBackwardFilter':
            right, result = result, right
        return 2 * _multiplications(dataclasses.replace(line, shape=result), left, right)

    @functools.cache  # noqa: B019 - a reader lives for one test
    def flops_of_attention(self, line: _Line, target: str) -> int:
        """Returns the FLOPs of unmasked attention: each matmul has the size of the scores times a head."""
        config = line.config()['cudnn_fmha_backend_config']
        assert config['mask_type'] == 'NO_MASK' and config['sliding_window_length'] == 0
        scores = math.prod(map(int, config['intermediate_tensor_shape']['dimensions']))
        products = sum(key.endswith('dot_dimension_numbers') for key in config)
        query = self.module.shape(line, 0)
        assert query.dims[-1] == self.module.shape(line, 2).dims[-1]
        # The backward pass also recomputes the scores, a matmul that the call does not name.
        return 2 * scores * query.dims[-1] * (products + target.endswith('Backward'))

    def transfer(self, line: _Line, kind: str) -> None:
        """Counts the bytes that a copy or a slice moves between device and host."""
        shape = line.shape
        if line.opcode == 'copy-start':
            shape = shape[0]
        elif line.opcode != kind:
            shape = shape[1]
        sources = [self.module.shape(line, index) for index in range(len(line.operands))]
        if all(array.space != HOST for array in _arrays((shape, *sources))):
            return
        assert kind in ('copy', 'slice', 'dynamic-slice', 'dynamic-update-slice', 'bitcast'), line.opcode
        # It writes an entire array, or a slice of another one.
        source, moved = (sources[1], sources[1]) if kind == 'dynamic-update-slice' else (sources[0], shape)
        if source.space != HOST and shape.space == HOST:
            self.counts.to_host += _bytes(moved)
        elif source.space == HOST and shape.space != HOST:
            self.counts.from_host += _bytes(moved)

    @functools.cache  # noqa: B019 - a reader lives for one test
    def hbm(self, line: _Line) -> int:
        """Returns an upper bound of the bytes that an instruction reads from and writes to device memory."""
        if line.opcode in STILL:
            return 0
        shapes = [self.module.shape(line, index) for index in range(len(line.operands))]
        shapes = [] if line.opcode.endswith('-done') else shapes
        begins = line.opcode.endswith('-start') or line.opcode in ('send', 'recv')
        shapes += [] if begins else [line.shape]
        return sum(
            _bytes(array) for array in _arrays(tuple(shapes)) if array.space == 0 and array.dtype != 'token'
        )

    @functools.cache  # noqa: B019 - a reader lives for one test
    def modelled(self, line: _Line) -> float:
        """Returns the microseconds of a kernel that XLA for GPUs has annotated."""
        if line.opcode not in ('fusion', 'custom-call'):
            return 0.0
        # XLA writes 'NaN' and 'Infinity' as strings; they are not times.
        costs = {
            cost['name']: cost['exec_time_us']
            for cost in line.config().get('reification_cost', ())
            if not isinstance(cost['exec_time_us'], str)
        }
        if line.attributes.get('kind') == 'kCustom' and costs.get('sol') == 0.01:  # unknown
            inside = self.module.bodies[line.attributes['calls']]
            library = any(instruction.opcode == 'custom-call' for instruction in inside)
            return 0.0 if library else costs.get('indexing-cost-model', 0.0)
        microseconds = costs.get('sol', 0.0)
        if microseconds and line.opcode == 'custom-call':
            result = line.shape[0]
            types = {result.dtype, *(self.module.shape(line, index).dtype for index in (0, 1))}
            if types not in ({'bf16'}, {'f32'}):  # not measured: XLA scales it with the bytes of the result
                microseconds /= BYTES[result.dtype] ** 3
        return microseconds

    @functools.cache  # noqa: B019 - a reader lives for one test
    def matters(self, name: str) -> bool:
        """Returns whether a fusion contains something to count; other fusions need not run."""
        for line in self.module.bodies[name]:
            if any(kind in line.opcode for kind in (*KINDS, 'convolution', 'dot', 'custom-call', '-start')):
                return True
            shapes = _arrays(line.shape)
            if any(array.space == HOST for array in shapes):
                return True
            if line.root and any(array.dtype in WHOLE_NUMBERS and not array.dims for array in shapes):
                return True
            if any(self.matters(line.attributes[key]) for key in CALLED if key in line.attributes):
                return True
        return False


def _element(value: Any, path: tuple[int, ...]) -> Any:
    """Returns the element of a tuple that ``%name#2`` names; without a number, the value itself."""
    for index in path:
        value = None if value is None else value[index]
    return value


def _constant(line: _Line) -> int | None:
    if line.inside in ('true', 'false'):
        return int(line.inside == 'true')
    is_integer = isinstance(line.shape, _Array) and line.shape.dtype in WHOLE_NUMBERS and not line.shape.dims
    return int(line.inside) if is_integer else None


def _result(line: _Line) -> Any:
    """Returns the shape of a collective's result; an asynchronous collective's also contains its operands."""
    started = ('all-gather-start', 'collective-permute-start', 'all-to-all-start', 'reduce-scatter-start')
    if line.opcode in started:
        return line.shape[1]
    if line.opcode == 'all-reduce-start' and not isinstance(line.shape, _Array):
        operands, result = line.shape if len(line.shape) == 2 else ((), line.shape)
        return line.shape if isinstance(operands, _Array) else result
    assert not line.opcode.endswith('-start') or line.opcode == 'all-reduce-start', line.opcode
    return line.shape


def _multiplications(line: _Line, left: _Array, right: _Array) -> int:
    """Counts the multiplications of a convolution: the window positions inside the array, by dimension."""
    inputs, kernel, outputs = re.fullmatch(r'(\w+)_(\w+)->(\w+)', line.attributes['dim_labels']).groups()
    result = right.dims[kernel.index('i')]
    result *= line.shape.dims[outputs.index('b')] * line.shape.dims[outputs.index('f')]
    window = dict(re.findall(r'(\w+)=([\w\-]+)', line.attributes.get('window', '')))
    for number, label in enumerate(label for label in sorted(outputs) if label.isdigit()):
        along = {key: text.split('x')[number] for key, text in window.items()}
        low = int(along.get('pad', '0_0').split('_')[0])
        stride, apart, spread = (int(along.get(key, 1)) for key in ('stride', 'rhs_dilate', 'lhs_dilate'))
        size = left.dims[inputs.index(label)]
        places = [
            out * stride + tap * apart - low
            for out in range(line.shape.dims[outputs.index(label)])
            for tap in range(right.dims[kernel.index(label)])
        ]
        result *= sum(position % spread == 0 and 0 <= position // spread < size for position in places)
    return result


# --- Groups ------------------------------------------------------------------------------------------


def replica_groups(text: str) -> list[list[int]]:
    """Returns groups of devices from any notation of HLO.

    Example:
        >>> replica_groups('{{0,1},{2,3}}')
        [[0, 1], [2, 3]]
        >>> replica_groups('[2,4]<=[4,2]T(1,0)')
        [[0, 2, 4, 6], [1, 3, 5, 7]]
        >>> replica_groups("mesh['a'=4,'b'=2] {'a'}")
        [[0, 2, 4, 6], [1, 3, 5, 7]]
        >>> replica_groups("mesh['a'=4] {'a':(2)2}")
        [[0, 1], [2, 3]]
    """
    if text.startswith('{'):
        return [list(group) for group in _listed(text)]
    if text.startswith('['):
        [(rows, group_size, ids)] = re.findall(r'^\[(\d+),(\d+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)$', text)
        order = in_order(ids)
        assert len(order) == int(rows) * int(group_size)
        return [order[start : start + int(group_size)] for start in range(0, len(order), int(group_size))]
    form = r'mesh\[([^\]]+)\](?:, device_ids=\((\[[\d,]+\](?:T\([\d,]+\))?)\))? \{([^}]*)\}'
    [(sizes, ids, axes)] = re.findall(rf'^{form}$', text)
    mesh = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", sizes)}
    order = in_order(ids) if ids else list(range(math.prod(mesh.values())))
    # A sub-axis splits an axis into three parts: the middle one has the size *size*, and the part before it
    # has the size *before*: 'a':(before)size.
    split: dict[str, int] = {}
    named = re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", axes)
    for name, size in mesh.items():
        cuts = {1, size}
        for other, before, part in named:
            cuts |= {int(before), int(before) * int(part)} if other == name and part else set()
        for low, high in itertools.pairwise(sorted(cuts)):
            assert high % low == 0
            split[f'{name} {low}'] = high // low
        if size == 1:
            split[f'{name} 1'] = 1
    used = []
    for name, before, part in named:
        low, high = (int(before), int(before) * int(part)) if part else (1, mesh[name])
        used += [
            piece
            for piece in split
            if piece.rpartition(' ')[0] == name and low <= int(piece.rpartition(' ')[2]) < max(high, low + 1)
        ]
    return [[order[position] for position in group] for group in _along(split, used)]


def slice_groups(text: str) -> list[list[int]]:
    """Returns groups of slices, numbered from 1, from the notations of transfers between slices.

    Example:
        >>> slice_groups('"{1,2}x{0:7}"')  # devices 0 to 7 of slice 1, each with its counterpart in slice 2
        [[1, 2]]
        >>> slice_groups('{{100000,200000},{100001,200001}}')  # 100,000 times the slice, plus the device
        [[1, 2], [1, 2]]
        >>> slice_groups('{{100000->200000},{200000->100000}}')
        [[1, 2], [2, 1]]
    """
    if match := re.fullmatch(r'"\{([\d,]+)\}x\{[\d:]+\}"', text):
        return [[int(number) for number in match[1].split(',')]]
    groups = [list(group) for group in _listed(text.replace('->', ','))]
    assert all(len({device % 100_000 for device in group}) == 1 for group in groups), (
        'places in slices differ'
    )
    return [[device // 100_000 for device in group] for group in groups]


def in_order(text: str) -> list[int]:
    """``[4,2]T(1,0)``: returns the numbers of a 4 x 2 table, read by columns."""
    [(shape, turned)] = re.findall(r'^\[([\d,]+)\](?:T\(([\d,]+)\))?$', text)
    sizes = [int(size) for size in shape.split(',')]
    order = [int(axis) for axis in turned.split(',')] if turned else list(range(len(sizes)))
    strides = [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
    return [
        sum(index * strides[axis] for index, axis in zip(indices, order, strict=True))
        for indices in itertools.product(*(range(sizes[axis]) for axis in order))
    ]


def axes_of(groups: list[list[int]], mesh: dict[str, int]) -> tuple[str, ...]:
    """Returns the mesh axes along which devices of any group differ; devices are row-major mesh positions."""
    different = set()
    for group in groups:
        for number, axis in enumerate(mesh):
            inner = math.prod(list(mesh.values())[number + 1 :])
            if len({device // inner % mesh[axis] for device in group}) > 1:
                different.add(axis)
    return tuple(axis for axis in mesh if axis in different)


def _along(mesh: dict[str, int], axes: list[str]) -> list[list[int]]:
    """Returns the devices in groups, within which positions differ along *axes* only."""
    groups = collections.defaultdict(list)
    for device, indices in enumerate(itertools.product(*map(range, mesh.values()))):
        groups[tuple(i for name, i in zip(mesh, indices, strict=True) if name not in axes)].append(device)
    return list(groups.values())


def _listed(text: str) -> list[tuple[int, ...]]:
    assert re.fullmatch(r'\{(\{[\d,]+\},?)+\}', text), text[:100]
    return [tuple(map(int, group.split(','))) for group in re.findall(r'\{([\d,]+)\}', text)]


# --- Parsing -----------------------------------------------------------------------------------------


class _Array(NamedTuple):
    dtype: str
    dims: tuple[int, ...]
    space: int


@dataclasses.dataclass(frozen=True, eq=False)
class _Line:
    """An instruction. The shape of an array is an `_Array`, the shape of a tuple is a tuple of shapes."""

    root: bool
    name: str
    shape: Any
    opcode: str
    inside: str
    operands: tuple[tuple[str, tuple[int, ...]], ...]
    attributes: dict[str, str]

    def config(self) -> dict[str, Any]:
        text = self.attributes.get('backend_config', '')
        read = ('async_collective', 'fmha', 'known_trip', 'reification_cost')
        return json.loads(text) if any(word in text for word in read) else {}


@dataclasses.dataclass
class _Module:
    """The computations of a program by name, its entry, and computations that callers count."""

    bodies: dict[str, list[_Line]]
    entry: str
    fused: set[str]
    shapes: dict[int, dict[str, Any]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for body in self.bodies.values():
            shapes = {line.name: line.shape for line in body}
            self.shapes |= {id(line): shapes for line in body}

    def shape(self, line: _Line, index: int) -> Any:
        """Returns the shape of an operand."""
        name, path = line.operands[index]
        shape = self.shapes[id(line)][name]
        for number in path:
            shape = shape[number]
        return shape


def _module(text: str) -> _Module:
    bodies: dict[str, list[_Line]] = {}
    entry, fused = '', set()
    # A computation ends with a line that is just a brace. Quoted lines may look like any other line.
    for match in re.finditer(r'^(ENTRY )?%?([\w.\-]+) \([^\n]*\{\n(.*?)^\}(?:, [^\n]*)?$', text, re.M | re.S):
        start, name, body = match.groups()
        pieces = re.split(r'^ +(?=(?:ROOT )?%?[\w.\-]+ = )', body, flags=re.M)
        bodies[name] = [_instruction(piece) for piece in pieces if piece.strip()]
        entry = name if start else entry
        fusions = (line for line in bodies[name] if line.opcode in ('fusion', 'fusion-start'))
        fused |= {line.attributes['calls'] for line in fusions}
        # ``slice-start`` is written as an ``async-start`` of a computation that only holds the slice.
        started = [line.attributes['calls'] for line in bodies[name] if line.opcode == 'async-start']
        fused |= {called for called in started if all(line.opcode != 'call' for line in bodies[called])}
    assert entry, 'no program'
    return _Module(bodies, entry, fused)


def _instruction(text: str) -> _Line:
    text = re.sub(r'/\*index=\d+\*/', '', text)
    root, name, rest = re.match(r'(ROOT )?%?([\w.\-]+) = (.*)', text.rstrip(), re.S).groups()
    shape, end = _shape(rest, 0)
    opcode = re.match(r' ([\w\-]+)\(', rest[end:])[1]
    start = end + len(opcode) + 2
    inside, attributes = _split(rest[start:])
    operands = ()
    if opcode not in ('parameter', 'constant'):
        words = re.findall(r'%([\w.\-]+)((?:#\d+)*)(?=,|$)', inside)
        assert len(words) == inside.count('%'), text[:300]
        operands = tuple((word, tuple(map(int, path.split('#')[1:]))) for word, path in words)
    return _Line(bool(root), name, shape, opcode, inside, operands, attributes)


def _split(text: str) -> tuple[str, dict[str, str]]:
    """Splits the text after an opening bracket into the text within the brackets and the attributes."""
    depth, start, parts = 1, 0, []
    for match in re.finditer(r'"(?:[^"\\]|\\.)*"|[(\[{]|[)\]}]|, ', text):
        mark = match[0]
        if mark[0] in '([{':
            depth += 1
        elif mark[0] in ')]}':
            depth -= 1
            if depth == 0 and not parts:
                parts.append(text[: match.start()])
                start = match.end()
        elif mark == ', ' and depth == 0:
            parts.append(text[start : match.start()])
            start = match.end()
    parts.append(text[start:])
    attributes: dict[str, str] = {}
    for part in parts[1:]:
        key, _, value = part.partition('=')
        if key == 'device_ids':  # belongs to the groups before it
            attributes['replica_groups'] += f', {part}'
        elif key:
            attributes[key] = value.lstrip('%') if key in CALLED else value
    return parts[0], attributes


def _shape(text: str, start: int) -> tuple[Any, int]:
    """Parses the shape that begins at *start*; returns it and the index of its end."""
    if text[start] == '(':
        parts, end = [], start + 1
        while text[end] != ')':
            part, end = _shape(text, end)
            parts.append(part)
            end += 2 if text.startswith(', ', end) else 0
        return tuple(parts), end + 1
    match = re.compile(r'(\w+)\[([\d,<=]*)\](\{[^}]*\})?').match(text, start)
    if match is None:
        end = re.compile(r'token(\[\])?(\{\})?').match(text, start).end()
        return _Array('token', (), 0), end
    dtype, dims, layout = match.groups()
    space = re.search(r'S\((\d+)\)', layout or '')
    return _Array(
        dtype, tuple(int(dim.lstrip('<=')) for dim in dims.split(',') if dim), int(space[1]) if space else 0
    ), match.end()


def _arrays(shape: Any) -> list[_Array]:
    if isinstance(shape, _Array):
        return [shape]
    return [array for part in shape for array in _arrays(part)]


def _bytes(shape: Any) -> int:
    return sum(BYTES[array.dtype] * math.prod(array.dims) for array in _arrays(shape))

"""The values that a step is run with: of each argument those that the step can take, and that show errors.

What an argument may be is read off the jaxpr: `roles_of` follows each one to where it is a number of rows, a
key, or under a root. Nobody says so, and a number out of bounds, or a root of a negative number, would
compare nothing but NaN with NaN.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from scalax._follow.followed_batch import line_of
from scalax._jax import equations
from scalax._jax.equations import RUN_ONCE, WITH_JAXPRS, opened, shape_of, size_of
from scalax._jax.primitives import primitive_name
from scalax._jax.rewriting import constants_of
from scalax._jaxprs.interpreter import Interpreter

Kind = Literal[
    'key',
    'mask',
    'index',
    'sorted',
    'length',
    'count',
    'integer',
    'definite',
    'fraction',
    'positive',
    'number',
]
# Few, so that some are equal: of numbers of segments, or kinds of tokens, equality matters.
_INTEGERS = 8
# Schedules, and corrections for a moving average that has just begun, do little or everything at step 0.
_STEPS = 3, 100
# The size of an offset, or a factor, that grows from round to round of a loop.
_ANY = 2.0**40


@dataclasses.dataclass(frozen=True)
class Role:
    """What values a leaf of the arguments may have.

    Attributes:
        kind: ``key``, ``mask`` (of truth values), ``index`` (in [0, bound)), ``sorted`` (the same, in order),
            ``length`` (in [1, bound)), ``count`` (of steps), ``integer`` (any), ``definite`` (a positive
            definite matrix), ``fraction`` (between 0 and 1), ``positive``, ``number``.
        bound: integers are below it.
        why: what the step does with it, and where.
    """

    kind: Kind
    bound: int | None = None
    why: str = ''


# Roles of a jaxpr's arguments ------------------------------------------------------------------------


class _Source(NamedTuple):
    """What a value has elements of: ``factor * x + [low, high]``, for elements x of an argument.

    Attributes:
        argument: its number; None for a value that is in [low, high], whatever the arguments are.
        form: of floats, whether it is positive where x is (``same``), always (``square``), or where x is less
            than a constant (``below``). Factors and offsets are those of integers.
        column: the place of these along the last dimension; None for all.
    """

    argument: int | None
    form: Literal['same', 'square', 'below'] = 'same'
    factor: float = 1
    low: float = 0
    high: float = 0
    column: int | None = None


_Fact = frozenset[_Source]
_NOTHING: _Fact = frozenset()


class _Use(NamedTuple):
    kind: Kind
    bound: int | None
    what: str
    equation: Any
    calls: tuple[Any, ...]

    @property
    def role(self) -> Role:
        return Role(self.kind, self.bound, f'{self.what} in {line_of(self.equation, self.calls)}'.rstrip())


def roles_of(jaxpr: Any) -> list[Role]:
    """What values each argument of a closed jaxpr may have."""
    uses = _Uses(jaxpr)
    return [_role(var.aval, uses.of_argument.get(i, {})) for i, var in enumerate(opened(jaxpr).invars)]


def _role(aval: Any, uses: dict[Kind, _Use]) -> Role:
    kinds: tuple[Kind, ...]
    if _is(aval, jax.dtypes.prng_key):
        return Role('key')
    if _is(aval, np.bool_):
        return Role('mask')
    if _is(aval, np.integer):
        kinds, other = ('key', 'index', 'length'), Role('integer', _INTEGERS) if aval.shape else Role('count')
    else:
        kinds, other = ('definite', 'fraction', 'positive'), Role('number')
    first = next((uses[kind].role for kind in kinds if kind in uses), other)
    return dataclasses.replace(first, kind='sorted') if first.kind == 'index' and 'sorted' in uses else first


def _is(value: Any, kind: Any) -> bool:
    dtype = getattr(value, 'dtype', None)
    return dtype is not None and jnp.issubdtype(dtype, kind)


# The result has elements of the first operand, in their places or in others, sums of them or the largest.
_OF_FIRST_NAMES = """
    broadcast_in_dim convert_element_type copy cumlogsumexp cummax cummin cumsum device_put dynamic_slice
    gather name reduce_max reduce_min reduce_precision reduce_sum reduce_window_max reduce_window_sum reshape
    reshard rev sharding_constraint slice split squeeze stop_gradient top_k transpose unstack
"""
_OF_FIRST = frozenset(_OF_FIRST_NAMES.split())
# Sums of integers are no longer below their bounds.
_SUMS = frozenset({'cumlogsumexp', 'cumsum', 'reduce_sum', 'reduce_window_sum'})
# These keep the places of elements along the last dimension.
_IN_PLACE = frozenset({'convert_element_type', 'copy', 'name', 'sharding_constraint', 'stop_gradient'})
_EACH = frozenset({'optimization_barrier', 'pvary', 'sort'})
# Those of which operands the result has elements of.
_MIXED: dict[str, slice] = {
    **dict.fromkeys(('concatenate', 'max', 'min', 'pad', 'stack', 'tile'), slice(None)),
    **dict.fromkeys(('scatter', 'scatter-add', 'scatter-max', 'scatter-min'), slice(0, 3, 2)),
    'clamp': slice(1, 2),
    'dynamic_update_slice': slice(0, 2),
    'select_n': slice(1, None),
}
_NOT_NEGATIVE = frozenset({'log', 'log1p', 'log2', 'pow', 'rsqrt', 'sqrt'})
_BELOW_ONE = frozenset({'acos', 'asin', 'atanh', 'erf_inv'})
_SQUARES = frozenset({'integer_pow', 'square'})


class _Uses(Interpreter[_Fact]):
    """Where the arguments of a jaxpr are used in a way that not all values allow.

    Attributes:
        of_argument: by the number of each, its uses by kind, of the smallest bound.
    """

    def __init__(self, jaxpr: Any) -> None:
        super().__init__(_NOTHING)
        self.of_argument: dict[int, dict[Kind, _Use]] = {}
        self._constants: dict[int, _Fact] = {
            id(var): _constant(np.min(value), np.max(value))
            for var, value in constants_of(jaxpr)
            if isinstance(value, np.ndarray | jax.Array) and value.size and _is(value, np.number)
        }
        self._folded: set[Any] = set()
        self._calls: list[Any] = []
        self.results(jaxpr, [frozenset({_Source(i)}) for i in range(len(opened(jaxpr).invars))])

    def results(self, jaxpr: Any, arguments: Sequence[_Fact]) -> list[_Fact]:
        if (inner := opened(jaxpr)) not in self._folded:
            self._folded.add(inner)
            for equation in inner.eqns:
                self._fold(equation)
        return super().results(jaxpr, arguments)

    def _fold(self, equation: Any) -> None:
        """Takes note of results that are the same whatever the arguments are: numbers of rows and columns."""
        name = primitive_name(equation)
        if len(equation.outvars) != 1:
            return
        [var] = equation.outvars
        if name == 'iota':
            size = shape_of(var)[equations.dim_of(equation)]
            self._constants[id(var)] = _constant(0, size - 1)
        elif name not in WITH_JAXPRS:
            operands = [*map(self._constant_of, equation.invars)]
            if operands and all(operands):
                self._constants[id(var)] = self._result(name, equation, operands)

    def _constant_of(self, atom: Any) -> _Fact:
        if isinstance(atom, equations.Literal):
            return _constant(np.min(atom.val), np.max(atom.val)) if _is(atom.aval, np.number) else _NOTHING
        return self._constants.get(id(atom), _NOTHING)

    def equation(self, equation: Any, operands: Sequence[_Fact]) -> Sequence[_Fact]:
        pairs = zip(operands, equation.invars, strict=True)
        operands = [fact or self._constant_of(atom) for fact, atom in pairs]
        if primitive_name(equation) not in RUN_ONCE.keys() | WITH_JAXPRS:
            return super().equation(equation, operands)
        self._calls.append(equation)
        if primitive_name(equation) in WITH_JAXPRS:
            found = super().equation(equation, operands)
        else:
            inner = equations.run_once(equation)
            known = operands if len(inner.invars) == len(operands) else [_NOTHING] * len(inner.invars)
            found = self.results(inner, known)
        self._calls.pop()
        return found

    def branches(self, equation: Any, operands: Sequence[_Fact]) -> Sequence[_Fact]:
        count = len(equations.branches(equation))
        self._use('index', operands[0], equation, f'number of {count} branches', count)
        return super().branches(equation, operands)

    def joined(self, facts: Sequence[_Fact]) -> _Fact:
        return _hull(facts, widened=True)

    def primitive(self, name: str, equation: Any, operands: Sequence[_Fact]) -> Sequence[_Fact]:
        self._look(name, equation, operands)
        if name in _EACH:
            return operands[: len(equation.outvars)]
        found = self._result(name, equation, operands)
        return [found, _NOTHING] if name == 'top_k' else [found] * len(equation.outvars)

    # What is computed of them

    def _result(self, name: str, equation: Any, operands: Sequence[_Fact]) -> _Fact:
        """The sources of the results."""
        atom, out = equation.invars[0], equation.outvars[0]
        first, second = operands[0], operands[1] if len(operands) > 1 else _NOTHING
        whole = not _is(out.aval, np.inexact)
        if name in _OF_FIRST:
            rounded = whole and _is(atom.aval, np.inexact)
            return _NOTHING if rounded or (whole and name in _SUMS) else _placed(first, name in _IN_PLACE)
        if name in _MIXED:
            return self._mixed(name, equation, operands)
        if name == 'add' or name == 'add_any':
            return _sum(first, second, whole)
        if name == 'sub':
            if (limits := _limits(second)) is not None:
                return _sum(first, _constant(-limits[1], -limits[0]), whole)
            is_below = not whole and _limits(first) is not None
            return frozenset([each._replace(form='below') for each in second]) if is_below else _NOTHING
        if name in _SQUARES or (name == 'mul' and equation.invars[1] is atom):
            return frozenset([each._replace(form='square') for each in first if each.form == 'same'])
        if name == 'mul':
            return _product(first, second) or _product(second, first)
        if name == 'div':
            limits = _limits(second)
            if whole:
                return _NOTHING if limits is None or limits[0] < 1 else _scaled(first, 1 / limits[1])
            return first if limits is None or limits[0] > 0 else _NOTHING
        if name == 'lt' and _limits(second) == (0, 0) and all(each.low >= 0 for each in first):
            return frozenset({_Source(None, 'same', 0, 0, 0)}) if first else _NOTHING  # never
        return _NOTHING

    def _mixed(self, name: str, equation: Any, operands: Sequence[_Fact]) -> _Fact:
        if name == 'select_n' and _limits(operands[0]) == (0, 0):
            return operands[1]  # numbers that count from the end are not drawn
        chosen = operands[_MIXED[name]]
        if name == 'concatenate':
            shapes = [*map(shape_of, equation.invars)]
            if all(shape[-1] == 1 for shape in shapes) and shape_of(equation.outvars[0])[-1] > 1:
                each = enumerate(chosen)
                return frozenset([source._replace(column=i) for i, fact in each for source in fact])
        return _hull(chosen)

    # What they are used for

    def _look(self, name: str, equation: Any, operands: Sequence[_Fact]) -> None:
        """Takes note of uses."""
        shapes = [*map(shape_of, equation.invars)]
        if name == 'gather':
            dims = equations.gather_dims(equation).start_index_map
            sizes = equations.slice_sizes(equation)
            self._index(equation, operands[1], {i: (dim, sizes[dim]) for i, dim in enumerate(dims)})
        elif name.startswith('scatter'):
            numbers = equations.scatter_dims(equation)
            gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
            kept = [dim for dim in range(len(shapes[0])) if dim not in gone]
            windows = dict(zip(kept, [shapes[2][i] for i in numbers.update_window_dims], strict=True))
            dims = numbers.scatter_dims_to_operand_dims
            self._index(equation, operands[1], {i: (dim, windows.get(dim, 1)) for i, dim in enumerate(dims)})
        elif name in ('dynamic_slice', 'dynamic_update_slice'):
            part = shape_of(equation.outvars[0]) if name == 'dynamic_slice' else shapes[1]
            for dim, fact in enumerate(operands[-len(shapes[0]) :] if shapes[0] else ()):
                self._index(equation, fact, {0: (dim, part[dim])})
        elif name == 'ragged_dot_general':
            rows = shapes[0][equations.ragged_dim(equation)]
            most = rows // max(1, size_of(equation.invars[2])) + 1
            self._use('index', operands[2], equation, f'sizes of groups of {rows} rows', most)
        elif name in ('random_wrap', 'threefry2x32'):
            for fact in operands[:2]:
                self._use('key', fact, equation, 'bits of a key')
        elif name in ('eq', 'ne', 'lt', 'le', 'gt', 'ge'):
            for fact, other in (operands, operands[::-1]):
                self._compared(name, equation, fact, _limits(other))
        elif name in ('cholesky', 'eigh'):
            self._use('definite', operands[0], equation, f'a matrix of {name}')
        elif name in _BELOW_ONE:
            self._use('fraction', operands[0], equation, f'argument of {name}')
        elif name in _NOT_NEGATIVE and not (name == 'pow' and _is_whole(_limits(operands[1]))):
            self._positive(equation, operands[0], f'argument of {name}')
        elif name in ('div', 'rem'):
            self._positive(equation, operands[1], 'denominator')

    def _index(self, equation: Any, fact: _Fact, taken: dict[int, tuple[int, int]]) -> None:
        """Numbers of rows: by column, which dimension they are along, and how much of it is taken."""
        shape = shape_of(equation.invars[0])
        for column, (dim, size) in taken.items():
            own = [each for each in fact if each.column in (None, column)]
            what = f'number of {shape[dim]} in dimension {dim} of {shape}'
            self._use('index', own, equation, what, shape[dim] - size + 1)
            if primitive_name(equation).startswith(('gather', 'scatter')) and equations.says_sorted(equation):
                self._use('sorted', own, equation, what, shape[dim] - size + 1)

    def _compared(self, name: str, equation: Any, fact: _Fact, limits: tuple[float, float] | None) -> None:
        if limits is None or not 0 < limits[1] < _ANY:
            return
        most = int(limits[1]) + 1
        if limits[0] == limits[1]:  # a single number: one of rounds, as where gradients are accumulated
            if name in ('eq', 'ne') and not shape_of(equation.outvars[0]):
                self._use('index', fact, equation, f'compared with {most - 1}', most)
        elif name in ('eq', 'ne'):
            self._use('index', fact, equation, f'compared with each of {most}', most)
        else:
            self._use('length', fact, equation, f'compared with each of {most}', most + 1)

    def _positive(self, equation: Any, fact: _Fact, what: str) -> None:
        self._use('positive', [each for each in fact if each.form == 'same'], equation, what)
        self._use('fraction', [each for each in fact if each.form == 'below'], equation, what)

    def _use(
        self, kind: Kind, fact: Iterable[_Source], equation: Any, what: str, limit: int | None = None
    ) -> None:
        for source in fact:
            if source.argument is None or source.form == 'square':
                continue
            bound = None
            if limit is not None:
                most = (limit - 1 - max(source.high, 0)) // max(source.factor, 1 / _ANY)
                bound = int(max(1, most + 1))
            uses = self.of_argument.setdefault(source.argument, {})
            if kind not in uses or (bound or 0) < (uses[kind].bound or 0):
                uses[kind] = _Use(kind, bound, what, equation, (*reversed(self._calls),))


def _constant(low: Any, high: Any) -> _Fact:
    low, high = float(low), float(high)
    is_finite = math.isfinite(low) and math.isfinite(high)
    return frozenset({_Source(None, 'same', 0, low, high)}) if is_finite else _NOTHING


def _limits(fact: _Fact) -> tuple[float, float] | None:
    """The least and the largest element of a constant."""
    if not fact or any(each.argument is not None for each in fact):
        return None
    return min(each.low for each in fact), max(each.high for each in fact)


def _is_whole(limits: tuple[float, float] | None) -> bool:
    return limits is not None and limits[0] == limits[1] and limits[0].is_integer()


def _placed(fact: _Fact, in_place: bool) -> _Fact:
    return fact if in_place else frozenset([each._replace(column=None) for each in fact])


def _hull(facts: Iterable[_Fact], *, widened: bool = False) -> _Fact:
    """The sources of several values: of each argument the widest.

    Args:
        facts: the sources of each.
        widened: what is wider than in the first one has no bounds, so that loops come to an end.
    """
    found: dict[Any, _Source] = {}
    for source in (each for fact in facts for each in fact):
        key = source.argument, source.form, source.column
        before = found.setdefault(key, source)
        factor, low = max(before.factor, source.factor), min(before.low, source.low)
        high = max(before.high, source.high)
        if widened:
            factor = factor if factor == before.factor else _ANY
            low, high = low if low == before.low else -_ANY, high if high == before.high else _ANY
        found[key] = before._replace(factor=factor, low=low, high=high)
    return frozenset(found.values())


def _sum(first: _Fact, second: _Fact, whole: bool) -> _Fact:
    """The sources of a sum. A sum of floats may be of anything beside: of squares, as in moving averages."""
    if whole and not (first and second):
        return _NOTHING
    one, other = _limits(first), _limits(second)
    if one is not None and other is not None:
        return _constant(one[0] + other[0], one[1] + other[1])
    if one is None and other is None:
        # Each is at most half of what both are together.
        return _hull([_scaled(fact, 2 if first and second else 1) for fact in (first, second)])
    fact, limits = (first, other) if one is None else (second, one)
    assert limits is not None
    return frozenset([each._replace(low=each.low + limits[0], high=each.high + limits[1]) for each in fact])


def _product(fact: _Fact, other: _Fact) -> _Fact:
    """The sources of a product, if the other one is positive."""
    limits = _limits(other)
    if limits is None:
        return _hull([fact, other]) if fact and other and _limits(fact) is None else _NOTHING
    return _scaled(fact, limits[1]) if limits[0] > 0 else _NOTHING


def _scaled(fact: _Fact, by: float) -> _Fact:
    return frozenset(
        [each._replace(factor=by * each.factor, low=by * each.low, high=by * each.high) for each in fact]
    )


# Values ----------------------------------------------------------------------------------------------


def drawn(avals: Sequence[Any], roles: Sequence[Role], seed: int) -> list[Any]:
    """Values of shapes and dtypes in their roles, the same for each seed and number of the leaf.

    They differ along every dimension, so that a wrong layout shows. Matrices keep the scale of what they are
    multiplied with; all else is about 1, and has one sign, so that sums that are missing or doubled do not
    cancel out. Typed keys are arrays of JAX, all others of numpy.
    """
    pairs = enumerate(zip(avals, roles, strict=True))
    return [_drawn(aval, role, np.random.default_rng([seed, i])) for i, (aval, role) in pairs]


def _drawn(aval: Any, role: Role, rng: np.random.Generator) -> Any:
    shape, dtype = tuple(aval.shape), aval.dtype
    if role.kind == 'key':
        return _keys(shape, dtype, rng)
    if role.kind == 'mask':
        return _mask(shape, rng)
    if _is(aval, np.integer):
        least, most = (1 if role.kind == 'length' else 0), _STEPS[1]
        if role.kind == 'count':
            least = _STEPS[0]
        bound = min(most if role.bound is None else role.bound, int(jnp.iinfo(dtype).max) + 1)
        found = rng.integers(min(least, bound - 1), bound, shape)
        return np.asarray(np.sort(found) if role.kind == 'sorted' and shape else found).astype(dtype)
    if _is(aval, np.complexfloating):
        real, imaginary = _floats(shape, role.kind, rng), _floats(shape, role.kind, rng)
        return np.asarray(real + 1j * imaginary).astype(dtype)
    return np.asarray(_floats(shape, role.kind, rng)).astype(dtype)


def _floats(shape: tuple[int, ...], kind: Kind, rng: np.random.Generator) -> Any:
    if kind == 'fraction':
        return rng.uniform(0.1, 0.9, shape)
    if kind == 'definite' and shape[-2:-1] == shape[-1:]:
        root = rng.normal(size=shape) / math.sqrt(shape[-1])
        return root @ root.swapaxes(-1, -2) + np.eye(shape[-1])
    if kind in ('definite', 'number') and len(shape) >= 2:
        return rng.normal(size=shape) / math.sqrt(max(1, shape[-2]))
    return rng.uniform(0.5, 1.5, shape)


def _mask(shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    """Three of four are true, and one at least of each row: a mean over none has no value."""
    found = np.asarray(rng.random(shape) < 0.75)
    if shape and found.size:
        np.put_along_axis(found, rng.integers(0, shape[-1], (*shape[:-1], 1)), True, -1)
    return found


def _keys(shape: tuple[int, ...], dtype: Any, rng: np.random.Generator) -> Any:
    if not jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return rng.integers(0, 2**32, shape, np.uint32).astype(dtype)
    blank = jnp.zeros(shape, dtype)
    data = jax.random.key_data(blank)
    bits = rng.integers(0, 2**32, data.shape, np.uint32)
    return jax.random.wrap_key_data(jnp.asarray(bits), impl=jax.random.key_impl(blank))


def varied(leaves: Sequence[Any], roles: Sequence[Role], seed: int) -> list[Any]:
    """A user's own arrays: for seed 0 as they are, for others with other values of the same roles."""
    if seed == 0:
        return list(leaves)
    pairs = enumerate(zip(leaves, roles, strict=True))
    return [_varied(leaf, role, np.random.default_rng([seed, i])) for i, (leaf, role) in pairs]


def _varied(leaf: Any, role: Role, rng: np.random.Generator) -> Any:
    """Numbers keep their signs; integers and masks change places along the first dimension."""
    if _is(leaf, jax.dtypes.prng_key):
        return _keys(leaf.shape, leaf.dtype, rng)
    values = np.asarray(leaf)
    if role.kind == 'key':
        return _keys(values.shape, values.dtype, rng)
    if not _is(values, np.inexact):
        moves = values.ndim > 0 and role.kind != 'sorted'
        return rng.permutation(values) if moves else values
    if values.size and not values.any():
        # Of states that begin with zeros, as those of optimizers do, nothing would be seen.
        return (1e-2 * _floats(values.shape, _OF_ZEROS.get(role.kind, 'positive'), rng)).astype(values.dtype)
    wide: Any = values.astype(np.complex128 if _is(values, np.complexfloating) else np.float64)
    if role.kind == 'definite' and values.shape[-2:-1] == values.shape[-1:]:
        by: Any = rng.uniform(0.9, 1.1, values.shape[:-1])
        by = by[..., :, None] * by[..., None, :]
    else:
        by = rng.uniform(0.75, 1.25, values.shape)
    return np.asarray(wide**by if role.kind == 'fraction' else wide * by).astype(values.dtype)


_OF_ZEROS: dict[Kind, Kind] = {'definite': 'definite'}

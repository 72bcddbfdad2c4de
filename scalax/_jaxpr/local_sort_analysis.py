"""Whether a device may sort its local examples alone, in place of a sort of all examples.

MoE layers sort tokens by their experts, multiply them in groups (`ragged_dot`), and restore their order. In
between, each value holds the same for an example wherever the example is in the order. Only the ragged dots
also need the sizes of the groups. So each device may sort its local examples, if it uses the sizes of its
local groups.

This holds only if every equation that reads such a value is known to treat all examples identically.
Otherwise the sort stays as it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from scalax._jax import equations
from scalax._jax.equations import open_jaxpr, producers_of, ragged_dim, removed_dims, shape_of, size_of
from scalax._jax.primitives import primitive_name
from scalax._jax.rewriting import constants_of
from scalax._jaxpr.dim_rules import (
    ALONG_DIM,
    ELEMENTWISE,
    VIEWS,
    dim_rule,
    is_row_gather,
    is_row_scatter,
)
from scalax._jaxpr.static_integers import INTEGER_OPS, StaticIntegers, evaluate

# These treat all elements identically. The others combine neighbors, or draw random numbers.
_IDENTICAL = (ELEMENTWISE | {'sharding_constraint'}) - ALONG_DIM - {'random_fold_in', 'random_gamma'}
_ORDERLESS_REDUCTIONS = frozenset({'reduce_sum', 'reduce_max', 'reduce_min', 'reduce_and', 'reduce_or'})
# The dimension rule finds the dimension of examples of their results.
_BY_DIM_RULE = _ORDERLESS_REDUCTIONS | {
    *('argmax', 'argmin', 'broadcast_in_dim', 'reduce_prod', 'reshape', 'squeeze', 'top_k', 'transpose')
}
# These do nothing along a dimension that has the same size in all operands and results.
_ACT_ALONG_OTHERS = frozenset({'concatenate', 'dynamic_slice', 'dynamic_update_slice', 'slice', 'split'})
_SAME_INTEGERS = frozenset(
    ('broadcast_in_dim', 'convert_element_type', 'copy', 'name', 'reshape', 'sharding_constraint', 'squeeze')
)
_INTEGER_FUNCTIONS = (_IDENTICAL | _SAME_INTEGERS) - {'threefry2x32'}
# Loops take constants that these compute. They are computed inside of the loop, to be analyzed.
CONSTANT_OPS = _INTEGER_FUNCTIONS | {'iota'}


class _OrderMattersError(Exception):
    """An equation may compute something else for another order."""


@dataclasses.dataclass(frozen=True, eq=False)
class SortedBlock:
    """The equations from a sort until the examples are in their original order.

    Attributes:
        keys: the variable of the sort keys: the index of the group of each example.
        num_groups: the number of groups.
        ragged_dots: the `ragged_dot_general` equations of the groups.
        local_equations: the other equations that each device runs on its local examples: sorts, gathers and
            scatters.
        sorted_vars: the ids of the variables in the order of the sort.
    """

    keys: Any
    num_groups: int
    ragged_dots: Sequence[Any]
    local_equations: Container[Any]
    sorted_vars: Container[int]


def find_sorted_block(jaxpr: Any, sort: Any, num_devices: int) -> SortedBlock | None:
    """Returns the block of a sort if each device may sort its local examples.

    Returns None if that is uncertain.

    Args:
        jaxpr: the jaxpr, open or closed.
        sort: one of its equations.
        num_devices: the number of devices that the examples are sharded over.
    """
    try:
        return _SortAnalysis(jaxpr, sort, num_devices).block()
    except _OrderMattersError:
        return None


class _SortAnalysis:
    """Analysis of the values that depend on the order of a sort.

    *Example indices* are, for each position in the order of the sort, the index of the example there.
    *Positions* are, for each example, its position in the order of the sort. Both are known as functions of
    the order, by their values for the identity order.
    """

    def __init__(self, jaxpr: Any, sort: Any, num_devices: int) -> None:
        self._jaxpr, self._sort, self._num_devices = jaxpr, sort, num_devices
        self._producers, self._integers = producers_of(open_jaxpr(jaxpr)), StaticIntegers(open_jaxpr(jaxpr))
        self._constants = StaticIntegers(open_jaxpr(jaxpr), iotas=True)
        self._count = size_of(sort.invars[0])
        self._identity = np.arange(self._count)
        # The id of a variable in the order of the sort -> its dimension of examples.
        self._example_dims: dict[int, int] = {}
        # The ids of variables in the original order that are computed from positions.
        self._position_vars: set[int] = set()
        # Variables of example indices (or values computed from them) and of positions, with their values for
        # the identity order.
        self._example_indices: list[tuple[Any, np.ndarray]] = []
        self._positions: list[tuple[Any, np.ndarray]] = []
        # The id of the result of a scatter at example indices -> the updates.
        self._scattered: dict[int, Any] = {}
        # The id of a variable -> another variable that equals it.
        self._equal: dict[int, Any] = {}
        # (id of a variable, dimension) -> whether all its elements along the dimension are equal.
        self._uniform: dict[tuple[int, int], bool] = {}
        self._group_counts: set[int] = set()
        self._ragged_dots: list[Any] = []
        self._local_equations = {sort}

    def block(self) -> SortedBlock:
        """Returns the block.

        Raises:
            _OrderMattersError: the order may matter.
        """
        sort, eqns = self._sort, open_jaxpr(self._jaxpr).eqns
        sorted_iotas = [var for x, var in zip(sort.invars, sort.outvars, strict=True) if self._is_iota(x)]
        _require(len(shape_of(sort.invars[0])) == 1 and equations.count_sort_keys(sort) == 1)
        _require(len(sorted_iotas) == 1 and not self._is_iota(sort.invars[0]))
        _require(self._count % self._num_devices == 0)
        self._example_indices = [(sorted_iotas[0], self._identity)]
        self._example_dims.update((id(var), 0) for var in sort.outvars)
        is_after_sort = False
        for equation in eqns:
            if is_after_sort and any(map(self._depends, equation.invars)):
                self._analyze_equation(equation)
            is_after_sort |= equation is sort
        is_restored = not any(map(self._depends, open_jaxpr(self._jaxpr).outvars))
        _require(is_restored and len(self._group_counts) == 1)
        [num_groups] = self._group_counts
        return SortedBlock(
            sort.invars[0], num_groups, self._ragged_dots, self._local_equations, self._example_dims
        )

    def _producer(self, atom: Any) -> tuple[str, Any]:
        """Returns the primitive's name and the equation that computes a value; ('', None) if none does."""
        producer = self._producers.get(id(atom))
        return ('', None) if producer is None else (primitive_name(producer), producer)

    def _depends(self, atom: Any) -> bool:
        """Returns whether a value depends on the order of the sort."""
        return id(atom) in self._example_dims or id(atom) in self._position_vars

    # Equations

    def _analyze_equation(self, equation: Any) -> None:
        """Analyzes an equation with operands that depend on the order of the sort."""
        name, results, example_dims = primitive_name(equation), equation.outvars, self._example_dims
        dims = {i: example_dims[id(x)] for i, x in enumerate(equation.invars) if id(x) in example_dims}
        positions = [i for i, x in enumerate(equation.invars) if id(x) in self._position_vars]
        _require(not equation.effects and not equations.indices_are_sorted(equation))
        if name == 'sort':
            self._analyze_inverse_sort(equation)
        elif name == 'gather':
            self._analyze_gather(equation, dims, positions)
        elif name in ('scatter', 'scatter-add'):
            self._analyze_scatter(name, equation, dims, positions)
        elif positions:
            _require(not dims and name in _INTEGER_FUNCTIONS)  # analyzed where it is used
            if not self._is_constant(name, equation):
                self._position_vars.update(map(id, results))
        elif name in ('dot_general', 'ragged_dot_general'):
            self._analyze_matmul(name, equation, dims)
        elif name in _ORDERLESS_REDUCTIONS and dims[0] in removed_dims(equation):
            pass  # reduces all examples, in any order
        elif name in _BY_DIM_RULE:
            self._analyze_by_dim_rule(equation, dims)
        else:
            self._analyze_identical(name, equation, dims)

    def _analyze_identical(self, name: str, equation: Any, dims: Mapping[int, int]) -> None:
        """Requires that examples meet only the same examples, and values that are equal for all examples."""
        [dim, *more] = set(dims.values())
        acts_along_others = name in _ACT_ALONG_OTHERS or (
            name == 'pad' and not equations.acts_along(equation, dim)
        )
        _require(not more and (acts_along_others or _is_identical(equation)))
        others = [x for i, x in enumerate(equation.invars) if i not in dims and shape_of(x)]
        _require(all(self._is_uniform(x, dim) for x in others))
        same_size = [*equation.outvars, *(others if acts_along_others else ())]
        _require(all(shape_of(x)[dim : dim + 1] == (self._count,) for x in same_size))
        self._example_dims.update((id(var), dim) for var in equation.outvars)

    def _analyze_by_dim_rule(self, equation: Any, dims: Mapping[int, int]) -> None:
        """Requires one dimension of the results that comes from exactly the dimensions of examples."""
        dim = dim_rule(equation).dim_from_exactly(dims.items())
        if dim is None or any(shape_of(var)[dim] != self._count for var in equation.outvars):
            raise _OrderMattersError
        self._example_dims.update((id(var), dim) for var in equation.outvars)

    def _analyze_matmul(self, name: str, equation: Any, dims: Mapping[int, int]) -> None:
        if name == 'ragged_dot_general':
            _require(dims.get(0) == ragged_dim(equation) and equations.has_all_groups(equation))
            self._group_counts.add(self._count_groups(equation.invars[2]))
            self._ragged_dots.append(equation)
        if tuple(dims.items()) not in dim_rule(equation).reduced:
            self._analyze_by_dim_rule(equation, dims)

    def _analyze_inverse_sort(self, equation: Any) -> None:
        """Requires a sort of a permutation, which computes the inverse permutation."""
        [keys, *others], results = equation.invars, equation.outvars
        _require(len(others) == 1 and self._is_iota(others[0]) and equations.count_sort_keys(equation) == 1)
        if id(keys) in self._example_dims:
            _require(self._is_identity(keys, self._example_indices))
            self._add_positions(results[1])
        else:
            _require(self._is_identity(keys, self._positions))
            self._example_indices.append((results[1], self._identity))
            self._example_dims[id(results[1])] = 0
        self._local_equations.add(equation)

    def _add_positions(self, var: Any) -> None:
        self._positions.append((var, self._identity))
        self._position_vars.add(id(var))

    def _analyze_gather(self, equation: Any, dims: Mapping[int, int], positions: Sequence[int]) -> None:
        operand, indices = equation.invars
        if positions == [0]:  # reads the values that were scattered to the example indices
            _require(dims == {1: 0} and id(operand) in self._scattered and is_row_gather(equation))
            _require(self._is_identity(indices, self._example_indices))
            self._equal[id(equation.outvars[0])] = self._scattered[id(operand)]
            self._add_local_equation(equation)
            return
        if positions:  # restores the original order
            _require(positions == [1] and dims == {0: 0} and is_row_gather(equation))
            _require(self._is_identity(indices, self._positions))
            self._add_local_equation(equation)
            return
        self._analyze_by_dim_rule(equation, dims)
        if dims == {1: 0} and is_row_gather(equation):
            table = self._constants.of(operand) if shape_of(operand) == (self._count,) else None
            if table is not None and self._is_identity(indices, self._example_indices):
                self._example_indices.append((equation.outvars[0], table))
            if self._is_local(indices, shape_of(operand)[0]):
                self._add_local_equation(equation)

    def _analyze_scatter(
        self, name: str, equation: Any, dims: Mapping[int, int], positions: Sequence[int]
    ) -> None:
        operand, indices, updates = equation.invars
        _require(is_row_scatter(equation))
        size = shape_of(operand)[0]
        if positions:
            _require(positions == [1] and not dims and size == self._count and self._is_uniform(operand, 0))
            _require(self._is_identity(indices, self._positions))
            self._example_dims[id(equation.outvars[0])] = 0
            self._add_local_equation(equation)
            return
        _require(0 not in dims and dims.get(1) == 0)
        is_permutation = (
            name == 'scatter' and size == self._count and self._is_identity(indices, self._example_indices)
        )
        if dims == {1: 0}:
            _require(is_permutation)
            if self._is_iota(updates):
                self._add_positions(equation.outvars[0])
            else:
                self._scattered[id(equation.outvars[0])] = updates
                self._position_vars.add(id(equation.outvars[0]))
        else:
            _require(dims == {1: 0, 2: 0} and (is_permutation or name == 'scatter-add'))
        if is_permutation or self._is_local(indices, size):
            self._add_local_equation(equation)

    def _add_local_equation(self, equation: Any) -> None:
        if shape_of(equation.invars[1])[0] % self._num_devices == 0:
            self._local_equations.add(equation)

    # Indices

    def _is_local(self, indices: Any, size: int) -> bool:
        """Returns whether each example has the index of a row that is on the device of the example.

        Args:
            indices: the indices of rows.
            size: the number of rows.
        """
        values = self._evaluate(indices, self._example_indices)
        if values is None or size % self._num_devices:
            return False
        devices = self._identity // (self._count // self._num_devices)
        return bool(np.all(values >= 0) and np.all(values // (size // self._num_devices) == devices))

    def _is_identity(self, atom: Any, known_values: Sequence[tuple[Any, np.ndarray]]) -> bool:
        """Returns whether a value is the identity permutation if the known variables have these values."""
        values = self._evaluate(atom, known_values)
        return values is not None and np.array_equal(values, self._identity)

    def _evaluate(self, atom: Any, known_values: Sequence[tuple[Any, np.ndarray]]) -> np.ndarray | None:
        """Returns the integers of an array, one for each example, if the known variables have these values.

        Returns None if it is not an elementwise function of them.
        """
        if size_of(atom) != self._count or not known_values:
            return None
        self._integers.reset(
            [x for x, _ in known_values], [values.astype(x.aval.dtype) for x, values in known_values]
        )
        values = self._integers.of(atom)
        return None if values is None else np.broadcast_to(values, self._count)

    def _is_uniform(self, atom: Any, dim: int) -> bool:
        """Returns whether all elements of a value along a dimension are equal."""
        shape, key = shape_of(atom), (id(atom), dim)
        if not shape or shape[dim : dim + 1] == (1,):
            return True
        if key not in self._uniform:
            is_known = dim < len(shape) and not self._depends(atom)
            self._uniform[key] = is_known and self._is_computed_uniform(atom, dim)
        return self._uniform[key]

    def _is_computed_uniform(self, atom: Any, dim: int) -> bool:
        name, producer = self._producer(atom)
        if name == 'eq':
            a, b = [self._equal.get(id(x), x) for x in producer.invars]
            if a is b and jax.dtypes.issubdtype(getattr(a.aval, 'dtype', None), np.integer):
                return True
        if name == 'broadcast_in_dim':
            dims = [*equations.broadcast_dims(producer)]
            return dim not in dims or self._is_uniform(producer.invars[0], dims.index(dim))
        is_identical = bool(name) and _is_identical(producer)
        return is_identical and all(self._is_uniform(x, dim) for x in producer.invars)

    def _is_constant(self, name: str, equation: Any) -> bool:
        """Returns whether a function of values that were scattered at example indices has equal elements.

        In its gradient, ``jax.numpy.ndarray.at`` asks so whether every row was updated.
        """
        values = [self._integer_per_example(self._scattered.get(id(x), x)) for x in equation.invars]
        if name not in INTEGER_OPS or any(value is None for value in values):
            return False
        result = evaluate(name, values)
        if result is None or (result != result.flat[0]).any():
            return False
        [var] = equation.outvars
        self._uniform.update(((id(var), dim), True) for dim in range(len(shape_of(var))))
        return True

    def _integer_per_example(self, atom: Any) -> np.ndarray | None:
        """Returns the integer that all elements of an example have, for each example.

        Returns None if it is not a known function of the index of the example.
        """
        name, producer = self._producer(atom)
        shape = shape_of(atom)
        if not shape:
            self._constants.reset([], [])
            return self._constants.of(atom)
        if name == 'iota':
            return self._identity.astype(atom.aval.dtype) if self._is_iota(atom) else None
        if name == 'broadcast_in_dim':
            [operand], dims = producer.invars, [*equations.broadcast_dims(producer)]
            keeps_examples = shape_of(operand)[:1] in ((), (self._count,)) and dims[:1] in ([], [0])
            is_supported = keeps_examples and shape[0] == self._count
            return self._integer_per_example(operand) if is_supported else None
        if name == 'reshape':
            [operand] = producer.invars
            keeps_examples = shape_of(operand)[:1] == shape[:1] == (self._count,)
            is_supported = keeps_examples and not equations.permutes_elements(producer)
            return self._integer_per_example(operand) if is_supported else None
        if name not in INTEGER_OPS or name not in ELEMENTWISE or shape[0] != self._count:
            return None
        values = [self._integer_per_example(x) for x in producer.invars]
        result = evaluate(name, values)
        return None if result is None else result.astype(atom.aval.dtype)

    def _is_iota(self, atom: Any) -> bool:
        """Returns whether a value is 0, 1, 2 and so on."""
        return self._producer(atom)[0] == 'iota' and len(shape_of(atom)) == 1 and _can_hold(atom, self._count)

    # Groups

    def _count_groups(self, group_sizes: Any) -> int:
        """Returns the number of groups. Requires that the group sizes are the histogram of the sort keys."""
        _require(len(shape_of(group_sizes)) == 1)
        [num_groups] = shape_of(group_sizes)
        keys = self._without_casts(self._sort.invars[0], num_groups)
        _require(num_groups <= self._count and self._is_below(keys, num_groups))
        name, producer = self._producer(group_sizes)
        while name in ('convert_element_type', 'copy') and _can_hold(group_sizes, self._count + 1):
            [group_sizes] = producer.invars
            name, producer = self._producer(group_sizes)
        _require(name == 'scatter-add' and _can_hold(group_sizes, self._count + 1))
        _require(self._is_histogram(producer, keys, num_groups))
        return num_groups

    def _is_histogram(self, scatter: Any, keys: Any, num_groups: int) -> bool:
        """Returns whether a scatter adds a one to zeros for each example, at the index of its group."""
        zeros, indices, ones = scatter.invars
        some_keys = self._identity % num_groups
        self._integers.reset([], [])
        init, increments = map(self._integers.of, (zeros, ones))
        index_values = self._evaluate(indices, [(keys, some_keys)])
        counts = init is not None and not init.any() and increments is not None and (increments == 1).all()
        counts_all = is_row_scatter(scatter) and size_of(ones) == self._count
        return counts and counts_all and index_values is not None and np.array_equal(index_values, some_keys)

    def _without_casts(self, atom: Any, count: int) -> Any:
        """Returns the value that another one is a cast or a reshape of.

        Returns None if it does not hold one integer for each example, in a dtype for integers below *count*.
        """
        while _can_hold(atom, count) and size_of(atom) == self._count:
            name, producer = self._producer(atom)
            if name not in _SAME_INTEGERS or (name == 'reshape' and equations.permutes_elements(producer)):
                return atom
            if size_of(producer.invars[0]) != self._count or not _can_hold(producer.invars[0], count):
                return atom
            [atom] = producer.invars
        return None

    def _is_below(self, atom: Any, count: int) -> bool:
        """Returns whether integers are indices below *count*: results of `top_k` or `argmax`."""
        while atom is not None and _can_hold(atom, count):
            name, producer = self._producer(atom)
            if name == 'top_k':
                size = shape_of(producer.invars[0])[equations.dim_of(producer)]
                return atom is producer.outvars[1] and size <= count
            if name == 'argmax':
                return all(shape_of(producer.invars[0])[i] <= count for i in removed_dims(producer))
            atom = producer.invars[0] if name in VIEWS | _SAME_INTEGERS else None
        return False


def _require(is_certain: bool) -> None:
    if not is_certain:
        raise _OrderMattersError


def _is_identical(equation: Any) -> bool:
    """Returns whether an equation, and its gradient, treats all elements of its operands identically."""
    if primitive_name(equation) in ('custom_jvp_call', 'jit'):  # a `custom_vjp` may have any gradient
        inner = equations.call_jaxpr(equation)
        return not constants_of(inner) and all(map(_is_identical, open_jaxpr(inner).eqns))
    return primitive_name(equation) in _IDENTICAL


def _can_hold(atom: Any, count: int) -> bool:
    """Returns whether the dtype of a value can hold all integers below *count*."""
    dtype = getattr(atom.aval, 'dtype', None)
    return jax.dtypes.issubdtype(dtype, np.integer) and np.iinfo(dtype).max >= count - 1

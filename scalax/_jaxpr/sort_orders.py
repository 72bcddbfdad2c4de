"""Rows in the order of a sort, until they are in their own again: whether any other order does the same.

Tokens are sorted by the numbers of their experts, multiplied in groups, and put back. In between, a value has
for each row what is computed of this row, wherever it is; but for products in groups, which need the sizes of
the groups. So a device may as well sort its own rows alone, if it takes the sizes of its own groups.

Each equation that takes such a value must be known to treat rows alike. Else the order of the sort stays.
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
from scalax._jaxpr.dim_rules import ALONG_DIM, ELEMENTWISE, VIEWS, dim_rule, is_row_gather, is_row_scatter
from scalax._jaxpr.static_integers import INTEGER_OPS, StaticIntegers, evaluate

# These treat elements alike. Others of this kind see their neighbours, or draw random numbers.
_EACH = (ELEMENTWISE | {'sharding_constraint'}) - ALONG_DIM - {'random_fold_in', 'random_gamma'}
_TOTALS = frozenset({'reduce_sum', 'reduce_max', 'reduce_min', 'reduce_and', 'reduce_or'})
# The dimension of rows is where the table of dimensions says.
_BY_TABLE = _TOTALS | {
    *('argmax', 'argmin', 'broadcast_in_dim', 'reduce_prod', 'reshape', 'squeeze', 'top_k', 'transpose')
}
# Along a dimension of the same size everywhere these do nothing.
_ALONG_OTHERS = frozenset({'concatenate', 'dynamic_slice', 'dynamic_update_slice', 'slice', 'split'})
_SAME_NUMBERS = frozenset(
    ('broadcast_in_dim', 'convert_element_type', 'copy', 'name', 'reshape', 'sharding_constraint', 'squeeze')
)
_COMPUTED_NUMBERS = (_EACH | _SAME_NUMBERS) - {'threefry2x32'}
# Loops are given what these compute of nothing; to see what it is, it is computed inside.
CONSTANT_OPS = _COMPUTED_NUMBERS | {'iota'}


class _OrderMattersError(Exception):
    """An equation is not known to do the same for another order."""


@dataclasses.dataclass(frozen=True, eq=False)
class SortedBlock:
    """The equations from a sort on until the rows are in their own order.

    Attributes:
        keys: what is sorted by: of each row the number of its group.
        num_groups: how many groups there are.
        ragged_dots: the products of rows in these groups.
        local_equations: the other equations that each device runs on its local examples.
    """

    keys: Any
    num_groups: int
    ragged_dots: Sequence[Any]
    local_equations: Container[Any]
    sorted_vars: Container[int]


def find_sorted_block(jaxpr: Any, sort: Any, devices: int) -> SortedBlock | None:
    """The block of a sort, if each device may sort its own rows; None if that is not certain.

    Args:
        jaxpr: the jaxpr, open or closed.
        sort: one of its equations.
        devices: how many devices have rows, each the same number of them.
    """
    try:
        return _Order(jaxpr, sort, devices).block()
    except _OrderMattersError:
        return None


class _Order:
    """The values that depend on the order of a sort."""

    def __init__(self, jaxpr: Any, sort: Any, devices: int) -> None:
        self._jaxpr, self._sort, self._devices = jaxpr, sort, devices
        self._made, self._integers = producers_of(open_jaxpr(jaxpr)), StaticIntegers(open_jaxpr(jaxpr))
        self._constants = StaticIntegers(open_jaxpr(jaxpr), iotas=True)
        self._size = size_of(sort.invars[0])
        self._in_order = np.arange(self._size)
        # Variables in the order of the sort, by id, and their dimension of rows; and those that hold of each
        # row, in the rows' own order, its place in the order of the sort.
        self._rows: dict[int, int] = {}
        self._places: set[int] = set()
        # Variables with what they hold if the order is that of the rows: the number of each row, or what is
        # computed of it, in the order of the sort; and of each row its place.
        self._numbers: list[tuple[Any, np.ndarray]] = []
        self._inverses: list[tuple[Any, np.ndarray]] = []
        # What is put at the number of each row, by the id of the result; and what equals another variable.
        self._put: dict[int, Any] = {}
        self._equal: dict[int, Any] = {}
        self._uniform: dict[tuple[int, int], bool] = {}
        self._groups: set[int] = set()
        self._products: list[Any] = []
        self._own = {sort}

    def block(self) -> SortedBlock:
        """The block.

        Raises:
            _OrderMattersError: it is not certain that the order does not matter.
        """
        sort, every = self._sort, open_jaxpr(self._jaxpr).eqns
        numbered = [var for x, var in zip(sort.invars, sort.outvars, strict=True) if self._is_iota(x)]
        _require(len(shape_of(sort.invars[0])) == 1 and equations.count_sort_keys(sort) == 1)
        _require(len(numbered) == 1 and not self._is_iota(sort.invars[0]))
        _require(self._size % self._devices == 0)
        self._numbers = [(numbered[0], self._in_order)]
        self._rows.update((id(var), 0) for var in sort.outvars)
        begun = False
        for equation in every:
            if begun and any(map(self._depends, equation.invars)):
                self._equation(equation)
            begun |= equation is sort
        _require(not any(map(self._depends, open_jaxpr(self._jaxpr).outvars)) and len(self._groups) == 1)
        [groups] = self._groups
        return SortedBlock(sort.invars[0], groups, self._products, self._own, self._rows)

    def _maker(self, atom: Any) -> tuple[str, Any]:
        """The equation that computes a value, and the name of its primitive; no name where none does."""
        made = self._made.get(id(atom))
        return ('', None) if made is None else (primitive_name(made), made)

    def _depends(self, atom: Any) -> bool:
        return id(atom) in self._rows or id(atom) in self._places

    def _equation(self, equation: Any) -> None:
        name, results = primitive_name(equation), equation.outvars
        rows = {i: self._rows[id(x)] for i, x in enumerate(equation.invars) if id(x) in self._rows}
        places = [i for i, x in enumerate(equation.invars) if id(x) in self._places]
        _require(not equation.effects and not equations.indices_are_sorted(equation))
        if name == 'sort':
            self._invert(equation)
        elif name == 'gather':
            self._gather(equation, rows, places)
        elif name in ('scatter', 'scatter-add'):
            self._scatter(name, equation, rows, places)
        elif places:
            _require(not rows and name in _COMPUTED_NUMBERS)  # what is computed is looked at where it is used
            if not self._is_constant(name, equation):
                self._places.update(map(id, results))
        elif name in ('dot_general', 'ragged_dot_general'):
            self._product(name, equation, rows)
        elif name in _TOTALS and rows[0] in removed_dims(equation):
            pass  # of all rows, in whatever order
        elif name in _BY_TABLE:
            self._by_table(equation, rows)
        else:
            self._alike(name, equation, rows)

    def _alike(self, name: str, equation: Any, rows: Mapping[int, int]) -> None:
        """Rows meet rows of the same number, and what is one for all rows."""
        [dim, *more] = set(rows.values())
        is_whole = name in _ALONG_OTHERS or (name == 'pad' and not equations.acts_along(equation, dim))
        _require(not more and (is_whole or _is_each(equation)))
        others = [x for i, x in enumerate(equation.invars) if i not in rows and shape_of(x)]
        _require(all(self._is_uniform(x, dim) for x in others))
        alike = [*equation.outvars, *(others if is_whole else ())]
        _require(all(shape_of(x)[dim : dim + 1] == (self._size,) for x in alike))
        self._rows.update((id(var), dim) for var in equation.outvars)

    def _by_table(self, equation: Any, rows: Mapping[int, int]) -> None:
        """The results have one dimension that is that of the rows of these operands, and of no other one."""
        dim = dim_rule(equation).dim_from_exactly(rows.items())
        if dim is None or any(shape_of(var)[dim] != self._size for var in equation.outvars):
            raise _OrderMattersError
        self._rows.update((id(var), dim) for var in equation.outvars)

    def _product(self, name: str, equation: Any, rows: Mapping[int, int]) -> None:
        if name == 'ragged_dot_general':
            _require(rows.get(0) == ragged_dim(equation) and equations.has_all_groups(equation))
            self._groups.add(self._count_groups(equation.invars[2]))
            self._products.append(equation)
        if tuple(rows.items()) not in dim_rule(equation).reduced:
            self._by_table(equation, rows)

    def _invert(self, equation: Any) -> None:
        """The order of an order is its inverse."""
        [numbers, *others], results = equation.invars, equation.outvars
        _require(len(others) == 1 and self._is_iota(others[0]) and equations.count_sort_keys(equation) == 1)
        if id(numbers) in self._rows:
            _require(self._are(numbers, self._numbers))
            self._add_inverse(results[1])
        else:
            _require(self._are(numbers, self._inverses))
            self._numbers.append((results[1], self._in_order))
            self._rows[id(results[1])] = 0
        self._own.add(equation)

    def _add_inverse(self, var: Any) -> None:
        self._inverses.append((var, self._in_order))
        self._places.add(id(var))

    def _gather(self, equation: Any, rows: Mapping[int, int], places: Sequence[int]) -> None:
        x, numbers = equation.invars
        if places == [0]:  # what was put at the numbers of rows is taken from there
            _require(rows == {1: 0} and id(x) in self._put and is_row_gather(equation))
            _require(self._are(numbers, self._numbers))
            self._equal[id(equation.outvars[0])] = self._put[id(x)]
            self._note_own(equation)
            return
        if places:
            _require(places == [1] and rows == {0: 0} and is_row_gather(equation))
            _require(self._are(numbers, self._inverses))
            self._note_own(equation)  # and the rows are in their own order again
            return
        self._by_table(equation, rows)
        if rows == {1: 0} and is_row_gather(equation):
            known = self._constants.of(x) if shape_of(x) == (self._size,) else None
            if known is not None and self._are(numbers, self._numbers):
                self._numbers.append((equation.outvars[0], known))
            if self._is_local(numbers, shape_of(x)[0]):
                self._note_own(equation)

    def _scatter(self, name: str, equation: Any, rows: Mapping[int, int], places: Sequence[int]) -> None:
        x, numbers, updates = equation.invars
        _require(is_row_scatter(equation))
        count = shape_of(x)[0]
        if places:
            _require(places == [1] and not rows and count == self._size and self._is_uniform(x, 0))
            _require(self._are(numbers, self._inverses))
            self._rows[id(equation.outvars[0])] = 0
            self._note_own(equation)
            return
        _require(0 not in rows and rows.get(1) == 0)
        each = name == 'scatter' and count == self._size and self._are(numbers, self._numbers)
        if rows == {1: 0}:
            _require(each)
            if self._is_iota(updates):
                self._add_inverse(equation.outvars[0])
            else:
                self._put[id(equation.outvars[0])] = updates
                self._places.add(id(equation.outvars[0]))
        else:
            _require(rows == {1: 0, 2: 0} and (each or name == 'scatter-add'))
        if each or self._is_local(numbers, count):
            self._note_own(equation)

    def _note_own(self, equation: Any) -> None:
        if shape_of(equation.invars[1])[0] % self._devices == 0:
            self._own.add(equation)

    def _is_local(self, numbers: Any, count: int) -> bool:
        """Whether these numbers of rows, of so many, are those of the device that has the row at hand."""
        found = self._computed(numbers, self._numbers)
        if found is None or count % self._devices:
            return False
        own = self._in_order // (self._size // self._devices)
        return bool(np.all(found >= 0) and np.all(found // (count // self._devices) == own))

    def _are(self, numbers: Any, known: Sequence[tuple[Any, np.ndarray]]) -> bool:
        """Whether numbers are those of the rows, or their places, as far as these are known."""
        found = self._computed(numbers, known)
        return found is not None and np.array_equal(found, self._in_order)

    def _computed(self, atom: Any, known: Sequence[tuple[Any, np.ndarray]]) -> np.ndarray | None:
        """What an array of whole numbers is, flat, if others, of as many, have these values.

        None if it takes more than these, or something else for each place: then this shows nothing.
        """
        if size_of(atom) != self._size or not known:
            return None
        self._integers.reset([x for x, _ in known], [values.astype(x.aval.dtype) for x, values in known])
        found = self._integers.of(atom)
        return None if found is None else np.broadcast_to(found, self._size)

    def _is_uniform(self, atom: Any, dim: int) -> bool:
        """Whether a value is the same at each place along a dimension."""
        shape, key = shape_of(atom), (id(atom), dim)
        if not shape or shape[dim : dim + 1] == (1,):
            return True
        if key not in self._uniform:
            known = dim < len(shape) and not self._depends(atom)
            self._uniform[key] = known and self._is_made_uniform(atom, dim)
        return self._uniform[key]

    def _is_made_uniform(self, atom: Any, dim: int) -> bool:
        name, made = self._maker(atom)
        if name == 'eq':
            one, other = [self._equal.get(id(x), x) for x in made.invars]
            dtype = getattr(one.aval, 'dtype', None)
            if one is other and jax.dtypes.issubdtype(dtype, np.integer):
                return True
        if name == 'broadcast_in_dim':
            kept = [*equations.broadcast_dims(made)]
            return dim not in kept or self._is_uniform(made.invars[0], kept.index(dim))
        return bool(name) and _is_each(made) and all(self._is_uniform(x, dim) for x in made.invars)

    def _is_constant(self, name: str, equation: Any) -> bool:
        """Whether what is computed of values that were put at the numbers of rows is one value for all rows.

        So ``jax.numpy.ndarray.at`` asks in its gradient whether something was put at all places.
        """
        values = [self._of_rows(self._put.get(id(x), x)) for x in equation.invars]
        if name not in INTEGER_OPS or any(each is None for each in values):
            return False
        found = evaluate(name, values)
        if found is None or (found != found.flat[0]).any():
            return False
        [var] = equation.outvars
        self._uniform.update(((id(var), dim), True) for dim in range(len(shape_of(var))))
        return True

    def _of_rows(self, atom: Any) -> np.ndarray | None:
        """The integer that a value has in all of a row, row by row, if it is computed of their numbers."""
        name, made = self._maker(atom)
        shape = shape_of(atom)
        if not shape:
            self._constants.reset([], [])
            return self._constants.of(atom)
        if name == 'iota':
            return self._in_order.astype(atom.aval.dtype) if self._is_iota(atom) else None
        if name == 'broadcast_in_dim':
            [operand], kept = made.invars, [*equations.broadcast_dims(made)]
            is_row = shape_of(operand)[:1] in ((), (self._size,)) and kept[:1] in ([], [0])
            return self._of_rows(operand) if is_row and shape[0] == self._size else None
        if name == 'reshape':
            [operand] = made.invars
            is_row = shape_of(operand)[:1] == shape[:1] == (self._size,)
            return self._of_rows(operand) if is_row and not equations.permutes_elements(made) else None
        if name not in INTEGER_OPS or name not in ELEMENTWISE or shape[0] != self._size:
            return None
        values = [self._of_rows(x) for x in made.invars]
        found = evaluate(name, values)
        return None if found is None else found.astype(atom.aval.dtype)

    def _is_iota(self, atom: Any) -> bool:
        """Whether a value is 0, 1, 2 and so on."""
        return self._maker(atom)[0] == 'iota' and len(shape_of(atom)) == 1 and _holds(atom, self._size)

    def _count_groups(self, sizes: Any) -> int:
        """How many groups there are, if these are their sizes: how many rows have each number as key."""
        _require(len(shape_of(sizes)) == 1)
        [count] = shape_of(sizes)
        root = self._seen_through(self._sort.invars[0], count)
        _require(count <= self._size and self._is_below(root, count))
        name, made = self._maker(sizes)
        while name in ('convert_element_type', 'copy') and _holds(sizes, self._size + 1):
            [sizes] = made.invars
            name, made = self._maker(sizes)
        _require(name == 'scatter-add' and _holds(sizes, self._size + 1))
        _require(self._is_histogram(made, root, count))
        return count

    def _is_histogram(self, made: Any, root: Any, count: int) -> bool:
        """Whether ones are added to zeros at the numbers of the rows' groups."""
        zeros, numbers, ones = made.invars
        values = self._in_order % count
        self._integers.reset([], [])
        begun, added = map(self._integers.of, (zeros, ones))
        found = self._computed(numbers, [(root, values)])
        is_count = begun is not None and not begun.any() and added is not None and (added == 1).all()
        is_whole = is_row_scatter(made) and size_of(ones) == self._size
        return is_count and is_whole and found is not None and np.array_equal(found, values)

    def _seen_through(self, atom: Any, count: int) -> Any:
        """The value that another one is in another form, if it holds a number less than this for each row."""
        while _holds(atom, count) and size_of(atom) == self._size:
            name, made = self._maker(atom)
            if name not in _SAME_NUMBERS or (name == 'reshape' and equations.permutes_elements(made)):
                return atom
            if size_of(made.invars[0]) != self._size or not _holds(made.invars[0], count):
                return atom
            [atom] = made.invars
        return None

    def _is_below(self, atom: Any, count: int) -> bool:
        """Whether whole numbers, from zero on, are less than this: they are places among so many."""
        while atom is not None and _holds(atom, count):
            name, made = self._maker(atom)
            if name == 'top_k':
                return atom is made.outvars[1] and shape_of(made.invars[0])[equations.dim_of(made)] <= count
            if name == 'argmax':
                return all(shape_of(made.invars[0])[i] <= count for i in removed_dims(made))
            atom = made.invars[0] if name in VIEWS | _SAME_NUMBERS else None
        return False


def _require(is_certain: bool) -> None:
    if not is_certain:
        raise _OrderMattersError


def _is_each(equation: Any) -> bool:
    """Whether an equation does the same with each element of its operands; so does its gradient."""
    if primitive_name(equation) in ('custom_jvp_call', 'jit'):  # any function may be a `custom_vjp`
        inside = equations.call_jaxpr(equation)
        return not constants_of(inside) and all(map(_is_each, open_jaxpr(inside).eqns))
    return primitive_name(equation) in _EACH


def _holds(atom: Any, count: int) -> bool:
    """Whether a value holds whole numbers, and can hold all that are less than this."""
    dtype = getattr(atom.aval, 'dtype', None)
    return jax.dtypes.issubdtype(dtype, np.integer) and np.iinfo(dtype).max >= count - 1

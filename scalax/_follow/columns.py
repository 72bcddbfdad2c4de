"""Columns of products over mesh axes that shard no rows, such as ``tp``, and what becomes of them.

Columns that a later product sums stay split: that is tensor parallelism. Columns that are added to values
that are whole along the axis, or concatenated with them, and that no product sums, are whole from the start.
Else all that is computed of both would be split, and gathered for each product behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scalax._follow.trail import Trail, Trails, axes_of
from scalax._jax.equations import LOOPS
from scalax._jax.primitives import primitive_name

_PRODUCTS = ('conv_general_dilated', 'dot_general')
_JOINS = ('add', 'add_any', 'concatenate')
_NONE: frozenset[int] = frozenset()


class Columns:
    """The columns of the products in a jaxpr.

    Args:
        trails: answers about trails.
    """

    def __init__(self, trails: Trails) -> None:
        self._trails = trails
        # All by the ids of variables.
        self._of: dict[int, frozenset[int]] = {}  # a value -> the products whose columns it has
        self._whole: set[int] = set()  # products without columns, and what is computed of them
        self._joined: set[int] = set()  # what is computed of both columns and whole products
        self._met: set[int] = set()  # the products whose columns are joined with whole values
        self._summed: set[int] = set()  # the products whose columns a later one may sum

    @property
    def better_whole(self) -> frozenset[int]:
        """The products, by their ids, whose columns meet whole values and are not summed."""
        return frozenset(self._met - self._summed)

    def note(self, equation: Any, operands: Sequence[Trail], result: Trail) -> None:
        """Takes note of an equation.

        Args:
            equation: the equation.
            operands: the trails of its operands.
            result: the trail of its first result.
        """
        name = primitive_name(equation)
        if name in _PRODUCTS:
            self._note_product(equation, operands, result)
        elif name in LOOPS:
            self.note_use(equation.invars)
        else:
            ids = [*map(id, equation.invars)]
            if not (self._of.keys().isdisjoint(ids) and self._whole.isdisjoint(ids)):
                self._note_other(equation, ids, result)

    def note_use(self, atoms: Sequence[Any]) -> None:
        """Takes note of values that products take, whose columns may be summed."""
        if self._of:
            self._summed.update(*[self._of.get(id(atom), _NONE) for atom in atoms])

    def _note_product(self, equation: Any, operands: Sequence[Trail], result: Trail) -> None:
        left, right = map(self._trails.has_rows, operands)
        if left == right:
            return
        weight, [out] = int(left), equation.outvars
        axes, split = (axes_of(each) - self._trails.batch_axes for each in (operands[weight], result))
        if axes - split:
            self.note_use([equation.invars[1 - weight]])
        if not split:
            self._whole.add(id(out))
        elif axes:
            self._of[id(out)] = frozenset({id(out)})

    def _note_other(self, equation: Any, ids: Sequence[int], result: Trail) -> None:
        name = primitive_name(equation)
        columns = _NONE.union(*[self._of.get(atom, _NONE) for atom in ids])
        whole, joined = not self._whole.isdisjoint(ids), not self._joined.isdisjoint(ids)
        if name in _JOINS and (whole or joined):
            self._met |= columns
            joined = True
        elif whole or name == 'broadcast_in_dim':  # a gradient does not get the columns of its factors
            columns = _NONE
        results = [*map(id, equation.outvars)]
        if columns and axes_of(result) - self._trails.batch_axes:
            self._of.update(dict.fromkeys(results, columns))
            self._joined.update(results if joined else ())
        elif whole:
            self._whole.update(results)

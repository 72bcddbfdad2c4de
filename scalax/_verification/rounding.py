"""A step on one device, and what rounding explains of its results: Monte Carlo arithmetic.

The order of the terms of a sum is the compiler's, and another one on each mesh. How much that may change a
result is drawn, as in D. S. Parker, "Monte Carlo Arithmetic" (1997): the step is evaluated with errors of
random signs after each operation that rounds. The error of an operation is one unit of its dtype relative
to the result; of a sum it is one unit relative to the root of the sum of the squares of its terms, which is
what another order of the terms may change, or to a part of the sum of their sizes, which is what adding them
one after the other may.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from scalax._jax import equations, rewriting
from scalax._jax.equations import CALLS, Literal, loop_of, open_jaxpr, scan_options
from scalax._jax.primitives import primitive_name
from scalax._jaxpr.abstract_interpreter import AbstractInterpreter
from scalax._jaxpr.dim_rules import CONTRACTIONS, ELEMENTWISE, VIEWS

_SUMS = CONTRACTIONS | {'cumsum', 'reduce_sum', 'reduce_window_sum', 'scatter-add', 'scatter-sub'}
_IN_A_ROW = 0.25
_SUMS_OF_TWO = frozenset(('add', 'add_any', 'sub'))
_ADDS = _SUMS_OF_TWO | {'convert_element_type'}
_PRODUCTS_OF_ELEMENTS = frozenset(('integer_pow', 'mul', 'square'))
_ARITHMETIC = _ADDS | _PRODUCTS_OF_ELEMENTS
_MOVES = """
    abs argmax argmin bitcast_convert_type ceil clamp concatenate cummax cummin device_put
    dynamic_update_slice eq floor gather ge gt imag iota is_finite le lt max min name ne neg
    optimization_barrier pad pvary real reduce_max reduce_min reduce_precision reduce_window_max
    reduce_window_min reshard rev round scatter scatter-max scatter-min select_n sharding_constraint sign
    sort stack stop_gradient tile top_k
"""
_EXACT = (VIEWS | {*_MOVES.split()}) - _ARITHMETIC
PLACES = frozenset(('device_put', 'reshard', 'sharding_constraint'))

# A product of arguments is the same everywhere, until something is added: the compiler may fuse the two.
_CONSTANT, _GIVEN, _PRODUCT, _ROUNDED = range(4)


class Rounded(AbstractInterpreter[int]):
    """Which values descend from an operation whose result depends on how it is compiled.

    Others, such as random bits, comparisons of arguments and sums of integers, have the same value wherever
    the step runs.
    """

    def __init__(self, jaxpr: Any) -> None:
        super().__init__(bottom=_CONSTANT)
        results = self.eval_jaxpr(jaxpr, [_GIVEN] * len(open_jaxpr(jaxpr).invars))
        self.of_results = [fact == _ROUNDED for fact in results]

    def eval_primitive(self, name: str, equation: Any, operands: Sequence[int]) -> Sequence[int]:
        fact = known = max(operands, default=_CONSTANT)
        if name in _PRODUCTS_OF_ELEMENTS and fact == _GIVEN and _CONSTANT not in operands:
            fact = _PRODUCT  # not those with constants: random numbers are scaled and moved, and decide much
        elif name not in (_EXACT | _ARITHMETIC) or (name in _SUMS_OF_TWO and _PRODUCT in operands):
            fact = _ROUNDED
        return [fact if _is_inexact(var.aval) else known for var in equation.outvars]

    def join(self, facts: Sequence[int]) -> int:
        return max(facts)

    def control_dependence(
        self, equation: Any, by: Callable[[], int], results: Sequence[int]
    ) -> Sequence[int]:
        return [_ROUNDED] * len(results) if by() == _ROUNDED else results

    def __contains__(self, atom: Any) -> bool:
        return self.of(atom) == _ROUNDED

    def is_product(self, atom: Any) -> bool:
        """Whether a value is a product that is rounded in the same way everywhere, unless it is fused."""
        return self.of(atom) == _PRODUCT


Place = tuple[int, ...]
"""Where an equation is: its number in its jaxpr, after those of the equations around it."""


def places(jaxpr: Any, around: Place = (), calls: Sequence[Any] = ()) -> Iterator[tuple[Place, Any, Any]]:
    """The equations of a jaxpr in order, with their places and the calls around them.

    Those that `Evaluation` does not run one by one are left out, and so are constraints.
    """
    for number, equation in enumerate(open_jaxpr(jaxpr).eqns):
        name, place = primitive_name(equation), (*around, number)
        if name in CALLS:
            yield from places(equations.call_jaxpr(equation), place, (equation, *calls))
            continue
        if name == 'scan':
            yield from places(loop_of(equation).body, place, (equation, *calls))
        if name not in PLACES:
            yield place, equation, calls


class Evaluation:
    """Evaluates a jaxpr in a trace, equation by equation.

    Args:
        watched: the places of equations whose results are kept; those of the rounds of a `scan` are stacked.

    Attributes:
        kept: the results of these.
    """

    def __init__(self, watched: Container[Place] = ()) -> None:
        self._watched = watched
        self._around: Place = ()
        self.kept: dict[Place, Sequence[Any]] = {}

    def run(self, jaxpr: Any, operands: Sequence[Any]) -> list[Any]:
        """The results of a jaxpr, open or closed."""
        values = {id(var): value for var, value in rewriting.constants_of(jaxpr)}
        values |= {id(var): value for var, value in zip(open_jaxpr(jaxpr).invars, operands, strict=True)}

        def of(atom: Any) -> Any:
            return atom.val if isinstance(atom, Literal) else values[id(atom)]

        around = self._around
        for number, equation in enumerate(open_jaxpr(jaxpr).eqns):
            self._around = place = (*around, number)
            results = self._equation(equation, [*map(of, equation.invars)])
            values.update(zip(map(id, equation.outvars), results, strict=True))
            if place in self._watched:
                self.kept[place] = [*results]
        self._around = around
        return [*map(of, open_jaxpr(jaxpr).outvars)]

    def _equation(self, equation: Any, operands: list[Any]) -> Sequence[Any]:
        name = primitive_name(equation)
        if name in CALLS:
            return self.run(equations.call_jaxpr(equation), operands)
        if name == 'cond':
            return self._branches(equation, operands)
        if name in ('scan', 'while'):
            return self._loop(equation, operands)
        return self.eval_primitive(name, equation, operands)

    def eval_primitive(self, name: str, equation: Any, operands: Sequence[Any]) -> Sequence[Any]:
        """The results of an equation without a jaxpr that is run here."""
        return rewriting.eval_equation(equation, operands)

    def _branches(self, equation: Any, operands: list[Any]) -> Sequence[Any]:
        def run(branch: Any) -> Any:
            return lambda *given: self.run(branch, given)

        index, *given = operands
        return jax.lax.switch(index, [*map(run, equations.branches(equation))], *given)

    def _loop(self, equation: Any, operands: list[Any]) -> Sequence[Any]:
        loop = loop_of(equation)
        constants, first, stacks = loop.split(operands)
        if loop.length is None:
            tested = operands[: loop.num_cond_consts]
            return jax.lax.while_loop(
                lambda state: self.run(loop.cond, [*tested, *state])[0],
                lambda state: self.run(loop.body, [*constants, *state]),
                [*first],
            )

        def body(state: Any, elements: Any) -> Any:
            outside, self.kept = self.kept, {}
            results = self.run(loop.body, [*constants, *state, *elements])
            inside, self.kept = self.kept, outside
            return results[: loop.num_carry], (results[loop.num_carry :], inside)

        options = scan_options(equation)
        last, (stacked, inside) = jax.lax.scan(body, [*first], [*stacks], loop.length, **options)
        self.kept |= inside
        return [*last, *stacked]


class OnOneDevice(Evaluation):
    """The same for one device, with rounding errors; shardings that are given inside mean nothing there.

    Args:
        rounded: which values may have errors.
        scale: how large errors are, in units of rounding; 0 for none.
        seed: an unsigned integer of 32 bits that decides about their signs.
        watched: as in `Evaluation`.
    """

    def __init__(self, rounded: Rounded, scale: Any, seed: Any, watched: Container[Place] = ()) -> None:
        super().__init__(watched)
        self._rounded, self._scale, self._seed = rounded, scale, seed

    def eval_primitive(self, name: str, equation: Any, operands: Sequence[Any]) -> Sequence[Any]:
        if name in ('device_put', 'sharding_constraint'):  # perhaps on devices of the user's mesh
            return operands
        if not equation.outvars:  # prints and the like, which happen on the mesh
            return ()
        results = super().eval_primitive(name, equation, operands)
        if equation.outvars[0] not in self._rounded or name in _EXACT:
            return results
        # The types that mesh axes have here may be others than outside.
        with jax.sharding.use_abstract_mesh(jax.typeof(results[0]).sharding.mesh):
            return [self._moved(name, equation, operands, result) for result in results]

    def _moved(self, name: str, equation: Any, operands: Sequence[Any], result: Any) -> Any:
        """A result with an error."""
        if not _is_inexact(result):
            return result
        kind = jnp.finfo(result.dtype)
        eps = float(kind.eps)  # of 8 bits it is of a type that nothing is multiplied with
        if name in _ADDS and kind.bits >= 32:  # products before them may be rounded or not
            atoms = zip(equation.invars, operands, strict=True)
            products = [jnp.abs(value) for atom, value in atoms if self._rounded.is_product(atom)]
            if not products:  # those that descend from what is rounded have errors of their own
                return result
            return self._with_error(name, result, eps * functools.reduce(jnp.maximum, products))
        unit = eps if kind.bits >= 32 else eps / 2  # narrow ones are rounded once, from wider sums
        if name in _SUMS and not jnp.iscomplexobj(result):
            squares = [jnp.square(x) if _is_inexact(x) else x for x in operands]
            [size] = rewriting.eval_equation(equation, squares)
            size = jnp.sqrt(jnp.abs(size))
            if kind.bits >= 32:  # in which terms are added one after the other: that rounds what grows
                sizes = [jnp.abs(x) if _is_inexact(x) else x for x in operands]
                [total] = rewriting.eval_equation(equation, sizes)
                size = jnp.maximum(size, _IN_A_ROW * jnp.abs(total))
        elif name in ELEMENTWISE:
            size = jnp.abs(result)
        else:  # what is inside is not known
            size = jnp.max(jnp.abs(result), initial=0)
        return self._with_error(name, result, unit * size)

    def _with_error(self, name: str, result: Any, size: Any) -> Any:
        error = self._signed(name, self._scale * size.astype(jnp.float32), result)
        return result + jnp.where(jnp.isfinite(error), error, 0).astype(result.dtype)

    def _signed(self, name: str, size: Any, value: Any) -> Any:
        """Sizes with signs that look random: the upper bit of a hash of the values.

        Equal results of one operation have equal errors, wherever they are in an array. Two products of the
        same value do not, nor do c and -c: terms that cancel exactly on one device need not cancel where the
        compiler fuses one of them with the sum, and so does not round it.
        """
        seed = self._seed
        if name in _PRODUCTS_OF_ELEMENTS:
            seed = seed + jnp.uint32(zlib.crc32(repr(self._around).encode()))
        hashed = _bits(value.real.astype(jnp.float32)) * jnp.uint32(0x9E3779B1) + seed
        # A product alone would pass the sign on to the upper bit, and to no other.
        hashed = (hashed ^ (hashed >> 15)) * jnp.uint32(0x2C1B3C6D)
        signed = (_bits(size) & jnp.uint32(0x7FFFFFFF)) | (hashed & jnp.uint32(0x80000000))
        return jax.lax.bitcast_convert_type(signed, jnp.float32)


def _bits(value: Any) -> Any:
    return jax.lax.bitcast_convert_type(value, jnp.uint32)


def _is_inexact(value: Any) -> bool:
    return jax.dtypes.issubdtype(getattr(value, 'dtype', None), jnp.inexact)

"""Random rounding errors in a step on one device: Monte Carlo arithmetic.

The compiler chooses the order in which the terms of a sum are added, and chooses another one for each mesh.
To sample how much that may change the results, a step is evaluated with an error of random sign after each
operation that rounds, as in D. S. Parker, "Monte Carlo Arithmetic" (1997). The error of an operation is one
unit in the last place of the result. The error of a sum is one unit relative to the root of the sum of the
squares of its terms, as large as another order of the terms may cause; or, if that is more, relative to a
fraction of the sum of their absolute values, as large as adding the terms one after the other may cause.
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
_SEQUENTIAL_SUM = 0.25  # the fraction of the sum of absolute values
_BINARY_SUMS = frozenset(('add', 'add_any', 'sub'))
_ADDS = _BINARY_SUMS | {'convert_element_type'}
_ELEMENTWISE_PRODUCTS = frozenset(('integer_pow', 'mul', 'square'))
_ARITHMETIC = _ADDS | _ELEMENTWISE_PRODUCTS
_EXACT_NAMES = """
    abs argmax argmin bitcast_convert_type ceil clamp concatenate cummax cummin device_put
    dynamic_update_slice eq floor gather ge gt imag iota is_finite le lt max min name ne neg
    optimization_barrier pad pvary real reduce_max reduce_min reduce_precision reduce_window_max
    reduce_window_min reshard rev round scatter scatter-max scatter-min select_n sharding_constraint sign
    sort stack stop_gradient tile top_k
"""
_EXACT = (VIEWS | {*_EXACT_NAMES.split()}) - _ARITHMETIC
PLACEMENT_OPS = frozenset(('device_put', 'reshard', 'sharding_constraint'))

# The abstract values. A product of inputs is rounded identically everywhere until it is an operand of a sum:
# the compiler may fuse the two, and then does not round the product.
_CONSTANT, _INPUT, _PRODUCT, _ROUNDED = range(4)


class RoundingAnalysis(AbstractInterpreter[int]):
    """Finds the values that depend on an operation whose result depends on how it is compiled.

    Other values, such as random bits, comparisons of arguments and sums of integers, are the same wherever
    the step runs.

    Attributes:
        rounded_results: for each result of the jaxpr, whether it is such a value.
    """

    def __init__(self, jaxpr: Any) -> None:
        super().__init__(bottom=_CONSTANT)
        results = self.eval_jaxpr(jaxpr, [_INPUT] * len(open_jaxpr(jaxpr).invars))
        self.rounded_results = [fact == _ROUNDED for fact in results]

    def eval_primitive(self, name: str, equation: Any, operands: Sequence[int]) -> Sequence[int]:
        fact = joined = max(operands, default=_CONSTANT)
        if name in _ELEMENTWISE_PRODUCTS and fact == _INPUT and _CONSTANT not in operands:
            # Not for products with constants: random numbers are scaled and shifted, and many comparisons
            # depend on them.
            fact = _PRODUCT
        elif name not in (_EXACT | _ARITHMETIC) or (name in _BINARY_SUMS and _PRODUCT in operands):
            fact = _ROUNDED
        return [fact if _is_inexact(var.aval) else joined for var in equation.outvars]

    def join(self, facts: Sequence[int]) -> int:
        return max(facts)

    def control_dependence(
        self, equation: Any, by: Callable[[], int], results: Sequence[int]
    ) -> Sequence[int]:
        return [_ROUNDED] * len(results) if by() == _ROUNDED else results

    def __contains__(self, atom: Any) -> bool:
        return self.of(atom) == _ROUNDED

    def is_product(self, atom: Any) -> bool:
        """Whether a value is a product that rounds identically everywhere, unless it is fused with a sum."""
        return self.of(atom) == _PRODUCT


EquationPath = tuple[int, ...]
"""The index of an equation in its jaxpr, after the indices of the equations around it, outermost first."""


def equation_paths(
    jaxpr: Any, parent: EquationPath = (), calls: Sequence[Any] = ()
) -> Iterator[tuple[EquationPath, Any, Any]]:
    """Yields the equations of a jaxpr in order, each with its path and the calls around it.

    Leaves out sharding constraints, and equations that `Evaluator` does not run one by one.
    """
    for i, equation in enumerate(open_jaxpr(jaxpr).eqns):
        name, path = primitive_name(equation), (*parent, i)
        if name in CALLS:
            yield from equation_paths(equations.call_jaxpr(equation), path, (equation, *calls))
            continue
        if name == 'scan':
            yield from equation_paths(loop_of(equation).body, path, (equation, *calls))
        if name not in PLACEMENT_OPS:
            yield path, equation, calls


class Evaluator:
    """Evaluates a jaxpr in a trace, equation by equation, and records intermediate values.

    Args:
        watched: the paths of the equations whose results to record.

    Attributes:
        recorded: path -> the results of the equation; for equations in a `scan`, stacked over its iterations.
    """

    def __init__(self, watched: Container[EquationPath] = ()) -> None:
        self._watched = watched
        self._path: EquationPath = ()
        self.recorded: dict[EquationPath, Sequence[Any]] = {}

    def run(self, jaxpr: Any, operands: Sequence[Any]) -> list[Any]:
        """Returns the results of a jaxpr, open or closed."""
        values = {id(var): value for var, value in rewriting.constants_of(jaxpr)}
        values |= {id(var): value for var, value in zip(open_jaxpr(jaxpr).invars, operands, strict=True)}

        def value_of(atom: Any) -> Any:
            return atom.val if isinstance(atom, Literal) else values[id(atom)]

        parent = self._path
        for i, equation in enumerate(open_jaxpr(jaxpr).eqns):
            self._path = path = (*parent, i)
            results = self._equation(equation, [*map(value_of, equation.invars)])
            values.update(zip(map(id, equation.outvars), results, strict=True))
            if path in self._watched:
                self.recorded[path] = [*results]
        self._path = parent
        return [*map(value_of, open_jaxpr(jaxpr).outvars)]

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
        """Returns the results of an equation whose inner jaxprs, if any, are not evaluated one by one."""
        return rewriting.eval_equation(equation, operands)

    def _branches(self, equation: Any, operands: list[Any]) -> Sequence[Any]:
        def run(branch: Any) -> Any:
            return lambda *branch_operands: self.run(branch, branch_operands)

        index, *branch_operands = operands
        return jax.lax.switch(index, [*map(run, equations.branches(equation))], *branch_operands)

    def _loop(self, equation: Any, operands: list[Any]) -> Sequence[Any]:
        loop = loop_of(equation)
        consts, init, xs = loop.split(operands)
        if loop.length is None:
            cond_consts = operands[: loop.num_cond_consts]
            return jax.lax.while_loop(
                lambda carry: self.run(loop.cond, [*cond_consts, *carry])[0],
                lambda carry: self.run(loop.body, [*consts, *carry]),
                [*init],
            )

        def body(carry: Any, x: Any) -> Any:
            outer_recorded, self.recorded = self.recorded, {}
            results = self.run(loop.body, [*consts, *carry, *x])
            recorded, self.recorded = self.recorded, outer_recorded
            return results[: loop.num_carry], (results[loop.num_carry :], recorded)

        options = scan_options(equation)
        carry, (ys, recorded) = jax.lax.scan(body, [*init], [*xs], loop.length, **options)
        self.recorded |= recorded
        return [*carry, *ys]


class PerturbedEvaluator(Evaluator):
    """Evaluates a jaxpr on one device with random rounding errors, and ignores sharding constraints.

    Args:
        rounding: the values that may have errors.
        scale: the size of the errors in units in the last place; 0 for none.
        seed: selects the signs of the errors; an unsigned 32-bit integer.
        watched: as in `Evaluator`.
    """

    def __init__(
        self, rounding: RoundingAnalysis, scale: Any, seed: Any, watched: Container[EquationPath] = ()
    ) -> None:
        super().__init__(watched)
        self._rounding, self._scale, self._seed = rounding, scale, seed

    def eval_primitive(self, name: str, equation: Any, operands: Sequence[Any]) -> Sequence[Any]:
        if name in ('device_put', 'sharding_constraint'):  # it may name devices of the user's mesh
            return operands
        if not equation.outvars:  # prints and similar effects, which run on the mesh only
            return ()
        results = super().eval_primitive(name, equation, operands)
        if equation.outvars[0] not in self._rounding or name in _EXACT:
            return results
        # The axis types of the mesh may differ from those outside of this equation.
        with jax.sharding.use_abstract_mesh(jax.typeof(results[0]).sharding.mesh):
            return [self._perturb(name, equation, operands, result) for result in results]

    def _perturb(self, name: str, equation: Any, operands: Sequence[Any], result: Any) -> Any:
        """Returns a result with a rounding error."""
        if not _is_inexact(result):
            return result
        info = jnp.finfo(result.dtype)
        eps = float(info.eps)  # a Python float: 8-bit dtypes do not support arithmetic
        if name in _ADDS and info.bits >= 32:  # only products that are fused with the sum round differently
            atoms = zip(equation.invars, operands, strict=True)
            products = [jnp.abs(value) for atom, value in atoms if self._rounding.is_product(atom)]
            if not products:  # the operands have their own errors, if they are rounded
                return result
            return self._with_error(name, result, eps * functools.reduce(jnp.maximum, products))
        unit = eps if info.bits >= 32 else eps / 2  # narrow dtypes are rounded once, from wider sums
        if name in _SUMS and not jnp.iscomplexobj(result):
            squares = [jnp.square(x) if _is_inexact(x) else x for x in operands]
            [size] = rewriting.eval_equation(equation, squares)
            size = jnp.sqrt(jnp.abs(size))
            if info.bits >= 32:  # terms may be added one after the other, each to a growing partial sum
                sizes = [jnp.abs(x) if _is_inexact(x) else x for x in operands]
                [total] = rewriting.eval_equation(equation, sizes)
                size = jnp.maximum(size, _SEQUENTIAL_SUM * jnp.abs(total))
        elif name in ELEMENTWISE:
            size = jnp.abs(result)
        else:  # the operation may be anything
            size = jnp.max(jnp.abs(result), initial=0)
        return self._with_error(name, result, unit * size)

    def _with_error(self, name: str, result: Any, size: Any) -> Any:
        error = self._signed(name, self._scale * size.astype(jnp.float32), result)
        return result + jnp.where(jnp.isfinite(error), error, 0).astype(result.dtype)

    def _signed(self, name: str, size: Any, value: Any) -> Any:
        """Returns the sizes with pseudorandom signs: the upper bit of a hash of the values.

        Equal results of one operation get equal errors, wherever they are in an array. Results of two
        products do not, and neither do c and -c: terms that cancel exactly on one device do not cancel where
        the compiler fuses one of them with the sum, and therefore does not round it.
        """
        seed = self._seed
        if name in _ELEMENTWISE_PRODUCTS:
            seed = seed + jnp.uint32(zlib.crc32(repr(self._path).encode()))
        hashed = _bits(value.real.astype(jnp.float32)) * jnp.uint32(0x9E3779B1) + seed
        # The multiplication alone would move the sign bit to the upper bit only.
        hashed = (hashed ^ (hashed >> 15)) * jnp.uint32(0x2C1B3C6D)
        signed = (_bits(size) & jnp.uint32(0x7FFFFFFF)) | (hashed & jnp.uint32(0x80000000))
        return jax.lax.bitcast_convert_type(signed, jnp.float32)


def _bits(value: Any) -> Any:
    return jax.lax.bitcast_convert_type(value, jnp.uint32)


def _is_inexact(value: Any) -> bool:
    return jax.dtypes.issubdtype(getattr(value, 'dtype', None), jnp.inexact)

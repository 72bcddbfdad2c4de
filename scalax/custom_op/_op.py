"""Operations with their own partitioning: a function of local blocks, and a rule in einops notation.

The parser of named dimensions reads the rule once. It determines Shardy's rule, the sharding of factors, and
the specs of operands and results.

Three ways to run, by the types of the mesh axes, are listed in `_run`. Inside a partly manual `shard_map`,
the compiler partitions the plain function. If a spec repeats an axis or does not divide, or operands
disagree, `_layout` decides, the same way in all three.

Transformations. `custom_partitioning` can be neither mapped nor differentiated. So a call is `custom_vjp`
over `custom_vmap` over one of the three, all inside one `jax.jit`, because an eager call would otherwise not
be partitioned. Mapping gives an operation whose rule has one more factor.

Checks run during the trace. The function is traced on global arrays, to learn the results, and on blocks of
every factor that may be sharded, on an abstract mesh with one axis for each, where JAX tracks which values
vary. Factors of equal size are cut differently, so that swapped dimensions are detected.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import jax

from scalax._core.pytree.paths import is_prng_key
from scalax.custom_op._gradient import Gradient, as_tuple, differentiable
from scalax.custom_op._rule import Rule, match_rule, parse_rule
from scalax.custom_op._run import Operation, Results
from scalax.custom_op._verify import verified
from scalax.errors import ArgumentError, RuleError, checked_flag, plural

Given = ParamSpec('Given')
Result = TypeVar('Result')


def sharded_op(
    rule: str,
    *,
    reduction_factors: Iterable[str] = (),
    need_replication_factors: Iterable[str] = (),
    check_vma: bool = True,
) -> Callable[[Callable[Concatenate[Any, Given], Result]], ShardedOp[Given, Result]]:
    """Makes an operation on sharded arrays of a function on their blocks; a decorator.

    The function's first parameter is a `FactorContext`, then come the operands, one for each of the rule,
    then static arguments, which are keyword-only. On each device it is given the blocks of the operands that
    it holds, and returns the blocks of the results: one array, or a tuple. Where nothing is sharded the
    blocks are the arrays.

    Args:
        rule: which dimensions belong together, as in ``'b v, b -> b'``: operands, separated by commas, and
            results; each dimension the name of a *factor*. Nothing stands for a scalar, ``_`` for a dimension
            that is never sharded, a number for one of that size. A factor of results only is never sharded.
        reduction_factors: factors whose blocks the function combines (``ctx.psum``); they are in no result.
        need_replication_factors: factors that the function needs unsharded.
        check_vma: whether JAX tracks, while it traces, which values differ between devices, so that a
            forgotten ``ctx.psum`` is an error; as in ``jax.shard_map``. ``pallas_call`` and some loops need
            False: then the only check is that the blocks of every reduction factor are combined somehow.

    Returns:
        A decorator that makes a `ShardedOp`.

    Raises:
        RuleError: the rule is invalid, or the function has other operands.

    Example:
        >>> import numpy as np
        >>> @sharded_op('b c, -> b', reduction_factors=('c',))
        ... def scaled_sum(ctx, x, scale):
        ...     return ctx.psum(scale * x.sum(axis=-1), 'c')
        >>> scaled_sum(np.ones((2, 3)), 10.0).tolist()
        [30.0, 30.0]
    """
    checked_flag('check_vma', check_vma)
    read = parse_rule(rule, reduction_factors, need_replication_factors)

    def decorate(fun: Callable[Concatenate[Any, Given], Result]) -> ShardedOp[Given, Result]:
        return ShardedOp(fun, read, check_vma=check_vma)

    return decorate


class ShardedOp(Generic[Given, Result]):
    """What `sharded_op` makes: called with global arrays, it runs on the blocks of each device.

    Works inside and outside of ``jax.jit`` and `sjit`, under ``jax.grad``, ``jax.vmap`` and
    ``jax.lax.scan``, over Auto and Explicit mesh axes. Inside ``shard_map`` its operands are the blocks
    there. The gradient is that of the function on global arrays, which the compiler partitions, unless
    `defvjp` gives another.

    Attributes:
        rule: the text of the rule.
    """

    def __init__(
        self, fun: Callable[Concatenate[Any, Given], Result], rule: Rule, *, check_vma: bool
    ) -> None:
        """Made by `sharded_op`."""
        functools.update_wrapper(self, fun)
        self._name = getattr(fun, '__name__', type(fun).__name__)
        self._fun, self._rule, self._check_vma = fun, rule, check_vma
        self._labels = self._operand_names()
        self.rule = rule.text
        self._gradient: Gradient | None = None
        self._reset()

    def __repr__(self) -> str:
        return f'<sharded_op {self._name}: {self.rule!r}>'

    def __call__(self, *operands: Given.args, **static: Given.kwargs) -> Result:
        """Runs the operation.

        Args:
            *operands: global arrays.
            **static: hashable; the operation is traced and compiled for each value.

        Raises:
            ArgumentError: the operands do not fit the rule.
            RuleError: the results of the function contradict the rule, or it forgot a factor.
        """
        returned: Result = self._jitted(*operands, **static)
        return returned

    def defvjp(self, forward: Callable[..., Any], backward: Callable[..., Any]) -> None:
        """Gives the operation its gradient, by two more operations (or functions of global arrays).

        Args:
            forward: takes the operands; returns the results and, after them, what else *backward* needs (its
                residuals). The operation itself if there are none.
            backward: takes the operands, the residuals, and one cotangent for each floating-point result;
                returns one for each floating-point operand. Both are given the static arguments too.

        Example:
            >>> import jax.numpy as jnp
            >>> @sharded_op('b c -> b', reduction_factors=('c',))
            ... def norms(ctx, x):
            ...     return jnp.sqrt(ctx.psum((x * x).sum(axis=-1), 'c'))
            >>> @sharded_op('b c, b, b -> b c')
            ... def norms_backward(ctx, x, norm, cotangent):
            ...     return x * (cotangent / norm)[:, None]
            >>> norms.defvjp(lambda x: (norms(x),) * 2, norms_backward)
            >>> jax.grad(lambda x: norms(x).sum())(jnp.array([[3.0, 4.0]]))
            Array([[0.6, 0.8]], dtype=float32)
        """
        self._gradient = forward, backward
        self._reset()

    def _reset(self) -> None:
        """Drops what was compiled."""

        def call(*operands: Any, **static: Any) -> Any:
            gradient = None
            if self._gradient is not None:
                forward, backward = self._gradient
                gradient = functools.partial(forward, **static), functools.partial(backward, **static)
            operation = self._operation(operands, static)
            results = differentiable(operation, gradient)(*operands)
            return results if len(operation.factor_map.results) > 1 else results[0]

        call.__name__ = call.__qualname__ = self._name
        parameters = inspect.signature(self._fun).parameters.values()
        static_names = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
        self._jitted = jax.jit(call, static_argnames=static_names)

    def _operation(self, operands: Sequence[Any], static: dict[str, Any]) -> Operation:
        """The operation on these operands, checked."""
        self._check_operands(operands)

        def local(*args: Any) -> Results:
            return as_tuple(self._fun(*args, **static))

        # Before the function sees the operands.
        factor_map = match_rule(self._rule, self._name, dict(zip(self._labels, operands, strict=True)))
        operation = Operation(self._name, self._labels, self._rule, local, self._check_vma, factor_map)
        return verified(operation, operands)

    def _check_operands(self, operands: Sequence[Any]) -> None:
        if len(operands) != len(self._labels):
            raise ArgumentError(
                f'{self._name} takes {plural(len(self._labels), "operand")} '
                f'({", ".join(self._labels)}), got {len(operands)}'
            )
        for label, operand in zip(self._labels, operands, strict=True):
            if not hasattr(operand, 'dtype'):
                raise ArgumentError(
                    f'{self._name}: operand {label!r} has to be an array, got {type(operand).__name__}'
                )
            if is_prng_key(operand):
                raise ArgumentError(
                    f'{self._name}: operand {label!r} holds typed PRNG keys: give jax.random.key_data of '
                    'them, and use jax.random.wrap_key_data in the function'
                )

    def _operand_names(self) -> tuple[str, ...]:
        """The names of the operands: those of the function's parameters.

        Raises:
            RuleError: it does not have as many as the rule.
        """
        parameters = inspect.signature(self._fun).parameters.values()
        by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        names = [each.name for each in parameters if each.kind in by_position]
        wanted = len(self._rule.operands)
        if len(names) != wanted + 1:
            raise RuleError(
                f'{self._name}: the rule {self._rule.text!r} has {plural(wanted, "operand")}, the function '
                f'takes ({", ".join(names)}): a context first, then the operands; static arguments are '
                'keyword-only'
            )
        return tuple(names[1:])

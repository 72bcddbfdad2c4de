"""`sharded_op`: operations defined by a function of local blocks and a rule in einops notation.

The rule determines Shardy's rule, the sharding of factors, and the specs of operands and results. `_run`
lists the three ways to run an operation, by the types of the mesh axes. Inside a partly manual `shard_map`,
the compiler partitions the function on global arrays. If a spec repeats an axis, a dimension is indivisible,
or operands disagree, `_layout` decides, in the same way in all three cases.

**Transformations.** `custom_partitioning` can be neither mapped nor differentiated. A call is therefore
`custom_vjp` over `custom_vmap` over one of the three, all inside one `jax.jit`, because an eager call would
not be partitioned. Mapping adds a factor to the rule.

**Checks** run during tracing (`_check`). The function is traced on global arrays, to determine the results,
and on blocks of every factor that may be sharded, over an abstract mesh with one axis for each factor, where
JAX tracks which values vary. Factors of equal size get different numbers of blocks, to detect swapped
dimensions.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import jax

from scalax._core.pytree.paths import is_prng_key
from scalax.custom_op._check import check_operation
from scalax.custom_op._gradient import Gradient, as_tuple, differentiable
from scalax.custom_op._rule import Rule, match_rule, parse_rule
from scalax.custom_op._run import Operation, Results
from scalax.errors import ArgumentError, RuleError, checked_flag, plural

Params = ParamSpec('Params')
Result = TypeVar('Result')


def sharded_op(
    rule: str,
    *,
    reduction_factors: Iterable[str] = (),
    need_replication_factors: Iterable[str] = (),
    check_vma: bool = True,
) -> Callable[[Callable[Concatenate[Any, Params], Result]], ShardedOp[Params, Result]]:
    """Defines an operation on sharded arrays by a function on their blocks; a decorator.

    The function's first parameter is a `FactorContext`. The operands follow, one for each operand of the
    rule, and then static arguments, which are keyword-only. On each device the function receives the blocks
    of the operands that the device holds, and returns the blocks of the results: one array, or a tuple. If
    nothing is sharded, the blocks are the global arrays.

    Args:
        rule: the operands and the results, separated by commas, as in ``'b v, b -> b'``. Each dimension is
            the name of a *factor*; dimensions of one factor are sharded in the same way. An empty operand is
            a scalar, ``_`` a dimension that is never sharded, a number a dimension of that size. A factor
            that only results have is never sharded.
        reduction_factors: factors whose blocks the function combines (``ctx.psum``); no result has them.
        need_replication_factors: factors that the function needs unsharded.
        check_vma: whether JAX tracks, while it traces, which values vary over mesh axes, so that a
            forgotten ``ctx.psum`` is an error; as in ``jax.shard_map``. ``pallas_call`` and some loops need
            False; the only check is then that the function combines the blocks of every reduction factor.

    Returns:
        A decorator that returns a `ShardedOp`.

    Raises:
        RuleError: the rule is invalid, or has another number of operands than the function.

    Example:
        >>> import numpy as np
        >>> @sharded_op('b c, -> b', reduction_factors=('c',))
        ... def scaled_sum(ctx, x, scale):
        ...     return ctx.psum(scale * x.sum(axis=-1), 'c')
        >>> scaled_sum(np.ones((2, 3)), 10.0).tolist()
        [30.0, 30.0]
    """
    checked_flag('check_vma', check_vma)
    parsed_rule = parse_rule(rule, reduction_factors, need_replication_factors)

    def decorator(fun: Callable[Concatenate[Any, Params], Result]) -> ShardedOp[Params, Result]:
        return ShardedOp(fun, parsed_rule, check_vma=check_vma)

    return decorator


class ShardedOp(Generic[Params, Result]):
    """An operation on global arrays, which runs on the blocks of each device; the result of `sharded_op`.

    Works inside and outside ``jax.jit`` and `sjit`, under ``jax.grad``, ``jax.vmap`` and ``jax.lax.scan``,
    over Auto and Explicit mesh axes. Inside ``shard_map`` its operands are already blocks. The gradient is
    that of the function on global arrays, which the compiler partitions, unless `defvjp` sets another.

    Attributes:
        rule: the text of the rule.
    """

    def __init__(
        self, fun: Callable[Concatenate[Any, Params], Result], rule: Rule, *, check_vma: bool
    ) -> None:
        """Created by `sharded_op`."""
        functools.update_wrapper(self, fun)
        self._name = getattr(fun, '__name__', type(fun).__name__)
        self._fun, self._rule, self._check_vma = fun, rule, check_vma
        self._labels = self._operand_names()
        self.rule = rule.text
        self._gradient: Gradient | None = None
        self._build()

    def __repr__(self) -> str:
        return f'<sharded_op {self._name}: {self.rule!r}>'

    def __call__(self, *operands: Params.args, **static: Params.kwargs) -> Result:
        """Runs the operation.

        Args:
            *operands: global arrays.
            **static: hashable; the operation is traced and compiled for each value.

        Raises:
            ArgumentError: the operands do not fit the rule.
            RuleError: the results of the function contradict the rule, or it does not combine a factor.
        """
        result: Result = self._jitted(*operands, **static)
        return result

    def defvjp(self, forward: Callable[..., Any], backward: Callable[..., Any]) -> None:
        """Sets the gradient of the operation, with two more operations (or functions of global arrays).

        Both also receive the static arguments.

        Args:
            forward: takes the operands; returns the results, followed by the residuals that *backward* needs.
                Without residuals, pass the operation itself.
            backward: takes the operands, the residuals, and one cotangent for each floating-point result;
                returns one cotangent for each floating-point operand.

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
        self._build()

    def _build(self) -> None:
        """Creates the jitted function, which replaces programs compiled for another gradient."""

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
        static_names = [
            parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY
        ]
        self._jitted = jax.jit(call, static_argnames=static_names)

    def _operation(self, operands: Sequence[Any], static: dict[str, Any]) -> Operation:
        """Returns the operation on these operands, after all checks."""
        self._check_operands(operands)

        def local_fn(*args: Any) -> Results:
            return as_tuple(self._fun(*args, **static))

        # Matched before the function is traced, so that errors about the operands come first.
        factor_map = match_rule(self._rule, self._name, dict(zip(self._labels, operands, strict=True)))
        operation = Operation(self._name, self._labels, self._rule, local_fn, self._check_vma, factor_map)
        return check_operation(operation, operands)

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
        """Returns the names of the function's parameters that are operands.

        Raises:
            RuleError: the rule has another number of operands.
        """
        parameters = inspect.signature(self._fun).parameters.values()
        positional_kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        names = [parameter.name for parameter in parameters if parameter.kind in positional_kinds]
        num_operands = len(self._rule.operands)
        if len(names) != num_operands + 1:
            raise RuleError(
                f'{self._name}: the rule {self._rule.text!r} has {plural(num_operands, "operand")}, the '
                f'function takes ({", ".join(names)}): a context first, then the operands; static arguments '
                'are keyword-only'
            )
        return tuple(names[1:])

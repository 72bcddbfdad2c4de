"""Gradients of a batch in several microbatches, one after the other; no example leaves its device."""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, ParamSpec, TypeVar

import jax
import jax.numpy as jnp

from scalax._compile.call.signature import name_of
from scalax._compile.deferred_jit import called, compiled
from scalax._compile.tracebacks import run_user_function
from scalax._core.context.constraints import apply_shardings, explicit_sharding
from scalax._core.pytree import partition_specs
from scalax._core.pytree.paths import NamedTree
from scalax.errors import ArgumentError, DataError, did_you_mean, shown_leaves

Names = int | str | Sequence[int | str]
Given = ParamSpec('Given')
Result = TypeVar('Result')


def microbatch(
    fun: Callable[Given, Result],
    n: int,
    *,
    batch: Names = 1,
    batch_axis: int = 0,
    rng: Names = (),
    reduce: Literal['mean', 'sum'] = 'mean',
    accumulate_dtype: Any = None,
) -> Callable[Given, Result]:
    """Makes a function process its batch in *n* microbatches, one after the other.

    Meant for functions that return gradients: ``jax.grad(loss)`` and ``jax.value_and_grad(loss)``, whatever
    else they return. Microbatch ``i`` holds the examples ``i``, ``i + n``, ``i + 2n`` and so on. So each
    device keeps its own examples, and nothing is sent, as long as *n* divides their number on each device.
    In `MeshShardingHelper.sjit`, gradients of replicated parameters (DDP) are summed over devices once, after
    the last microbatch, if *fun* treats each example alone but for sums and means, and draws nothing random.

    Inside `shard_map` it needs ``check_vma=False``. Outside of compiled functions it is compiled as by
    ``jax.jit``.

    Where the loss is a mean over equally weighted examples, the mean over the microbatches is the mean over
    all examples, up to rounding. With weights (padding, say) it is not. Then return sums, and divide once::

        def sums(params, batch):  # of one microbatch
            losses = ...
            return (losses * batch['weight']).sum(), batch['weight'].sum()


        grads_of = jax.value_and_grad(sums, has_aux=True)
        (loss, weight), grads = microbatch(grads_of, 8, reduce='sum')(params, batch)
        grads = jax.tree.map(lambda g: g / weight, grads)

    Args:
        fun: the function; it returns arrays of the same shapes for every microbatch.
        n: the number of microbatches.
        batch: the arguments to divide, by position or name; those of ``*args`` only together, by its name.
        batch_axis: their batch dimension; may be negative.
        rng: arguments that are PRNG keys, or trees of them; microbatch ``i`` gets
            ``jax.random.fold_in(key, i)``.
        reduce: what becomes of the *n* results: their ``'mean'`` or their ``'sum'``, leaf by leaf.
        accumulate_dtype: the dtype in which floating-point leaves are summed. By default that is float32 for
            narrower floats, and the leaf's dtype for others. Results have the dtypes of *fun*.

    Returns:
        A function with the parameters of *fun*.

    Raises:
        ArgumentError: an argument that *fun* does not have, or that is both the batch and a key; another
            dtype to accumulate in; integers in the result, which have no mean.
        DataError: the examples do not divide by *n*; all such leaves are named. Or the batch holds no array.

    Example:
        >>> import numpy as np
        >>> def loss(w, x):
        ...     return ((x @ w) ** 2).mean()
        >>> x, w = np.arange(12.0, dtype=np.float32).reshape(6, 2), np.ones(2, np.float32)
        >>> grads = microbatch(jax.grad(loss), 3)(w, x)
        >>> bool(jnp.allclose(grads, jax.grad(loss)(w, x)))
        True
    """
    if not callable(fun):
        raise ArgumentError(f'microbatch takes a function first, got {type(fun).__name__}')
    if isinstance(n, bool) or not hasattr(n, '__index__') or operator.index(n) < 1:
        raise ArgumentError(f'microbatch(fun, n): n is the number of microbatches, at least 1, got {n!r}')
    n = operator.index(n)
    if reduce not in ('mean', 'sum'):
        raise ArgumentError(f"microbatch: reduce is 'mean' or 'sum', got {reduce!r}")
    if accumulate_dtype is not None and not _is_float(accumulate_dtype):
        raise ArgumentError(
            'microbatch: accumulate_dtype is a floating-point dtype, or None, '
            f'got {getattr(accumulate_dtype, "__name__", repr(accumulate_dtype))}'
        )
    signature, name = inspect.signature(fun), name_of(fun)
    divided, keys = (_names(fun, signature, option) for option in (batch, rng))
    if both := [argument for argument in divided if argument in keys]:
        raise ArgumentError(
            f'microbatch: {", ".join(both)} cannot be both the batch (batch=...) and PRNG keys (rng=...)'
        )

    def read(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        return signature.bind(*args, **kwargs).arguments

    def run(given: dict[str, Any]) -> Any:
        call = inspect.BoundArguments(signature, {**given})
        call.apply_defaults()
        parts = _divided({each: call.arguments[each] for each in divided}, n, batch_axis, name)

        def on_part(index: Any, part: dict[str, Any]) -> Any:
            own = jax.tree.map(
                lambda key: jax.random.fold_in(key, index), {each: call.arguments[each] for each in keys}
            )
            call_of_part = inspect.BoundArguments(signature, {**call.arguments, **part, **own})
            return run_user_function(fun, call_of_part.args, call_of_part.kwargs)

        # Compiled, because it is traced twice, for the types of the sums and in the loop; JAX runs the user's
        # code only once, since it finds the trace again.
        return _accumulated(compiled(on_part, name), n, parts, reduce, accumulate_dtype)

    return called(fun, read, run, compiled(run, name))


def _accumulated(fun: jax.stages.Wrapped, n: int, parts: Any, reduce: str, dtype: Any) -> Any:
    """The mean or the sum of what a jitted function returns for each part, in a loop."""
    indices = jnp.arange(n)
    traced = fun.trace(indices[0], jax.tree.map(lambda leaf: leaf[0], parts))
    # With their shardings, which `out_info` does not have.
    types = jax.tree.unflatten(jax.tree.structure(traced.out_info), traced.jaxpr.out_avals)
    if reduce == 'mean':
        _reject_integers(types)

    def add(sums: Any, part: tuple[Any, Any]) -> tuple[Any, None]:
        return jax.tree.map(lambda total, x: total + _as_type(x, total.dtype), sums, fun(*part)), None

    def result(total: Any, kind: Any) -> Any:
        total = total / n if reduce == 'mean' else total
        return total if kind.dtype == bool else _as_type(total, kind.dtype)

    sums, _ = jax.lax.scan(add, jax.tree.map(lambda kind: _zeros(kind, dtype), types), (indices, parts))
    return jax.tree.map(result, sums, types)


def _names(fun: Callable[..., Any], signature: inspect.Signature, option: Names) -> list[str]:
    """Parameters given by position or name, by name."""
    known = signature.parameters
    positional = [each.name for each in known.values() if each.kind <= each.POSITIONAL_OR_KEYWORD]
    names = []
    for item in [option] if isinstance(option, int | str) else option:
        if isinstance(item, int) and -len(positional) <= item < len(positional):
            names.append(positional[item])
        elif item in known:
            names.append(str(item))
        else:
            near = 'give its name' if isinstance(item, int) else did_you_mean(item, known)
            if str(getattr(fun, '__module__', '')).startswith('flax.nnx'):
                near = (
                    'microbatch takes functions of arrays: nnx.split the model, and take jax.value_and_grad '
                    'of a function that merges it, nnx.merge(graph, params, rest, copy=True)'
                )
            raise ArgumentError(f'microbatch: {name_of(fun)}{signature} has no argument {item!r} ({near})')
    return names


def _divided(whole: dict[str, Any], n: int, batch_axis: int, name: str) -> dict[str, Any]:
    """Each array as a stack of *n* microbatches; the examples of one are *n* apart."""
    tree = NamedTree.of(whole)
    if not len(tree):
        raise DataError(
            f'the batch of {name} ({", ".join(whole)}) holds no arrays: all microbatches would be the same. '
            'Name the arguments that are the batch (batch=...)'
        )
    wrong = [
        f'{tree.describe(i)}: {fault}'
        for i, leaf in enumerate(tree.leaves)
        if (fault := _fault(leaf, tree.shapes[i], batch_axis, n))
    ]
    if wrong:
        raise DataError(
            f'the batch of {name} cannot be split into {n} microbatches along axis {batch_axis}:\n'
            f'{shown_leaves(wrong)}\n'
            'What to do: choose a number of microbatches that divides the number of examples (on each '
            'device, so that none have to move), or name the arguments that are the batch (batch=...).'
        )

    def part(leaf: Any) -> Any:
        axis = batch_axis % leaf.ndim
        examples = leaf.shape[axis] // n
        # Examples of one device are adjacent: the first of the two new axes gets the sharding.
        apart = leaf.reshape(*leaf.shape[:axis], examples, n, *leaf.shape[axis + 1 :])
        return jnp.moveaxis(apart, axis + 1, 0)

    return jax.tree.map(lambda leaf: part(jnp.asarray(leaf)), whole)


def _fault(leaf: Any, shape: tuple[int, ...], axis: int, n: int) -> str:
    """Why the examples of an array cannot be divided; empty if they can."""
    if not -len(shape) <= axis < len(shape):
        return f'no axis {axis}'
    if shape[axis] % n:
        return 'does not divide'
    # Over Explicit axes the type tells how many examples a device has; JAX would refuse to move some.
    sharding = jax.typeof(leaf).sharding
    sharded_over = partition_specs.entry_axes(partition_specs.entries(sharding.spec)[axis])
    shards = math.prod(sharding.mesh.shape[name] for name in sharded_over)
    return '' if shape[axis] // shards % n == 0 else f'each device has {shape[axis] // shards} examples'


def _is_float(dtype: Any) -> bool:
    try:
        return bool(jnp.issubdtype(jnp.dtype(dtype), jnp.floating))
    except TypeError:
        return False


def _as_type(value: Any, dtype: Any) -> Any:
    """The value in a dtype; one that has it keeps its weak type."""
    return value if value.dtype == dtype else value.astype(dtype)


def _zeros(kind: Any, dtype: Any) -> jax.Array:
    """The sum of nothing, for results of a type; *dtype* is the one that the user asked for, if any."""
    if not jnp.issubdtype(kind.dtype, jnp.floating):
        dtype = jnp.promote_types(kind.dtype, jnp.int32) if kind.dtype == bool else kind.dtype
    elif dtype is None:
        dtype = jnp.float32 if kind.dtype.itemsize < 4 else kind.dtype
    number = jnp.asarray(kind.dtype.type(0).item())
    is_weak = kind.weak_type and number.dtype == dtype
    start = jnp.broadcast_to(number, kind.shape) if is_weak else jnp.zeros(kind.shape, dtype)
    # Over Explicit axes the sums are of the types of the results.
    [zeros] = apply_shardings([start], [explicit_sharding(kind)])
    return zeros


def _reject_integers(types: Any) -> None:
    tree = NamedTree.of(types)
    wrong = [
        tree.describe(i) for i, kind in enumerate(tree.leaves) if not jnp.issubdtype(kind.dtype, jnp.inexact)
    ]
    if wrong:
        raise ArgumentError(
            f'microbatch: the result has leaves that have no mean:\n{shown_leaves(wrong)}\n'
            "What to do: return floating-point numbers, or sums and divide them (reduce='sum')."
        )

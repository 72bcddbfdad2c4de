"""Gradient accumulation: a function processes its batch in microbatches, without moving examples."""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, ParamSpec, TypeVar

import jax
import jax.numpy as jnp

from scalax._compile.call.signature import name_of
from scalax._compile.deferred_jit import defer_jit, jit_with_name
from scalax._compile.tracebacks import run_user_function
from scalax._core.context.constraints import apply_shardings, explicit_sharding
from scalax._core.pytree import partition_specs
from scalax._core.pytree.paths import NamedTree
from scalax.errors import ArgumentError, DataError, did_you_mean, shown_leaves

ArgumentNames = int | str | Sequence[int | str]
Params = ParamSpec('Params')
Result = TypeVar('Result')


def microbatch(
    fun: Callable[Params, Result],
    n: int,
    *,
    batch: ArgumentNames = 1,
    batch_axis: int = 0,
    rng: ArgumentNames = (),
    reduce: Literal['mean', 'sum'] = 'mean',
    accumulate_dtype: Any = None,
) -> Callable[Params, Result]:
    """Makes a function process its batch in *n* microbatches, one after the other (gradient accumulation).

    It is meant for functions that return gradients, such as ``jax.grad(loss)`` and
    ``jax.value_and_grad(loss)``, with or without auxiliary outputs. Microbatch ``i`` holds the examples
    ``i``, ``i + n``, ``i + 2n`` and so on. So no example leaves its device if *n* divides the number of
    examples on each device. In `MeshShardingHelper.sjit`, gradients of replicated parameters (DDP) are summed
    over devices once, after the last microbatch, if *fun* treats examples independently except for sums and
    means, and does not use random numbers.

    Inside `shard_map` it needs ``check_vma=False``. Outside of compiled functions it is compiled as by
    ``jax.jit``.

    If the loss is a mean over equally weighted examples, the mean over the microbatches is the mean over all
    examples, up to rounding. If examples have weights (for padding, say), return sums and divide once::

        def sums(params, batch):  # the sums of one microbatch
            losses = ...
            return (losses * batch['weight']).sum(), batch['weight'].sum()


        grads_of = jax.value_and_grad(sums, has_aux=True)
        (loss, weight), grads = microbatch(grads_of, 8, reduce='sum')(params, batch)
        grads = jax.tree.map(lambda g: g / weight, grads)

    Args:
        fun: the function; it returns arrays of the same shapes for every microbatch.
        n: the number of microbatches.
        batch: the arguments to split, by position or name. Extra positional arguments can be split only all
            together, by the name of ``*args``.
        batch_axis: their batch dimension, which may be negative.
        rng: the arguments that are PRNG keys, or trees of keys. Microbatch ``i`` gets
            ``jax.random.fold_in(key, i)``.
        reduce: how the *n* results are combined, leaf by leaf: by their ``'mean'`` or their ``'sum'``.
        accumulate_dtype: the dtype in which floating-point leaves are summed. By default it is float32 for
            narrower floats, and the leaf's dtype otherwise. Results have the dtypes that *fun* returns.

    Returns:
        A function with the parameters of *fun*.

    Raises:
        ArgumentError: *fun* has no such argument; an argument is both the batch and a key; the dtype to
            accumulate in is not a floating-point dtype; the result has integer leaves, which have no mean.
        DataError: the number of examples isn't divisible by *n*, or the batch holds no array. The error lists
            all such leaves.

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
    batch_names, key_names = (_argument_names(fun, signature, option) for option in (batch, rng))
    if both := [argument for argument in batch_names if argument in key_names]:
        raise ArgumentError(
            f'microbatch: {", ".join(both)} cannot be both the batch (batch=...) and PRNG keys (rng=...)'
        )

    def bind(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        return signature.bind(*args, **kwargs).arguments

    def run(arguments: dict[str, Any]) -> Any:
        call = inspect.BoundArguments(signature, {**arguments})
        call.apply_defaults()
        batch_arguments = {argument: call.arguments[argument] for argument in batch_names}
        microbatches = _split_batch(batch_arguments, n, batch_axis, name)

        def run_microbatch(index: Any, microbatch: dict[str, Any]) -> Any:
            keys = {argument: call.arguments[argument] for argument in key_names}
            keys = jax.tree.map(lambda key: jax.random.fold_in(key, index), keys)
            bound = inspect.BoundArguments(signature, {**call.arguments, **microbatch, **keys})
            return run_user_function(fun, bound.args, bound.kwargs)

        # The function is traced twice, for the types of the sums and in the loop. It is jitted so that JAX
        # finds the first trace again, and the user's code runs only once.
        jitted = jit_with_name(run_microbatch, name)
        return _accumulate(jitted, n, microbatches, reduce, accumulate_dtype)

    return defer_jit(fun, bind, run, jit_with_name(run, name))


def _accumulate(fun: jax.stages.Wrapped, n: int, microbatches: Any, reduce: str, dtype: Any) -> Any:
    """Runs a jitted function on each microbatch in a loop, and returns the mean or the sum of the results."""
    indices = jnp.arange(n)
    traced = fun.trace(indices[0], jax.tree.map(lambda leaf: leaf[0], microbatches))
    # `out_avals` have shardings, which `out_info` does not have.
    avals = jax.tree.unflatten(jax.tree.structure(traced.out_info), traced.jaxpr.out_avals)
    if reduce == 'mean':
        _reject_integers(avals)

    def add(sums: Any, xs: tuple[Any, Any]) -> tuple[Any, None]:
        return jax.tree.map(lambda total, x: total + _as_dtype(x, total.dtype), sums, fun(*xs)), None

    def to_result(total: Any, aval: Any) -> Any:
        total = total / n if reduce == 'mean' else total
        return total if aval.dtype == bool else _as_dtype(total, aval.dtype)

    initial = jax.tree.map(lambda aval: _initial_sum(aval, dtype), avals)
    sums, _ = jax.lax.scan(add, initial, (indices, microbatches))
    return jax.tree.map(to_result, sums, avals)


def _argument_names(
    fun: Callable[..., Any], signature: inspect.Signature, option: ArgumentNames
) -> list[str]:
    """Returns the names of arguments that an option gives by position or name."""
    parameters = signature.parameters
    positional = [p.name for p in parameters.values() if p.kind <= p.POSITIONAL_OR_KEYWORD]
    names = []
    for item in [option] if isinstance(option, int | str) else option:
        if isinstance(item, int) and -len(positional) <= item < len(positional):
            names.append(positional[item])
        elif item in parameters:
            names.append(str(item))
        else:
            hint = 'give its name' if isinstance(item, int) else did_you_mean(item, parameters)
            if str(getattr(fun, '__module__', '')).startswith('flax.nnx'):
                hint = (
                    'microbatch takes functions of arrays: nnx.split the model, and take jax.value_and_grad '
                    'of a function that merges it, nnx.merge(graph, params, rest, copy=True)'
                )
            raise ArgumentError(f'microbatch: {name_of(fun)}{signature} has no argument {item!r} ({hint})')
    return names


def _split_batch(batch: dict[str, Any], n: int, batch_axis: int, name: str) -> dict[str, Any]:
    """Splits each array of the batch into a stack of *n* microbatches, each of every *n*-th example."""
    tree = NamedTree.of(batch)
    if not len(tree):
        raise DataError(
            f'the batch of {name} ({", ".join(batch)}) holds no arrays: all microbatches would be the same. '
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

    def split(leaf: Any) -> Any:
        axis = batch_axis % leaf.ndim
        num_examples = leaf.shape[axis] // n  # of one microbatch
        # A device holds adjacent examples, so the sharding of the batch applies to the first new dimension.
        split_leaf = leaf.reshape(*leaf.shape[:axis], num_examples, n, *leaf.shape[axis + 1 :])
        return jnp.moveaxis(split_leaf, axis + 1, 0)

    return jax.tree.map(lambda leaf: split(jnp.asarray(leaf)), batch)


def _fault(leaf: Any, shape: tuple[int, ...], axis: int, n: int) -> str:
    """Returns why the examples of an array cannot be split, or '' if they can."""
    if not -len(shape) <= axis < len(shape):
        return f'no axis {axis}'
    if shape[axis] % n:
        return f'size {shape[axis]} is not divisible by {n}'
    # Over Explicit axes the type contains the sharding, and JAX would refuse to move examples.
    sharding = jax.typeof(leaf).sharding
    sharded_over = partition_specs.entry_axes(partition_specs.entries(sharding.spec)[axis])
    shards = math.prod(sharding.mesh.shape[name] for name in sharded_over)
    return '' if shape[axis] // shards % n == 0 else f'each device has {shape[axis] // shards} examples'


def _is_float(dtype: Any) -> bool:
    try:
        return bool(jnp.issubdtype(jnp.dtype(dtype), jnp.floating))
    except TypeError:
        return False


def _as_dtype(value: Any, dtype: Any) -> Any:
    """Casts a value to a dtype. A value that has the dtype already keeps its weak type."""
    return value if value.dtype == dtype else value.astype(dtype)


def _initial_sum(aval: Any, dtype: Any) -> jax.Array:
    """Returns the initial sum for results of a type. *dtype* is the user's option, which may be None."""
    if not jnp.issubdtype(aval.dtype, jnp.floating):
        dtype = jnp.promote_types(aval.dtype, jnp.int32) if aval.dtype == bool else aval.dtype
    elif dtype is None:
        dtype = jnp.float32 if aval.dtype.itemsize < 4 else aval.dtype
    zero = jnp.asarray(aval.dtype.type(0).item())
    is_weak = aval.weak_type and zero.dtype == dtype
    zeros = jnp.broadcast_to(zero, aval.shape) if is_weak else jnp.zeros(aval.shape, dtype)
    # Over Explicit axes the sums have the types of the results.
    [zeros] = apply_shardings([zeros], [explicit_sharding(aval)])
    return zeros


def _reject_integers(avals: Any) -> None:
    tree = NamedTree.of(avals)
    integers = [
        tree.describe(i) for i, aval in enumerate(tree.leaves) if not jnp.issubdtype(aval.dtype, jnp.inexact)
    ]
    if integers:
        raise ArgumentError(
            'microbatch: cannot average leaves of the result that are not floating-point numbers:\n'
            f'{shown_leaves(integers)}\n'
            "What to do: return floating-point numbers, or sums and divide them (reduce='sum')."
        )

"""What the tests of following the batch share: jaxprs that are followed, and their constraints."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from scalax._follow.follow import follow
from scalax._follow.trail import Trail
from scalax._follow.types import Arguments, Followed
from scalax._jax.equations import opened

MESH = AbstractMesh((8,), ('fsdp',), axis_types=(AxisType.Auto,))


def like(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def rows_at(dim: int | None, ndim: int, axes: tuple[str, ...] = ('fsdp',)) -> Trail:
    """The trail of a value with rows in one dimension."""
    return () if dim is None else tuple(axes if i == dim else () for i in range(ndim))


def following(
    fun: Callable[..., Any],
    args: Sequence[Any],
    dims: Sequence[int | None],
    mesh: AbstractMesh = MESH,
) -> Followed:
    """A function followed from the dimensions of its arguments, which are arrays or their types."""
    with jax.sharding.use_abstract_mesh(mesh):
        jaxpr = jax.make_jaxpr(fun)(*args)
        trails = [rows_at(dim, len(arg.shape)) for dim, arg in zip(dims, args, strict=True)]
        arguments = Arguments(trails, [()] * len(trails), frozenset({'fsdp'}))
        return follow(jaxpr, arguments, mesh)


def result_dims(followed: Followed) -> list[int | None]:
    """The dimension of each result that has rows."""
    return [next((i for i, axes in enumerate(trail) if axes), None) for trail in followed.trails]


def equations(jaxpr: Any) -> Iterator[Any]:
    """The equations of a jaxpr, and of those inside it."""
    for equation in opened(jaxpr).eqns:
        yield equation
        for value in equation.params.values():
            for inside in value if isinstance(value, tuple | list) else [value]:
                if hasattr(opened(inside), 'eqns'):
                    yield from equations(inside)


def constraints(jaxpr: Any) -> list[tuple[tuple[int, ...], PartitionSpec]]:
    """The constraints of a jaxpr, and of those inside it: shapes and specs."""
    return [
        (each.invars[0].aval.shape, each.params['sharding'].spec)
        for each in equations(jaxpr)
        if each.primitive.name == 'sharding_constraint'
    ]

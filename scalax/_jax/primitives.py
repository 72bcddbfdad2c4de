"""Names of primitives that are JAX's own: other libraries may also define one called `stack` or `jit`."""

from __future__ import annotations

import concurrent.futures
import functools
import sys
from typing import Any

import jax
import jax.extend.core.primitives
from jax.sharding import AbstractMesh, PartitionSpec

from scalax._jax.equations import all_equations

KERNEL = 'pallas_call'
_PALLAS = 'jax.experimental.pallas'
# Primitives of some supported versions. In the others, a primitive of this name belongs to another library.
_NOT_IN_ALL = frozenset(
    {
        *('closed_call', 'eval_jaxpr', 'log2', 'mulhi', 'one_minus_square', 'polynomial', 'stack', 'unstack'),
        KERNEL,
    }
)


def primitive_name(equation: Any) -> str:
    """Returns the name of an equation's primitive; an empty string for another library's primitive.

    Tables describe JAX's primitives by name, but other libraries may use the same names. Relies on public
    modules of JAX listing its primitives, all but those of `_unlisted`.
    """
    return _name(equation.primitive)


def is_foreign(equation: Any) -> bool:
    """Returns whether the primitive is another library's. Relies on what `primitive_name` relies on."""
    return _jax_primitives(_PALLAS in sys.modules).get(equation.primitive.name) is not equation.primitive


@functools.lru_cache(maxsize=4096)
def _name(primitive: Any) -> str:
    # Pallas is imported late.
    jax_primitives = _jax_primitives(_PALLAS in sys.modules)
    is_jax_name = primitive.name in jax_primitives or primitive.name in _NOT_IN_ALL
    is_foreign = is_jax_name and jax_primitives.get(primitive.name) is not primitive
    return '' if is_foreign else primitive.name


@functools.cache
def _jax_primitives(has_pallas: bool) -> dict[str, Any]:
    """Returns the primitives of JAX by name."""
    modules = [jax.extend.core.primitives, jax.lax, *([sys.modules[_PALLAS]] if has_pallas else [])]
    listed = [value for module in modules for value in vars(module).values()]
    primitives = [value for value in listed if isinstance(value, jax.extend.core.Primitive)]
    with concurrent.futures.ThreadPoolExecutor(1) as fresh_thread:  # without an ambient mesh
        primitives += fresh_thread.submit(_unlisted).result()
    return {primitive.name: primitive for primitive in primitives}


def _unlisted() -> list[Any]:
    """Returns the primitives that no public module of JAX lists."""
    mesh, replicated, sharded = AbstractMesh((1,), ('x',)), PartitionSpec(), PartitionSpec('x')

    def exchange(x: Any) -> Any:
        x = jax.lax.pcast(x, 'x', to='varying')
        return jax.lax.psum_scatter(x, 'x', tiled=True) + jax.lax.psum(x, 'x')

    varying = jax.shard_map(exchange, mesh=mesh, in_specs=replicated, out_specs=sharded)

    def unlisted(rows: Any, groups: Any, key: Any) -> Any:
        keys = jax.random.wrap_key_data(key, impl='threefry2x32')
        return varying(rows), jax.lax.ragged_dot(rows, rows[None], groups), jax.random.key_data(keys)

    shapes = ((1, 1), 'float32'), ((1,), 'int32'), ((2,), 'uint32')
    jaxpr = jax.make_jaxpr(unlisted)(*[jax.ShapeDtypeStruct(*shape) for shape in shapes])
    with jax.sharding.use_abstract_mesh(mesh):
        resharding = jax.make_jaxpr(lambda rows: jax.sharding.reshard(rows, replicated))(
            jax.ShapeDtypeStruct((1,), 'float32')
        )
    return [equation.primitive for x in (jaxpr, resharding) for equation in all_equations(x)]

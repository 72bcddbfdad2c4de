"""Which primitives are JAX's own: anybody can make one called `stack` or `jit`."""

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
# Of some supported versions; where JAX has none of such a name, one that has it is somebody else's.
_NOT_IN_ALL = frozenset(
    {
        *('closed_call', 'eval_jaxpr', 'log2', 'mulhi', 'one_minus_square', 'polynomial', 'stack', 'unstack'),
        KERNEL,
    }
)


def primitive_name(equation: Any) -> str:
    """The name of an equation's primitive; nothing if JAX has another one, or none, of this name.

    Other libraries name primitives as they like, and tables say what JAX's do and which parameters they have.
    Relies on public modules of JAX listing its primitives, all but those of `_unlisted`.
    """
    return _name(equation.primitive)


@functools.lru_cache(maxsize=4096)
def _name(primitive: Any) -> str:
    # Kernels are loaded late.
    own = _of_jax(_PALLAS in sys.modules)
    known = primitive.name in own or primitive.name in _NOT_IN_ALL
    return '' if known and own.get(primitive.name) is not primitive else primitive.name


@functools.cache
def _of_jax(has_kernels: bool) -> dict[str, Any]:
    """The primitives of JAX by name."""
    modules = [jax.extend.core.primitives, jax.lax, *([sys.modules[_PALLAS]] if has_kernels else [])]
    listed = [value for module in modules for value in vars(module).values()]
    found = [value for value in listed if isinstance(value, jax.extend.core.Primitive)]
    with concurrent.futures.ThreadPoolExecutor(1) as fresh:  # a thread of its own has no mesh in force
        found += fresh.submit(_unlisted).result()
    return {each.name: each for each in found}


def _unlisted() -> list[Any]:
    """Those primitives that no public module of JAX lists."""
    mesh, whole, split = AbstractMesh((1,), ('x',)), PartitionSpec(), PartitionSpec('x')

    def exchange(x: Any) -> Any:
        x = jax.lax.pcast(x, 'x', to='varying')
        return jax.lax.psum_scatter(x, 'x', tiled=True) + jax.lax.psum(x, 'x')

    varying = jax.shard_map(exchange, mesh=mesh, in_specs=whole, out_specs=split)

    def unlisted(rows: Any, groups: Any, key: Any) -> Any:
        keys = jax.random.wrap_key_data(key, impl='threefry2x32')
        return varying(rows), jax.lax.ragged_dot(rows, rows[None], groups), jax.random.key_data(keys)

    shapes = ((1, 1), 'float32'), ((1,), 'int32'), ((2,), 'uint32')
    jaxpr = jax.make_jaxpr(unlisted)(*[jax.ShapeDtypeStruct(*each) for each in shapes])
    with jax.sharding.use_abstract_mesh(mesh):
        moved = jax.make_jaxpr(lambda rows: jax.sharding.reshard(rows, whole))(
            jax.ShapeDtypeStruct((1,), 'float32')
        )
    return [equation.primitive for each in (jaxpr, moved) for equation in all_equations(each)]

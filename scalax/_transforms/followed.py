"""Runs a function in a trace so that the rows of its batch stay where they are.

In this room, because frames of it are taken out of the tracebacks of the user's errors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from scalax._follow.choices import follow_choices
from scalax._follow.jaxprs import opened, with_inputs
from scalax._follow.types import Arguments, Followed


def run_followed(
    fun: Callable[..., Any],
    args: Sequence[Any],
    static: Sequence[int],
    arguments: Arguments,
    mesh: Mesh | AbstractMesh,
) -> tuple[Sequence[Any], Followed]:
    """The leaves of the outputs of a function, computed by its jaxpr with constraints.

    The user's code is traced once. Its jaxpr is edited and bound as one equation, a `jit`: that costs less
    than to evaluate it equation by equation, and keeps the lines of the code.

    Args:
        fun: the function; it returns a tree of arrays.
        args: its arguments, values of a trace.
        static: which of them are static.
        arguments: what is known of the leaves of the others.
        mesh: a mesh of Auto axes, in force.
    """
    found = follow_choices(jax.make_jaxpr(fun, static_argnums=static)(*args), arguments, mesh)
    leaves = jax.tree.leaves([value for i, value in enumerate(args) if i not in static])
    closed, captured = with_inputs(found.jaxpr)
    leaves += captured
    call = _call(jax.sharding.get_abstract_mesh())
    params = call.params | {'jaxpr': closed, 'name': fun.__name__}
    for name, value in params.items():
        # One for each of the two inputs or three outputs of the template.
        if isinstance(value, tuple) and len(value) in (2, 3):
            params[name] = value[:1] * (len(leaves) if len(value) == 2 else len(closed.out_avals))
    return call.primitive.bind(*leaves, **params), found


@functools.lru_cache(maxsize=64)
def _call(ambient: AbstractMesh) -> Any:
    """An equation that calls a jitted function, as JAX makes it where this mesh is in force.

    Its parameters say of each input and output how it is sharded, donated and laid out: not at all.
    """

    def template(x: Any, y: Any) -> tuple[Any, Any, Any]:
        return x, x, y

    [equation] = opened(jax.make_jaxpr(jax.jit(template))(0.0, 0.0)).eqns
    return equation

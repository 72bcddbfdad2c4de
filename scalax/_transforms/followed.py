"""Runs a function in a trace so that the rows of its batch stay where they are.

In this room, because frames of it are taken out of the tracebacks of the user's errors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from scalax._follow.follow import Arguments, Followed, follow
from scalax._follow.jaxprs import opened, with_inputs


def run_followed(
    fun: Callable[..., Any],
    args: Sequence[Any],
    static: Sequence[int],
    arguments: Arguments,
    mesh: Mesh | AbstractMesh,
) -> tuple[Any, Followed]:
    """The outputs of a function, computed by its jaxpr with constraints.

    The user's code is traced once. Its jaxpr is edited and bound as one equation, a `jit`: that costs less
    than to evaluate it equation by equation, and keeps the lines of the code.

    Args:
        fun: the function; it returns a tree of arrays.
        args: its arguments, values of a trace.
        static: which of them are static.
        arguments: what is known of the leaves of the others.
        mesh: a mesh of Auto axes, in force.
    """
    jaxpr, shapes = jax.make_jaxpr(fun, static_argnums=static, return_shape=True)(*args)
    found = follow(jaxpr, arguments, mesh)
    leaves = jax.tree.leaves([value for i, value in enumerate(args) if i not in static])
    closed, captured = with_inputs(found.jaxpr)
    leaves += captured
    structure: Any = jax.tree.structure(shapes)

    def same_size(*leaves: Any) -> list[float]:
        return [0.0] * structure.num_leaves

    # The parameters of a `jit` are one for each input and each output, whatever these are.
    same_size.__name__ = same_size.__qualname__ = fun.__name__
    [equation] = opened(jax.make_jaxpr(jax.jit(same_size))(*leaves)).eqns
    results = equation.primitive.bind(*leaves, **{**equation.params, 'jaxpr': closed})
    return jax.tree.unflatten(structure, results), found

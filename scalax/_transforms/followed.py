"""Runs a function in a trace so that the rows of its batch stay where they are.

In this room, because frames of it are taken out of the tracebacks of the user's errors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Literal
from jax.sharding import AbstractMesh, Mesh

from scalax._follow.follow import Arguments, Followed, follow
from scalax._follow.jaxprs import opened
from scalax._follow.trail import LOST


def run_followed(
    fun: Callable[..., Any],
    args: Sequence[Any],
    static: Sequence[int],
    arguments: Arguments,
    mesh: Mesh | AbstractMesh,
) -> tuple[Any, Followed]:
    """The outputs of a function, computed by its jaxpr with constraints.

    The user's code is traced once, as one equation, a `jit`. Its jaxpr is edited and bound: that costs less
    than to evaluate it equation by equation, and keeps the lines of the code.

    Args:
        fun: the function; it returns a tree of arrays.
        args: its arguments, values of a trace.
        static: which of them are static.
        arguments: what is known of the leaves of the others.
        mesh: a mesh of Auto axes, in force.
    """
    compiled = jax.jit(fun, static_argnums=static)
    structure = None

    def call(*args: Any) -> None:
        nonlocal structure
        structure = jax.tree.structure(compiled(*args))

    # Values of an outer trace that the function closes over are constants of this jaxpr. It returns nothing:
    # the results of its equation are the leaves, in order.
    jaxpr = jax.make_jaxpr(call, static_argnums=static)(*args)
    outside = opened(jaxpr)
    [equation] = outside.eqns
    leaves = jax.tree.leaves([value for i, value in enumerate(args) if i not in static])
    values = dict(zip((*outside.invars, *outside.constvars), (*leaves, *jaxpr.consts), strict=True))
    numbers = {var: i for i, var in enumerate(outside.invars)}
    places = [None if isinstance(atom, Literal) else numbers.get(atom) for atom in equation.invars]
    operands = dataclasses.replace(
        arguments,
        trails=[LOST if i is None else arguments.trails[i] for i in places],
        stored=[LOST if i is None else arguments.stored[i] for i in places],
    )
    found = follow(equation.params['jaxpr'], operands, mesh)
    inputs = [atom.val if isinstance(atom, Literal) else values[atom] for atom in equation.invars]
    results = equation.primitive.bind(*inputs, **{**equation.params, 'jaxpr': found.jaxpr})
    return jax.tree.unflatten(structure, results), found

"""Runs a function in a trace so that the rows of its batch stay where they are."""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from scalax._follow.bounds import within_bounds
from scalax._follow.follow import follow
from scalax._follow.loops_over_rows import with_own_rows
from scalax._follow.matrices import spread_matrices
from scalax._follow.own_order import with_own_order
from scalax._follow.own_sums import with_own_sums
from scalax._follow.trail import Trails
from scalax._follow.types import Arguments, Followed
from scalax._jax.equations import JaxprEqn
from scalax._jax.rewriting import Rewriter, run_as_one, with_inputs
from scalax.errors import PartitioningWarning, warn


def run_followed(
    fun: Callable[..., Any],
    args: Sequence[Any],
    static: Sequence[int],
    arguments: Arguments,
    mesh: Mesh | AbstractMesh,
    rewrite: Callable[[Any, Arguments], tuple[Any, Arguments]] | None = None,
) -> tuple[Sequence[Any], Followed]:
    """The leaves of the outputs of a function, computed by its jaxpr with constraints.

    The user's code is traced once. Its jaxpr is edited and bound as one equation, a `jit`: that costs less
    than to evaluate it equation by equation, and keeps the lines of the code.

    Args:
        fun: the function; it returns a tree of arrays. If following fails, it runs as it is, with a warning.
        args: its arguments, values of a trace.
        static: which of them are static.
        arguments: what is known of the leaves of the others.
        mesh: a mesh of Auto axes, in force.
        rewrite: gives another jaxpr before the batch is followed, and what is known of its arguments.
    """
    jaxpr = jax.make_jaxpr(fun, static_argnums=static)(*args)
    if rewrite is not None:
        jaxpr, arguments = rewrite(jaxpr, arguments)
    try:
        found = _follow_rows(jaxpr, arguments, mesh)
        if found.has_matrices:
            found = dataclasses.replace(found, jaxpr=spread_matrices(found.jaxpr, arguments, mesh))
        found = dataclasses.replace(found, jaxpr=Rewriter(within_bounds).jaxpr(found.jaxpr))
    except Exception as error:  # noqa: BLE001 - a mistake of scalax, not of the user: it ends no program
        found = Followed(jaxpr, (), failure=_failure(error))
        warn(
            f'{fun.__name__} runs without batch sharding propagation: {found.failure}. Its results are '
            'right, but the compiler alone decides how activations are sharded, which may take more memory '
            'and communication.\n'
            'What to do: please report this as a bug of scalax, with this message and the line that it '
            'names. batch_argnums=() switches propagation off, and this warning.',
            PartitioningWarning,
        )
    leaves = jax.tree.leaves([value for i, value in enumerate(args) if i not in static])
    closed, captured = with_inputs(found.jaxpr)
    return run_as_one(closed, leaves + captured, fun.__name__), found


def _follow_rows(jaxpr: Any, arguments: Arguments, mesh: Mesh | AbstractMesh) -> Followed:
    """Follows the rows of a batch through a jaxpr, and rewrites loops and sorts so that fewer rows are lost.

    Args:
        jaxpr: the jaxpr.
        arguments: what is known of its arguments.
        mesh: a mesh of Auto axes. It is in force.
    """
    before, trails = None, Trails(dict(mesh.shape), arguments.batch_axes)
    while jaxpr is not before:  # what one loop gives another one may run over
        found = follow(jaxpr, arguments, mesh)
        before, jaxpr = jaxpr, with_own_rows(jaxpr, found, trails, mesh)
        if found.ordered['sort'] and found.ordered['ragged_dot_general']:  # and multiplied in groups
            jaxpr = with_own_order(jaxpr, arguments, mesh)
    own = with_own_sums(jaxpr, found.ordered['scan'], arguments, mesh)
    return found if own is jaxpr else dataclasses.replace(follow(own, arguments, mesh), kept=found.kept)


def _failure(error: Exception) -> str:
    """At which equation the pass failed, and how."""
    from scalax._jaxprs.source_lines import line_of  # here, because hardly any program fails

    at_hand = [frame.f_locals.get('equation') for frame, _ in traceback.walk_tb(error.__traceback__)]
    equations = [each for each in reversed(at_hand) if isinstance(each, JaxprEqn)]
    at = f' at {equations[0].primitive.name} ({line_of(equations[0], equations[1:])})' if equations else ''
    return f'propagation failed{at} with {type(error).__name__}: {error}'

"""What does one set of shardings compile to? A program: a ``jax.jit`` and the signatures it is right for.

The cache key, in full. A call is served by the program of its signature (`_signature`). Signatures whose
rules resolve to the same shardings share a program, so that a batch of another length costs no more than
it does under ``jax.jit``. A program's jitted function checks, while JAX traces it, that the signature is
one of its own, and raises `Missed` before any code of the user runs; what JAX has cached was checked when
it was traced. So a call may try any program first, and the last one used is nearly always right.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from scalax._sjit._convention import Convention, Layout
from scalax._sjit._placement import Shardings, reject_deleted
from scalax._sjit._signature import Signature

# Up to this version a deleted argument ends the process with a segmentation fault on several devices.
_DELETED_ARGUMENTS_CRASH = jax.__version_info__ < (0, 11, 1)


class Missed(Exception):
    """A program was tried for a call that it is not right for. Never seen by users."""

    def __init__(self, owner: Any) -> None:
        super().__init__('this call needs another program')
        self.owner = owner


@dataclasses.dataclass(frozen=True)
class Shape:
    """The shardings of a program: equal ones share it.

    Attributes:
        layout: the slots of the calls.
        arguments: the ``in_shardings`` of jax.jit: for each dynamic slot one sharding, a
            (structure, shardings) pair, or None.
        constraints: the same for ``args_sharding_constraint``.
        outputs: the same for all outputs together.
    """

    layout: Layout
    arguments: tuple[Any, ...]
    constraints: tuple[Any, ...]
    outputs: Any


def collapsed(treedef: Any, shardings: Shardings) -> Any:
    """A tree of shardings in the least specific form: None or one sharding where all agree.

    The fewer structures a program names, the more signatures can share it.
    """
    distinct = set(shardings)
    if distinct <= {None}:
        return None
    if len(distinct) == 1:
        return shardings[0]
    return treedef, tuple(shardings)


def expanded(form: Any) -> Any:
    """The tree that jax.jit takes, of what `collapsed` made."""
    if isinstance(form, tuple):
        treedef, shardings = form
        return treedef.unflatten(shardings)
    return form


@dataclasses.dataclass(eq=False)
class Program:
    """A jitted function with the signatures it serves.

    Attributes:
        layout: the slots of the calls.
        known: the signatures whose shardings are this program's.
        inner: the function that is jitted; takes a row of slots.
        jitted: the ``jax.jit`` of it; None until the shardings of the outputs are known.
        call: what a call runs: `jitted`, guarded where JAX needs that.
        out_shardings: the shardings of the outputs; None where nothing is asked.
    """

    layout: Layout
    inner: Callable[..., Any]
    known: set[Signature] = dataclasses.field(default_factory=set)
    jitted: Any = None
    call: Callable[..., Any] | None = None
    out_shardings: Any = None

    def compile(self, shape: Shape, convention: Convention, jit_kwargs: dict[str, Any]) -> None:
        """Makes the ``jax.jit``; nothing is traced or compiled yet."""
        options = dict(jit_kwargs)
        if any(form is not None for form in shape.arguments):
            options['in_shardings'] = tuple(map(expanded, shape.arguments))
        if shape.outputs is not None:
            options['out_shardings'] = self.out_shardings = expanded(shape.outputs)
        self.jitted = jax.jit(
            self.inner,
            static_argnums=self.layout.static,
            donate_argnums=self.layout.donated,
            **options,
        )
        self.call = self.jitted
        if _DELETED_ARGUMENTS_CRASH:
            self.call = self._guarded(convention)

    def _guarded(self, convention: Convention) -> Callable[..., Any]:
        jitted, layout, leaves_of = self.jitted, self.layout, jax.tree.leaves
        array, tracer = jax.Array, jax.core.Tracer

        def call(*row: Any) -> Any:
            for leaf in leaves_of(row):
                if isinstance(leaf, array) and not isinstance(leaf, tracer) and leaf.is_deleted():
                    reject_deleted(convention, layout, row)
            return jitted(*row)

        return call


def donated_shardings(
    output: Any,
    given: Sequence[NamedSharding | None],
    donated: Sequence[tuple[Any, Shardings]],
) -> list[NamedSharding | None]:
    """Gives outputs that nobody spoke about the shardings of donated arguments.

    An output, or a top-level element of it, with exactly the structure, shapes and dtypes of a donated
    argument takes that argument's shardings: only then can XLA reuse the buffers.

    Args:
        output: the outputs, as ShapeDtypeStructs.
        given: the shardings asked for, leaf by leaf.
        donated: each donated argument with the shardings of its leaves.
    """
    result = list(given)
    free = [(_kind_of(tree), shardings) for tree, shardings in donated if any(shardings)]
    for start, element in _elements(output):
        kind = _kind_of(element)
        stop = start + kind[0].num_leaves
        if start == stop or any(result[start:stop]):
            continue
        match = next((pair for pair in free if pair[0] == kind), None)
        if match:
            free.remove(match)
            result[start:stop] = match[1]
    return result


def _kind_of(tree: Any) -> tuple[Any, list[Any]]:
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, [(tuple(leaf.shape), leaf.dtype) for leaf in leaves]


def _elements(output: Any) -> list[tuple[int, Any]]:
    """The whole output, then its top-level elements, each with the number of its first leaf."""
    elements = [(0, output)]
    children = jax.tree.leaves(output, is_leaf=lambda node: node is not output)
    if len(children) == 1 and children[0] is output:
        return elements
    start = 0
    for child in children:
        elements.append((start, child))
        start += len(jax.tree.leaves(child))
    return elements

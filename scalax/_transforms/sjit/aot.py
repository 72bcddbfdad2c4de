"""How is a function compiled ahead of time? For the call that it is lowered for, in the user's form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import NamedSharding

from scalax._transforms.calls.call_key import explicit_spec
from scalax._transforms.calls.call_signature import CallSignature
from scalax._transforms.calls.placement import Move, as_moved, moved

if TYPE_CHECKING:
    from scalax._transforms.sjit.dispatch import Resolved
    from scalax._transforms.sjit.function import SjitFunction


def traced_as_called(
    signature: CallSignature, resolved: Resolved, flat_args: Sequence[Any], count: int, names: Sequence[str]
) -> jax.stages.Traced:
    """Traces a program for the user's form of a call, which JAX's stages then have.

    A program takes a row of slots. JAX takes no ``in_shardings`` where there are keywords, so what is traced
    with says how it is sharded.

    Args:
        signature: how the user's function is called.
        resolved: the program, with the shardings of the arguments.
        flat_args: the call.
        count: how many arguments were given by position.
        names: which were given by name.
    """
    program = resolved.program

    def as_called(*args: Any, **keywords: Any) -> Any:
        return program.inner(*signature.flatten(args, keywords))

    as_called.__name__ = as_called.__qualname__ = signature.name
    as_called.__dict__['__signature__'] = signature.python_signature
    as_called.__dict__['__wrapped__'] = program.inner
    typed = list(flat_args)
    for slot, shardings in resolved.inside.arguments.items():
        typed[slot] = _typed(flat_args[slot], shardings)
    args, keywords = signature.as_called(typed, count, names)
    selected = signature.selected_as_called(program.layout, count, names)
    return program.jit_as_called(as_called, selected).trace(*args, **keywords)


def _typed(tree: Any, shardings: Sequence[NamedSharding | None]) -> Any:
    """A tree that says how it is sharded."""
    leaves, treedef = jax.tree.flatten(tree)
    if not any(shardings):
        return tree

    def typed(leaf: Any, sharding: NamedSharding | None, move: Move) -> Any:
        if sharding is None or getattr(leaf, 'sharding', None) == sharding:
            return leaf
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf.update(sharding=sharding)
        return move([leaf], [sharding])[0]

    def all_typed(move: Move) -> Any:
        return jax.tree.unflatten(
            treedef, [typed(*pair, move) for pair in zip(leaves, shardings, strict=True)]
        )

    try:
        return all_typed(as_moved)
    except Exception:  # a node that takes nothing but arrays
        return all_typed(moved)


def types_as_structs(flat_args: Sequence[Any]) -> tuple[Any, ...]:
    """A call in which types (what ``jax.typeof`` gives) are ShapeDtypeStructs."""
    if not any(isinstance(leaf, jax.core.ShapedArray) for leaf in jax.tree.leaves(flat_args)):
        return tuple(flat_args)
    return jax.tree.map(_struct, tuple(flat_args))


def _struct(leaf: Any) -> Any:
    if not isinstance(leaf, jax.core.ShapedArray):
        return leaf
    sharding = leaf.sharding if explicit_spec(leaf.sharding) is not None else None
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=leaf.weak_type)


class JittedCall:
    """The ``jax.jit`` function of a program, for calls with keywords, which that function does not take."""

    def __init__(self, function: SjitFunction, jitted: Any, signature: CallSignature) -> None:
        self._function, self._jitted, self._signature = function, jitted, signature

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Runs the program."""
        return self._jitted(*self._signature.flatten(args, kwargs))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)

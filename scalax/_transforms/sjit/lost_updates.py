"""Changes of nnx modules that are lost, because a compiled function works on a copy of what it is given."""

from __future__ import annotations

import sys
from typing import Any

import jax

from scalax._tree.paths import path_string
from scalax.errors import LostUpdateWarning, shown, warn


class Updates:
    """The modules of flax.nnx among the arguments of a function, as they are before it runs.

    Args:
        arguments: the arguments, inside the trace.
    """

    def __init__(self, arguments: Any) -> None:
        nnx = sys.modules.get('flax.nnx')  # without it there are no such modules
        self._kind: Any = None if nnx is None else (getattr(nnx, 'Pytree', None) or nnx.Object)
        self._modules = [] if nnx is None else self._found(arguments)
        self._before = list(map(_leaves, self._modules))

    def warn_lost(self, name: str, outputs: Any) -> None:
        """Warns about what has changed in the modules, and is not among the outputs of the function."""
        if not self._modules:
            return
        returned = set(map(id, self._found(outputs))) | set(map(id, jax.tree.leaves(outputs)))
        lost = [
            f'{type(module).__name__}: {path}'
            for module, before in zip(self._modules, self._before, strict=True)
            if id(module) not in returned
            for path, leaf in _leaves(module).items()
            if leaf is not before.get(path) and id(leaf) not in returned
        ]
        if lost:
            warn(
                f'{name} changes modules that it was given, and the changes are lost, because a compiled '
                f'function works on a copy (with jax.jit too):\n{shown(lost)}\n'
                'What to do: return the module, or its state (nnx.state), and go on with that; for what '
                'draws random numbers (nnx.Rngs), give other keys at each call.',
                LostUpdateWarning,
            )

    def _found(self, tree: Any) -> list[Any]:
        def is_module(node: Any) -> bool:
            return isinstance(node, self._kind)

        return list(filter(is_module, jax.tree.leaves(tree, is_leaf=is_module)))


def _leaves(module: Any) -> dict[str, Any]:
    return {path_string(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(module)[0]}

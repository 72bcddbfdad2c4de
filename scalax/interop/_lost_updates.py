"""Lost updates: changes of flax.nnx modules inside a compiled function that does not return them.

This module does not import flax: flax.nnx modules exist only if it is imported already.
"""

from __future__ import annotations

from typing import Any

import jax

from scalax._core.pytree.paths import describe_leaf, path_string
from scalax._jax.flax import module_class
from scalax.errors import LostUpdateWarning, shown_leaves, warn


class ModuleUpdates:
    """The flax.nnx modules in the arguments of a function, and their leaves before it runs.

    Args:
        nnx: the Python module ``flax.nnx``.
        arguments: the arguments, inside the trace.
    """

    def __init__(self, nnx: Any, arguments: Any) -> None:
        self._kind = module_class(nnx)
        self._modules = self._modules_in(arguments)
        self._before = list(map(_leaves_by_path, self._modules))

    def warn_lost(self, name: str, outputs: Any) -> None:
        """Warns about changes of modules that the function does not return."""
        if not self._modules:
            return
        returned = set(map(id, self._modules_in(outputs))) | set(map(id, jax.tree.leaves(outputs)))
        lost = [
            f'{describe_leaf(path, leaf)} of {type(module).__name__}'
            for module, before in zip(self._modules, self._before, strict=True)
            if id(module) not in returned
            for path, leaf in _leaves_by_path(module).items()
            if leaf is not before.get(path) and id(leaf) not in returned
        ]
        if lost:
            warn(
                f'{name} changes modules that it was given, and the changes are lost, because a compiled '
                f'function works on a copy (with jax.jit too):\n{shown_leaves(lost)}\n'
                'What to do: use scalax.interop.nnx.sjit, which updates them in place; or return the module, '
                'or its state (nnx.state), and continue with it.',
                LostUpdateWarning,
            )

    def _modules_in(self, tree: Any) -> list[Any]:
        def is_module(node: Any) -> bool:
            return isinstance(node, self._kind)

        return list(filter(is_module, jax.tree.leaves(tree, is_leaf=is_module)))


def _leaves_by_path(module: Any) -> dict[str, Any]:
    return {path_string(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(module)[0]}

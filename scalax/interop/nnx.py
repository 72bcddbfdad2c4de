"""Functions that change the modules that they are given, as users of flax nnx write them, on a mesh.

flax is imported when this module is: ``from scalax.interop import nnx``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
from flax import nnx

from scalax.errors import ArgumentError, plural

__all__ = ['NnxFunction', 'sjit']


class _Helper(Protocol):
    """A `MeshShardingHelper`."""

    def sjit(self, fun: Callable[..., Any], **options: Any) -> Any: ...


def sjit(
    helper: _Helper,
    fun: Callable[..., Any],
    *,
    in_shardings: Any = None,
    out_shardings: Any = None,
    donate_argnums: int | Sequence[int] = (),
    batch_argnums: int | Sequence[int] | None = None,
    **options: Any,
) -> NnxFunction:
    """Compiles a function of nnx modules for a mesh, as ``nnx.jit`` does for one device.

    What the function changes in a module, an optimizer or an ``nnx.Rngs`` is changed in the caller's: their
    variables get the new arrays, with the shardings of *in_shardings*. References that modules share are
    kept. Variables that hold no array yet, or that the function adds, are an error.

    Args:
        helper: the `MeshShardingHelper`.
        fun: a function of positional arguments. It may return anything but the modules that it is given.
        in_shardings: for each argument a rule or a tree of specs, or one for all; for modules, paths are
            those of ``nnx.state(module)``, as in ``layers/0/kernel/value``. What has several names has the
            first one, in alphabetical order.
        out_shardings: for the results.
        donate_argnums: the arguments whose arrays may be overwritten.
        batch_argnums: the arguments that hold rows of a batch; as in `MeshShardingHelper.sjit`.
        options: further options of `MeshShardingHelper.sjit`.

    Raises:
        ArgumentError: *in_shardings* are not one for each argument, or *fun* returns an argument, or adds
            variables.

    Example:
        >>> import jax
        >>> from flax import nnx as flax_nnx
        >>> from scalax.interop import nnx
        >>> from scalax.sharding import FSDPShardingRule, MeshShardingHelper, PartitionSpec
        >>> helper = MeshShardingHelper([-1], ['fsdp'])
        >>> rule = FSDPShardingRule(min_fsdp_size=1)
        >>> def make(key):
        ...     return flax_nnx.Linear(16, 16, rngs=flax_nnx.Rngs(key))
        >>> model = nnx.sjit(helper, make, out_shardings=rule)(jax.random.key(0))
        >>> def step(model, x):
        ...     model.kernel[...] = model.kernel[...] * 2
        ...     return model(x)
        >>> step = nnx.sjit(helper, step, in_shardings=(rule, PartitionSpec('fsdp')))
        >>> step(model, jax.numpy.ones((8, 16))).shape
        (8, 16)
    """
    return NnxFunction(helper, fun, in_shardings, out_shardings, donate_argnums, batch_argnums, options)


class NnxFunction:
    """A compiled function of nnx modules; `sjit` makes it.

    Attributes:
        pure: the function of `MeshShardingHelper.sjit` behind it, which changes nothing. It takes what
            `arguments` gives: ``helper.plan(step.pure, *step.arguments(model, batch))``.
    """

    pure: Any

    def __init__(
        self,
        helper: _Helper,
        fun: Callable[..., Any],
        in_shardings: Any,
        out_shardings: Any,
        donate_argnums: int | Sequence[int],
        batch_argnums: int | Sequence[int] | None,
        options: Mapping[str, Any],
    ) -> None:
        self._fun = fun
        self._count = len(in_shardings) if isinstance(in_shardings, tuple | list) else None
        given = in_shardings if self._count is None else (None, *in_shardings)
        if batch_argnums is not None:
            options = {**options, 'batch_argnums': _behind_the_graph(batch_argnums)}
        own = inspect.signature(fun).parameters.values()

        def pure(graph: Any, *given: Any) -> Any:
            return self._without_changes(graph, *given)

        self._name = pure.__name__ = getattr(fun, '__name__', type(fun).__name__)
        first = inspect.Parameter('graph', inspect.Parameter.POSITIONAL_ONLY)
        pure.__signature__ = inspect.Signature([first, *own])  # type: ignore[attr-defined]
        self.pure = helper.sjit(
            pure,
            in_shardings=given,
            out_shardings=(in_shardings, (None, out_shardings)),
            donate_argnums=_behind_the_graph(donate_argnums),
            **options,
        )
        functools.update_wrapper(self, fun)

    def arguments(self, *args: Any) -> tuple[Any, ...]:
        """The arguments of `pure`: how modules are put together, and their states in place of them.

        Args:
            args: the arguments of the function.
        """
        modules = _modules(args)
        graph, states = nnx.split(modules)
        return graph, *(states[i] if i in modules else arg for i, arg in enumerate(args))

    def __call__(self, *args: Any) -> Any:
        """Calls the function, and changes the modules."""
        if self._count not in (None, len(args)):
            raise ArgumentError(
                f'{self._name} was called with {plural(len(args), "argument")}, and in_shardings are for '
                f'{self._count}'
            )
        modules = _modules(args)
        states, (graph, result) = self.pure(*self.arguments(*args))
        nnx.update(modules, nnx.State({i: states[i] for i in modules}))
        return result if graph is None else nnx.merge(graph, result)

    def _without_changes(self, graph: Any, *given: Any) -> Any:
        """The function, which returns the states of its modules, too; None for other arguments."""
        states = {i: each for i, each in enumerate(given) if isinstance(each, nnx.State)}
        modules = nnx.merge(graph, nnx.State(states))
        before = _paths(modules)
        result = self._fun(*(modules.get(i, each) for i, each in enumerate(given)))
        if _paths(modules) != before:
            changed = sorted({*before} ^ {*_paths(modules)})
            raise ArgumentError(
                f'{self._name} adds or removes variables of its arguments: {", ".join(changed)}. Make them '
                'before, as in the constructor of the module'
            )
        own = {id(node) for _, node in nnx.iter_graph(modules) if isinstance(node, nnx.Pytree)}
        if any(id(node) in own for _, node in nnx.iter_graph(result)):
            raise ArgumentError(
                f'{self._name} returns a module that it was given, which is changed in place: leave it out '
                'of the results'
            )
        after = nnx.state(modules)
        returned = nnx.split(result) if _has_modules(result) else (None, result)
        return tuple(after.get(i) for i in range(len(given))), returned


def _behind_the_graph(positions: int | Sequence[int]) -> tuple[int, ...]:
    """Positions of arguments of a function as those of its pure one, whose first argument is the graph."""
    each = (positions,) if isinstance(positions, int) else positions
    return tuple(i + 1 if i >= 0 else i for i in each)


def _modules(args: Sequence[Any]) -> dict[int, Any]:
    """The arguments that hold modules, by position."""
    return {i: arg for i, arg in enumerate(args) if _has_modules(arg)}


def _has_modules(tree: Any) -> bool:
    kinds = nnx.Pytree, nnx.State
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, kinds))
    if any(isinstance(node, nnx.State) for node in nodes):
        raise ArgumentError(
            'this function takes and returns modules; with nnx.State, which is a tree of arrays, use '
            'MeshShardingHelper.sjit'
        )
    return any(isinstance(node, nnx.Pytree) for node in nodes)


def _paths(modules: Any) -> list[str]:
    """The paths of all variables."""
    return ['/'.join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(modules))]

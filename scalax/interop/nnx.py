"""Compiled functions of flax nnx modules that update them in place, on a mesh.

flax is imported when this module is: ``from scalax.interop import nnx``.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol, SupportsIndex, overload

import jax
from flax import nnx
from flax.errors import TraceContextError

from scalax.errors import ArgumentError, plural

__all__ = ['NnxFunction', 'sjit']

Positions = int | Iterable[int] | None
Names = str | Iterable[str] | None


class _Helper(Protocol):
    """A `MeshShardingHelper`."""

    def sjit(self, fun: Any = None, **options: Any) -> Any: ...


@overload
def sjit(
    helper: _Helper,
    fun: Callable[..., Any],
    in_shardings: Any = None,
    out_shardings: Any = None,
    static_argnums: Positions = None,
    args_sharding_constraint: Any = None,
    annotation_shardings: Mapping[str, Any] | None = None,
    **options: Any,
) -> NnxFunction: ...
@overload
def sjit(
    helper: _Helper,
    fun: None = None,
    in_shardings: Any = None,
    out_shardings: Any = None,
    static_argnums: Positions = None,
    args_sharding_constraint: Any = None,
    annotation_shardings: Mapping[str, Any] | None = None,
    **options: Any,
) -> Callable[[Callable[..., Any]], NnxFunction]: ...
def sjit(
    helper: _Helper,
    fun: Callable[..., Any] | None = None,
    in_shardings: Any = None,
    out_shardings: Any = None,
    static_argnums: Positions = None,
    args_sharding_constraint: Any = None,
    annotation_shardings: Mapping[str, Any] | None = None,
    *,
    static_argnames: Names = None,
    donate_argnums: Positions = None,
    donate_argnames: Names = None,
    batch_argnums: Positions = None,
    batch_argnames: Names = None,
    on_mismatch: Literal['error', 'reshard'] = 'error',
    pipeline: Any = None,
    partitioning: Any = None,
    **jit_kwargs: Any,
) -> Any:
    """Compiles a function of nnx modules for a mesh, as ``nnx.jit`` does for one device.

    Updates of a module, an optimizer or an ``nnx.Rngs`` inside the function are applied to the caller's
    object: its variables get the new arrays, with the shardings of *in_shardings*. Modules that share a
    reference still share it. So are variables that the function adds or removes, as by ``self.sow`` or
    ``nnx.pop``, and attributes without arrays that it changes, as by ``model.train()``; a module with others
    than before is another signature, which is traced and compiled again. The *in_shardings* of an argument
    need a sharding for the variables that the function adds: give a rule, not a tree of specs. *fun* may be
    one that ``nnx.jit`` has compiled, and ``@sjit(helper, ...)`` takes the place of ``@nnx.jit``.
    `MeshShardingHelper.plan` takes the result, with modules of arrays or of ``nnx.eval_shape``.

    Args:
        helper: the `MeshShardingHelper`.
        fun: a function of positional arguments. It may return anything except modules and variables of its
            arguments.
        in_shardings: for each argument a rule or a tree of specs, in a tuple or by name in a dict; or one for
            all. For modules, paths are those of ``nnx.state(module)``, as in ``layers/0/kernel/value``. A
            shared variable has its first path: that in the first argument, in alphabetical order.
        out_shardings: for the results.
        static_argnums: as in `MeshShardingHelper.sjit`, as are all that follow; positions are those of *fun*.
        args_sharding_constraint: like *in_shardings*, but reshards inside the function.
        annotation_shardings: annotation name -> rule.
        static_argnames: names of arguments that are part of the program.
        donate_argnums: the arguments whose arrays may be overwritten.
        donate_argnames: the same by name.
        batch_argnums: the arguments that are a batch.
        batch_argnames: the same by name.
        on_mismatch: what happens to arguments that are committed to another sharding.
        pipeline: the pipeline.
        partitioning: partitions the function along its batch.
        **jit_kwargs: further options of ``jax.jit``.

    Raises:
        ArgumentError: *in_shardings* do not have one entry for each argument; or *fun* returns one of its
            modules, changes a list, tuple or dict around them, or changes a module that is not an argument.

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
    options = {
        'static_argnums': static_argnums,
        'args_sharding_constraint': args_sharding_constraint,
        'annotation_shardings': annotation_shardings,
        'static_argnames': static_argnames,
        'donate_argnums': donate_argnums,
        'donate_argnames': donate_argnames,
        'batch_argnums': batch_argnums,
        'batch_argnames': batch_argnames,
        'on_mismatch': on_mismatch,
        'pipeline': pipeline,
        'partitioning': partitioning,
        **jit_kwargs,
    }
    helper.sjit(**options)  # raises about unknown options here, and not where a decorator is applied
    make = functools.partial(
        NnxFunction, helper, in_shardings=in_shardings, out_shardings=out_shardings, options=options
    )
    return make if fun is None else make(fun)


class NnxFunction:
    """A compiled function of nnx modules; `sjit` makes it.

    Attributes:
        pure: the function of `MeshShardingHelper.sjit` that it calls, which changes nothing. It takes what
            `arguments` gives: ``step.pure.shardings_for(*step.arguments(model, batch))``.
    """

    pure: Any

    def __init__(
        self,
        helper: _Helper,
        fun: Callable[..., Any],
        in_shardings: Any,
        out_shardings: Any,
        options: Mapping[str, Any],
    ) -> None:
        self._fun = fun
        self._name = getattr(fun, '__name__', type(fun).__name__)
        own = inspect.signature(fun).parameters
        self._count = len(in_shardings) if isinstance(in_shardings, tuple | list) else None
        given = in_shardings if self._count is None else (None, *in_shardings)
        changed, self._returned = in_shardings, 0
        if isinstance(in_shardings, Mapping):
            changed, self._returned = tuple(map(in_shardings.get, own)), len(own)
        options = dict(options)
        constraint = options['args_sharding_constraint']
        if isinstance(constraint, tuple | list):
            options['args_sharding_constraint'] = (None, *constraint)
        for option in ('donate_argnums', 'batch_argnums', 'static_argnums'):
            if options.get(option) is not None:
                options[option] = _after_the_graph(option, options[option], self._name, own)
        self._static: frozenset[int] = frozenset()
        if self._count is not None:
            self._static = _static_positions(options, self._name, own)
            rest = iter(in_shardings)
            self._returned = self._count + len(self._static)
            changed = tuple(None if i in self._static else next(rest, None) for i in range(self._returned))

        def pure(graph: Any, *given: Any) -> Any:
            return self._without_changes(graph, *given)

        pure.__name__ = self._name
        first = inspect.Parameter('_graph', inspect.Parameter.POSITIONAL_ONLY)
        # Types of functions do not say that inspect reads this.
        pure.__signature__ = inspect.Signature([first, *own.values()])  # type: ignore[attr-defined]
        self.pure = helper.sjit(
            pure, in_shardings=given, out_shardings=(changed, (None, None, out_shardings)), **options
        )
        functools.update_wrapper(self, fun)

    def arguments(self, *args: Any, **keywords: Any) -> tuple[Any, ...]:
        """The arguments of `pure`: the graph definition of all modules, and their states in place of them.

        Args:
            args: the arguments of the function.
            keywords: none: they are an error.

        Raises:
            ArgumentError: arguments by name, or more or fewer than the shardings are for.
        """
        self._check(args, keywords)
        return self._arguments(_modules(args), args)

    def explain_propagation(self, *args: Any) -> Any:
        """Returns how a call is partitioned along its batch: `SjitFunction.explain_propagation`."""
        return self.pure.explain_propagation(*self.arguments(*args))

    def lower(self, *args: Any) -> jax.stages.Lowered:
        """The program of a call, lowered for the mesh: `SjitFunction.lower`."""
        return self.pure.lower(*self.arguments(*args))

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        """Calls the function, and changes the modules."""
        self._check(args, keywords)
        modules = _modules(args)
        states, (changed_graph, result_graph, result) = self.pure(*self._arguments(modules, args))
        state = nnx.State({i: states[i] for i in modules})
        if changed_graph is not None:
            self._change_structure(modules, changed_graph, state)
        nnx.update(modules, state)
        return result if result_graph is None else nnx.merge(result_graph, result)

    def _change_structure(self, modules: dict[int, Any], graph: Any, state: Any) -> None:
        """Gives the caller's modules the attributes and variables that they have after the function.

        *graph* refers to the modules and variables before the call by their numbers in a traversal.
        """
        with nnx.update_context(self):
            with nnx.split_context(self) as context:
                context.split(modules)  # numbers them
            with nnx.merge_context(self, inner=False) as context:
                context.merge(graph, state)

    def _check(self, args: Sequence[Any], keywords: Mapping[str, Any]) -> None:
        if keywords:
            raise ArgumentError(
                f'{self._name} was called with {next(iter(keywords))}=: give each argument by its position, '
                'or bind it with functools.partial before sjit'
            )
        dynamic = sum(i not in self._static for i in range(len(args)))
        if self._count not in (None, dynamic):
            besides = ' besides static ones' if self._static else ''
            called = f'{self._name} was called with {plural(dynamic, "argument")}{besides}'
            raise ArgumentError(f'{called}, and in_shardings are for {self._count}')

    def _arguments(self, modules: dict[int, Any], args: Sequence[Any]) -> tuple[Any, ...]:
        graph, states = nnx.split(modules)
        # The positions are keys, which are part of the structure. Of what is shared, the first has the state.
        empty: Any = nnx.State({})
        own = (states.get(i, empty) if i in modules else arg for i, arg in enumerate(args))
        return (graph, dict.fromkeys(modules)), *own

    def _without_changes(self, graph: Any, *given: Any) -> Any:
        """The function, which returns the states of its modules, too; None for other arguments.

        It also returns the graph definition of its modules if the function has changed that, or which objects
        they consist of, else None.
        """
        graph, positions = graph
        with nnx.update_context(self):
            with nnx.merge_context(self, inner=True) as context:
                modules = context.merge(graph, nnx.State({i: given[i] for i in positions}))
            containers, nodes_before = _containers(modules), _nodes(modules)
            result = self._call(*(modules.get(i, arg) for i, arg in enumerate(given)))
            if _containers(modules) != containers:
                raise ArgumentError(
                    f'{self._name} changes a list, tuple or dict around the modules that it was given, which '
                    "is a copy of the caller's: return the new one, or use nnx.List and nnx.Dict, which are "
                    'changed in place'
                )
            # A module in the place of an equal one is a change, too: the caller may hold the one before.
            is_changed = nnx.graphdef(modules) != graph or [*_nodes(modules)] != [*nodes_before]
            with nnx.split_context(self) as context:
                graph_after, after = context.split(modules)
        if _has_modules(result) and (nodes_before | _nodes(modules)).keys() & _nodes(result).keys():
            raise ArgumentError(
                f'{self._name} returns a module or a variable that it was given, which is changed in place: '
                'leave it out of the results'
            )
        returned = nnx.split(result) if _has_modules(result) else (None, result)
        empty: Any = nnx.State({})
        count = max(len(given), self._returned)
        states = tuple(after.get(i, empty) if i in modules else None for i in range(count))
        return states, (graph_after if is_changed else None, *returned)

    def _call(self, *args: Any) -> Any:
        """Calls the function. Changes of a module of an outer trace are an error that says what to do."""
        try:
            return self._fun(*args)
        except TraceContextError as error:
            said = str(error).partition(' (http')[0]
            raise ArgumentError(
                f'{self._name} changes a module that is not one of its arguments: a compiled function can '
                f'change these only ({said}).\n'
                'What to do: make the module an argument, also of functions inside (nnx.grad, nnx.scan). In '
                'those of jax.grad, jax.lax.scan and microbatch, merge a copy: nnx.merge(..., copy=True).'
            ) from error


def _after_the_graph(
    option: str, positions: int | Sequence[int], name: str, own: Mapping[str, inspect.Parameter]
) -> tuple[int, ...]:
    """Positions of arguments of a function as those of its pure one, whose first argument is the graph."""
    each = tuple(positions) if isinstance(positions, Iterable) else (positions,)
    known = [key for key, kind in own.items() if kind.kind <= kind.POSITIONAL_OR_KEYWORD]
    most = math.inf if any(kind.kind is kind.VAR_POSITIONAL for kind in own.values()) else len(known)
    for i in each:
        if not isinstance(i, SupportsIndex) or not -most <= int(i) < most:
            takes = f'{plural(len(known), "positional argument")} ({", ".join(known)})'
            raise ArgumentError(f'{option}={i}: {name} takes {takes}')
    return tuple(i + 1 if i >= 0 else i for i in map(int, each))


def _static_positions(
    options: Mapping[str, Any], name: str, own: Mapping[str, inspect.Parameter]
) -> frozenset[int]:
    """The positions of static arguments of a function, from those of its pure one and from names."""
    names, chosen = list(own), options['static_argnames'] or ()
    chosen = [chosen] if isinstance(chosen, str) else chosen
    positions = [names.index(each) for each in chosen if each in own]  # `MeshShardingHelper.sjit` checks them
    for i in options['static_argnums'] or ():
        if i < 0 and any(kind.kind is kind.VAR_POSITIONAL for kind in own.values()):
            raise ArgumentError(
                f'static_argnums={i}: {name} takes any number of arguments: count it from the start, or give '
                'in_shardings as one rule or a dict by name'
            )
        positions.append(i - 1 if i > 0 else i + len(own))
    return frozenset(positions)


def _modules(args: Sequence[Any]) -> dict[int, Any]:
    """The arguments that hold modules or variables, by position."""
    return {i: arg for i, arg in enumerate(args) if _has_modules(arg)}


def _is_node(value: Any) -> bool:
    return isinstance(value, nnx.Pytree | nnx.Variable)


def _has_modules(tree: Any) -> bool:
    return any(map(_is_node, jax.tree.leaves(tree, is_leaf=_is_node)))


def _containers(modules: Any) -> tuple[Any, list[int | None]]:
    """The lists, tuples and dicts around modules and variables, and the ids of these."""
    leaves, structure = jax.tree.flatten(modules, is_leaf=_is_node)
    return structure, [id(leaf) if _is_node(leaf) else None for leaf in leaves]


def _nodes(tree: Any) -> dict[int, Any]:
    """Modules and variables, by id, in the order in which they are referred to."""
    return {id(node): node for _, node in nnx.iter_graph(tree) if _is_node(node)}

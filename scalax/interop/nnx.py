"""Compiled functions that update flax nnx modules in place, on a mesh.

It imports flax, and is itself imported explicitly: ``from scalax.interop import nnx``.
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
    reference still share it. Variables that the function adds or removes (``self.sow``, ``nnx.pop``), and
    attributes without arrays that it changes (``model.train()``), are updated in the caller's object too. A
    module with different variables or attributes has another signature, for which the function is traced and
    compiled again. If the function adds variables, *in_shardings* has to be a rule, not a tree of specs.
    *fun* may be compiled by ``nnx.jit``, and ``@sjit(helper, ...)`` replaces ``@nnx.jit``.
    `MeshShardingHelper.plan` accepts the result, with modules of arrays or of ``nnx.eval_shape``.

    Args:
        helper: the `MeshShardingHelper`.
        fun: a function of positional arguments. It may return anything except modules and variables of its
            arguments.
        in_shardings: a rule or a tree of specs for each argument, in a tuple or by name in a dict, or one for
            all arguments. The paths of a module are the paths of ``nnx.state(module)``, such as
            ``layers/0/kernel/value``. A shared variable has its first path: in the first argument, in
            alphabetical order.
        out_shardings: the shardings of the results.
        static_argnums: as in `MeshShardingHelper.sjit`, like all arguments below. Positions refer to *fun*.
        args_sharding_constraint: like *in_shardings*, but reshards inside the function.
        annotation_shardings: annotation name -> rule.
        static_argnames: the names of static arguments.
        donate_argnums: the positions of arguments whose arrays may be overwritten.
        donate_argnames: the names of arguments whose arrays may be overwritten.
        batch_argnums: the positions of arguments that are a batch.
        batch_argnames: the names of arguments that are a batch.
        on_mismatch: the treatment of arguments that are committed to another sharding.
        pipeline: the pipeline.
        partitioning: partitions the function along its batch.
        **jit_kwargs: further options of ``jax.jit``.

    Raises:
        ArgumentError: *in_shardings* does not have one entry for each argument, or *fun* returns one of its
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
    helper.sjit(**options)  # raises an error about unknown options now, before a decorator is applied
    make = functools.partial(
        NnxFunction, helper, in_shardings=in_shardings, out_shardings=out_shardings, options=options
    )
    return make if fun is None else make(fun)


class NnxFunction:
    """A compiled function of nnx modules, as returned by `sjit`.

    Attributes:
        pure: the pure function of `MeshShardingHelper.sjit` that it calls. It takes the result of
            `arguments`: ``step.pure.shardings_for(*step.arguments(model, batch))``.
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
        parameters = inspect.signature(fun).parameters
        self._count = len(in_shardings) if isinstance(in_shardings, tuple | list) else None
        # The first argument of the pure function is the graph definition.
        pure_in_shardings = in_shardings if self._count is None else (None, *in_shardings)
        # The new states of the modules have the shardings of the arguments.
        state_shardings, self._num_states = in_shardings, 0
        if isinstance(in_shardings, Mapping):
            state_shardings, self._num_states = tuple(map(in_shardings.get, parameters)), len(parameters)
        options = dict(options)
        constraint = options['args_sharding_constraint']
        if isinstance(constraint, tuple | list):
            options['args_sharding_constraint'] = (None, *constraint)
        for option in ('donate_argnums', 'batch_argnums', 'static_argnums'):
            if options.get(option) is not None:
                options[option] = _shift_positions(option, options[option], self._name, parameters)
        self._static: frozenset[int] = frozenset()
        if self._count is not None:
            self._static = _static_positions(options, self._name, parameters)
            rest = iter(in_shardings)
            self._num_states = self._count + len(self._static)
            state_shardings = tuple(
                None if i in self._static else next(rest, None) for i in range(self._num_states)
            )

        def pure(graph: Any, *args: Any) -> Any:
            return self._call_pure(graph, *args)

        pure.__name__ = self._name
        first = inspect.Parameter('_graph', inspect.Parameter.POSITIONAL_ONLY)
        # inspect reads this attribute, which the types of functions do not declare.
        pure.__signature__ = inspect.Signature([first, *parameters.values()])  # type: ignore[attr-defined]
        self.pure = helper.sjit(
            pure,
            in_shardings=pure_in_shardings,
            out_shardings=(state_shardings, (None, None, out_shardings)),
            **options,
        )
        functools.update_wrapper(self, fun)

    def arguments(self, *args: Any, **keywords: Any) -> tuple[Any, ...]:
        """Returns the arguments of `pure`: the graph definition of the modules, and states in their place.

        Args:
            args: the arguments of the function.
            keywords: must be empty.

        Raises:
            ArgumentError: there are arguments by name, or more or fewer arguments than shardings.
        """
        self._check(args, keywords)
        return self._pure_arguments(_modules(args), args)

    def explain_propagation(self, *args: Any) -> Any:
        """Returns how a call is partitioned along its batch: `SjitFunction.explain_propagation`."""
        return self.pure.explain_propagation(*self.arguments(*args))

    def lower(self, *args: Any) -> jax.stages.Lowered:
        """Lowers the program of a call for the mesh, as `SjitFunction.lower`."""
        return self.pure.lower(*self.arguments(*args))

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        """Calls the function, and updates the modules."""
        self._check(args, keywords)
        modules = _modules(args)
        states, (changed_graph, result_graph, result) = self.pure(*self._pure_arguments(modules, args))
        state = nnx.State({i: states[i] for i in modules})
        if changed_graph is not None:
            self._change_structure(modules, changed_graph, state)
        nnx.update(modules, state)
        return result if result_graph is None else nnx.merge(result_graph, result)

    def _change_structure(self, modules: dict[int, Any], graph: Any, state: Any) -> None:
        """Updates the attributes and variables of the caller's modules.

        *graph* refers to the modules and variables before the call by their indices in a traversal.
        """
        with nnx.update_context(self):
            with nnx.split_context(self) as context:
                context.split(modules)  # assigns the indices
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

    def _pure_arguments(self, modules: dict[int, Any], args: Sequence[Any]) -> tuple[Any, ...]:
        graph, states = nnx.split(modules)
        # The positions of modules are keys of a dict, which are part of the structure. The state of a shared
        # module belongs to its first position.
        empty: Any = nnx.State({})
        pure_args = (states.get(i, empty) if i in modules else arg for i, arg in enumerate(args))
        return (graph, dict.fromkeys(modules)), *pure_args

    def _call_pure(self, graph: Any, *args: Any) -> Any:
        """Calls the function, and returns the new states of its modules too, with None for other arguments.

        It also returns the new graph definition, or None if the function has changed neither the graph
        definition of its modules nor the objects that they consist of.
        """
        graph, positions = graph
        with nnx.update_context(self):
            with nnx.merge_context(self, inner=True) as context:
                modules = context.merge(graph, nnx.State({i: args[i] for i in positions}))
            containers, nodes_before = _containers(modules), _nodes(modules)
            result = self._call(*(modules.get(i, arg) for i, arg in enumerate(args)))
            if _containers(modules) != containers:
                raise ArgumentError(
                    f'{self._name} changes a list, tuple or dict around the modules that it was given, which '
                    "is a copy of the caller's: return the new one, or use nnx.List and nnx.Dict, which are "
                    'changed in place'
                )
            # Replacing a module by an equal one is a change too, because the caller may refer to the old one.
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
        count = max(len(args), self._num_states)
        states = tuple(after.get(i, empty) if i in modules else None for i in range(count))
        return states, (graph_after if is_changed else None, *returned)

    def _call(self, *args: Any) -> Any:
        """Calls the function. Raises an error with advice if it changes a module of an outer trace."""
        try:
            return self._fun(*args)
        except TraceContextError as error:
            reason = str(error).partition(' (http')[0]
            raise ArgumentError(
                f'{self._name} changes a module that is not one of its arguments: a compiled function can '
                f'only change its arguments ({reason}).\n'
                'What to do: make the module an argument, also of inner functions (nnx.grad, nnx.scan). '
                'Inside jax.grad, jax.lax.scan and microbatch, merge a copy: nnx.merge(..., copy=True).'
            ) from error


def _shift_positions(
    option: str, positions: int | Sequence[int], name: str, parameters: Mapping[str, inspect.Parameter]
) -> tuple[int, ...]:
    """Returns the positions of arguments in the pure function, whose first argument is the graph."""
    positions = tuple(positions) if isinstance(positions, Iterable) else (positions,)
    names = [
        key for key, parameter in parameters.items() if parameter.kind <= parameter.POSITIONAL_OR_KEYWORD
    ]
    limit = math.inf if _takes_any_number(parameters) else len(names)
    for i in positions:
        if not isinstance(i, SupportsIndex) or not -limit <= int(i) < limit:
            takes = f'{plural(len(names), "positional argument")} ({", ".join(names)})'
            raise ArgumentError(f'{option}={i}: {name} takes {takes}')
    return tuple(i + 1 if i >= 0 else i for i in map(int, positions))


def _static_positions(
    options: Mapping[str, Any], name: str, parameters: Mapping[str, inspect.Parameter]
) -> frozenset[int]:
    """Returns the positions of static arguments, from positions in the pure function and from names."""
    names, static_names = list(parameters), options['static_argnames'] or ()
    static_names = [static_names] if isinstance(static_names, str) else static_names
    # `MeshShardingHelper.sjit` reports unknown names.
    positions = [names.index(static_name) for static_name in static_names if static_name in parameters]
    for i in options['static_argnums'] or ():
        if i < 0 and _takes_any_number(parameters):
            raise ArgumentError(
                f'static_argnums={i}: {name} takes any number of arguments: count it from the start, or give '
                'in_shardings as one rule or a dict by name'
            )
        positions.append(i - 1 if i > 0 else i + len(parameters))
    return frozenset(positions)


def _takes_any_number(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters.values())


def _modules(args: Sequence[Any]) -> dict[int, Any]:
    """Returns the arguments that contain modules or variables, by position."""
    return {i: arg for i, arg in enumerate(args) if _has_modules(arg)}


def _is_node(value: Any) -> bool:
    return isinstance(value, nnx.Pytree | nnx.Variable)


def _has_modules(tree: Any) -> bool:
    return any(map(_is_node, jax.tree.leaves(tree, is_leaf=_is_node)))


def _containers(modules: Any) -> tuple[Any, list[int | None]]:
    """Returns the structure of lists, tuples and dicts around modules and variables, and the ids of these."""
    leaves, structure = jax.tree.flatten(modules, is_leaf=_is_node)
    return structure, [id(leaf) if _is_node(leaf) else None for leaf in leaves]


def _nodes(tree: Any) -> dict[int, Any]:
    """Returns modules and variables by id, in the order of the graph traversal."""
    return {id(node): node for _, node in nnx.iter_graph(tree) if _is_node(node)}

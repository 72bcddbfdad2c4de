"""`named_jit` and `fsdp`, which compile functions whose arrays are sharded by named dimensions."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any, Generic, ParamSpec, TypeVar, Unpack, overload

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from scalax._compile.call.resolve_arguments import Options
from scalax._compile.call.signature import CallSignature, name_of
from scalax._compile.sjit.function import JitOptions, reject_unknown_options
from scalax._core.context import active_helper
from scalax._core.util.lru_cache import LRUCache
from scalax._helper import MeshShardingHelper
from scalax.axes._haliax import haliax_mapping
from scalax.axes._mapping import AxisMapping, active_mapping, active_mesh, as_rule
from scalax.axes._static import (
    StaticPart,
    combine,
    is_array,
    keep_only,
    partition,
    reject_structs,
    require_hashable,
)
from scalax.errors import ArgumentError, MeshError, RuleError, did_you_mean
from scalax.rules import LogicalAxisShardingRule, ShardingRule

Params = ParamSpec('Params')
Result = TypeVar('Result')
Resources = AxisMapping | ShardingRule | None


class FsdpOptions(JitOptions, total=False):
    """The keyword-only options of `fsdp`."""

    donate_args: Any
    donate_kwargs: Any
    mesh: Any


class NamedJitOptions(FsdpOptions, total=False):
    """The keyword-only options of `named_jit`."""

    in_axis_resources: Resources
    out_axis_resources: Resources


@overload
def named_jit(
    fn: Callable[Params, Result],
    axis_resources: AxisMapping | None = None,
    **options: Unpack[NamedJitOptions],
) -> NamedJitFunction[Params, Result]: ...
@overload
def named_jit(
    fn: None = None, axis_resources: AxisMapping | None = None, **options: Unpack[NamedJitOptions]
) -> Callable[[Callable[Params, Result]], NamedJitFunction[Params, Result]]: ...
def named_jit(
    fn: Callable[..., Any] | None = None,
    axis_resources: AxisMapping | None = None,
    *,
    in_axis_resources: Resources = None,
    out_axis_resources: Resources = None,
    donate_args: Any = None,
    donate_kwargs: Any = None,
    mesh: Any = None,
    **jit_kwargs: Any,
) -> Any:
    """Compiles a function whose arrays are sharded by the names of their dimensions.

    Arguments may be any trees: JAX and numpy arrays are data, and everything else is part of the compiled
    program. The same holds for outputs, and for *fn*, which may be a module or its method.

    Args:
        fn: the function; without it a decorator is returned.
        axis_resources: the mapping that is active inside; by default the one that is active at the call.
        in_axis_resources: the mapping, or any rule, that arguments are sharded by before the call. Arguments
            that do not name their dimensions stay where they are. By default all arguments do.
        out_axis_resources: the same for outputs; by default `axis_resources`. Outputs that do not name their
            dimensions are left to the compiler.
        donate_args: whose buffers may be used for outputs: True, or a prefix of the tuple of positional
            arguments with booleans. A function in place of a boolean is called with each array and returns
            a boolean. Arguments after a shorter prefix are not donated.
        donate_kwargs: the same for the dict of keyword arguments.
        mesh: a mesh or helper; by default, at the call, that of the active helper or of ``jax.set_mesh``.
        **jit_kwargs: options of ``jax.jit``, such as ``keep_unused``; None stands for JAX's default.

    Returns:
        A function with the name and the documentation of *fn*, and ``lower``.

    Raises:
        ArgumentError: leaves that are not arrays cannot be hashed; the message names all of them. Or an
            option of `MeshShardingHelper.sjit` that names arguments, such as ``batch_argnums``. Or donations
            are invalid, or name a keyword that the function does not have.
        MeshError: there is a mapping or a rule, and no mesh.
        RuleError: resources are neither a mapping nor a rule.
        ShardingError: arrays do not fit their names or the mesh; the message names all of them.

    Example:
        >>> import jax.numpy as jnp
        >>> from scalax.axes import shard
        >>> from scalax.sharding import MeshShardingHelper
        >>> @named_jit(axis_resources={'batch': 'data'})
        ... def doubled(x, scale=2):
        ...     return shard(x * scale, 'batch ...')
        >>> with MeshShardingHelper([8], ['data']).get_context():
        ...     doubled(jnp.ones((16, 3))).sharding.spec
        P('data',)
    """
    # These options refer to the arguments of the compiled function, which differ from those of *fn*.
    if rejected := sorted(jit_kwargs.keys() & {field.name for field in dataclasses.fields(Options)}):
        raise ArgumentError(
            f'named_jit does not take {", ".join(rejected)}\n'
            'What to do: compile with helper.sjit, which does. In named_jit, everything but arrays is '
            'static, and donate_args and donate_kwargs choose what is donated.'
        )
    own_options = NamedJitOptions.__annotations__.keys() - JitOptions.__annotations__.keys()
    reject_unknown_options('named_jit', jit_kwargs, ['axis_resources', *sorted(own_options)])

    def decorator(fn: Callable[..., Any]) -> NamedJitFunction[..., Any]:
        if not callable(fn):
            raise ArgumentError(
                f'named_jit takes a function first, got {type(fn).__name__}: '
                'a mapping is axis_resources={...}'
            )
        config = _Config(
            None if axis_resources is None else as_rule(axis_resources),
            _rule_of(in_axis_resources, 'in_axis_resources'),
            _rule_of(out_axis_resources, 'out_axis_resources'),
            {'args': donate_args, 'kwargs': donate_kwargs},
            mesh,
            {name: value for name, value in jit_kwargs.items() if value is not None},
        )
        return NamedJitFunction(fn, config)

    return decorator if fn is None else decorator(fn)


@overload
def fsdp(
    fn: Callable[Params, Result],
    parameter_mapping: Resources,
    compute_mapping: AxisMapping | None,
    **options: Unpack[FsdpOptions],
) -> NamedJitFunction[Params, Result]: ...
@overload
def fsdp(
    parameter_mapping: Resources, compute_mapping: AxisMapping | None, **options: Unpack[FsdpOptions]
) -> Callable[[Callable[Params, Result]], NamedJitFunction[Params, Result]]: ...
def fsdp(*args: Any, **kwargs: Any) -> Any:
    """Compiles a function for FSDP by named axes: arguments and outputs have the sharding of parameters.

    ``fsdp(fn, parameter_mapping, compute_mapping)``, or without *fn* as a decorator, is
    ``named_jit(fn, compute_mapping, in_axis_resources=parameter_mapping,
    out_axis_resources=parameter_mapping)``.

    Args:
        *args: *fn*, unless `fsdp` is used as a decorator; *parameter_mapping*, the mapping for stored
            parameters, or any rule; *compute_mapping*, the mapping that is active inside.
        **kwargs: these three by name, and the options of `named_jit`.

    Raises:
        ArgumentError: a mapping is missing or passed twice; or an option that the mappings set.

    Example:
        >>> import jax.numpy as jnp
        >>> from scalax.axes import shard
        >>> from scalax.sharding import MeshShardingHelper
        >>> @fsdp({'embed': 'data'}, {'batch': 'data'})
        ... def step(x):
        ...     return shard(x, 'batch embed') + 1
        >>> with MeshShardingHelper([8], ['data']).get_context():
        ...     step(jnp.ones((8, 4))).shape
        (8, 4)
    """
    takes_function = bool(args) and (args[0] is None or _is_function(args[0]))
    names = ('fn', *_FSDP_MAPPINGS) if takes_function else _FSDP_MAPPINGS
    if 'param_mapping' in kwargs and 'parameter_mapping' not in kwargs:  # the name in earlier versions
        kwargs['parameter_mapping'] = kwargs.pop('param_mapping')
    positional = dict(zip(names, args, strict=False))
    problems = [
        *([f'{len(args)} positional arguments'] if len(args) > len(names) else []),
        *(f'{name} twice' for name in names if name in positional and name in kwargs),
        *(f'no {name}' for name in _FSDP_MAPPINGS if name not in positional and name not in kwargs),
        *(f'{name}, which {source} sets' for name, source in _FSDP_RESOURCES.items() if name in kwargs),
    ]
    if problems:
        raise ArgumentError(
            f'fsdp got {", ".join(problems)}\n'
            'What to do: call fsdp(fn, parameter_mapping, compute_mapping), or decorate a function with '
            '@fsdp(parameter_mapping, compute_mapping); options of named_jit may follow by name.'
        )
    options = positional | kwargs
    parameter_mapping, compute_mapping = (options.pop(name) for name in _FSDP_MAPPINGS)
    return named_jit(
        options.pop('fn', None),
        compute_mapping,
        in_axis_resources=parameter_mapping,
        out_axis_resources=parameter_mapping,
        **options,
    )


_FSDP_MAPPINGS = ('parameter_mapping', 'compute_mapping')
_FSDP_RESOURCES = {
    'axis_resources': 'compute_mapping',
    'in_axis_resources': 'parameter_mapping',
    'out_axis_resources': 'parameter_mapping',
}


def _is_function(value: Any) -> bool:
    """Whether a value is a function to compile, rather than a mapping or a rule, which may be callable."""
    return callable(value) and not isinstance(value, Mapping | ShardingRule)


@dataclasses.dataclass(frozen=True, eq=False)
class _Config:
    """The options of a `NamedJitFunction`.

    Attributes:
        mapping: the mapping that is active inside; None for the mapping that is active at the call.
        in_rule: the rule for arguments.
        out_rule: the rule for outputs.
        donated: `donate_args` and `donate_kwargs`, as ``'args'`` and ``'kwargs'``.
        mesh: the mesh or helper; None for the one that is active at the call.
        jit_kwargs: the options of ``jax.jit``.
    """

    mapping: LogicalAxisShardingRule | None
    in_rule: ShardingRule | None
    out_rule: ShardingRule | None
    donated: Mapping[str, Any]
    mesh: Any
    jit_kwargs: Mapping[str, Any]


class NamedJitFunction(Generic[Params, Result]):
    """The result of `named_jit`: one `sjit` function for each mesh and mapping that it is called under."""

    # Slots, because functools.wraps in other libraries copies ``__dict__``.
    __slots__ = ('__dict__', '__weakref__', '_compiled_functions', '_config', '_fn', '_name')

    __qualname__: str  # of *fn*, like all attributes that `functools.update_wrapper` copies

    def __init__(self, fn: Callable[..., Any], config: _Config) -> None:
        functools.update_wrapper(self, fn, updated=())
        self._name, self._config = name_of(fn), config
        if isinstance(config.donated['kwargs'], Mapping):
            self._check_keywords(CallSignature(fn), config.donated['kwargs'])
        if inspect.ismethod(fn):
            # The arrays of the object are data. JAX would compare the bound method by identity.
            fn = jax.tree_util.Partial(fn.__func__, fn.__self__)
        self._fn = fn
        self._compiled_functions: LRUCache[Any, Any] = LRUCache()

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __reduce__(self) -> str:
        return self.__qualname__

    def __call__(self, /, *args: Params.args, **kwargs: Params.kwargs) -> Result:
        """Runs the compiled function."""
        compiled, operands = self._prepare(args, kwargs)
        try:
            return combine(*compiled(*operands))
        except TypeError:  # JAX's error about a ShapeDtypeStruct would have the parameter names of `body`
            reject_structs({'args': args, 'function': self._fn, 'kwargs': kwargs}, self._name)
            raise

    def lower(self, /, *args: Any, **kwargs: Any) -> Any:
        """``jax.jit(...).lower`` of the compiled function of such a call."""
        compiled, operands = self._prepare(args, kwargs)
        return compiled.lower(*operands)

    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...]]:
        """Returns the compiled function of a call, and the operands that it takes (see `_body`)."""
        call = {'args': args, 'function': self._fn, 'kwargs': kwargs}
        data, static = partition(call)
        remedy = 'pass something immutable (a tuple, a frozen dataclass)'
        require_hashable(static, call, f'{self._name} got', remedy)
        is_donated = self._donations(call)
        donated = tuple(flag for flag, array in zip(is_donated, static.is_array, strict=True) if array)
        arrays = [keep_only(data, [flag == donates for flag in donated]) for donates in (True, False)]
        return self._compile(len(args), frozenset(kwargs)), (_StaticCall(static, donated), *arrays)

    def _check_keywords(self, signature: CallSignature, donated: Mapping[str, Any]) -> None:
        """Raises ArgumentError about donated keywords that the function does not have."""
        names = dict.fromkeys([*signature.positional, *signature.keyword_only, *signature.wrapped_names])
        unknown = [name for name in donated if name not in names]
        if unknown and signature.keywords is None:
            raise ArgumentError(
                f'donate_kwargs of {self._name}: there is no argument {unknown[0]!r} '
                f'({did_you_mean(str(unknown[0]), names)})'
            )

    def _donations(self, call: dict[str, Any]) -> list[bool]:
        """Returns whether each leaf of a call is donated."""
        is_donated: list[bool] = []
        for part, tree in call.items():
            option = self._config.donated.get(part)
            prefix = option
            if part == 'kwargs' and isinstance(option, Mapping):
                prefix = {name: option.get(name) for name in tree}
            elif part == 'args' and isinstance(option, tuple | list):
                prefix = (*option, *[None] * (len(tree) - len(option)))
            prefix = jax.tree.map(
                lambda flag: False if flag is None else flag, prefix, is_leaf=lambda flag: flag is None
            )
            form = (
                f'donate_{part} of {self._name} is True, or a prefix of the {part} with booleans or functions'
            )
            message = f'{form}; got {option!r}'
            for flag in jax.tree.leaves(prefix):
                if not isinstance(flag, bool | np.bool_) and not callable(flag):
                    raise ArgumentError(f'{message}. Positions and names are for jax.jit.')
            try:
                flags = jax.tree.leaves(jax.tree.broadcast(prefix, tree))
            except ValueError as error:
                raise ArgumentError(f'{message}. JAX reports: {error}') from None
            for flag, leaf in zip(flags, jax.tree.leaves(tree), strict=True):
                is_donated.append(bool(is_array(leaf) and flag(leaf) if callable(flag) else flag))
        return is_donated

    def _compile(self, num_args: int, keywords: frozenset[str]) -> Any:
        """Returns the compiled function for these arguments and the active mesh and mapping."""
        mapping = self._config.mapping or active_mapping(None)
        out_rule = self._config.out_rule or _rule_of(mapping)
        helper = _active_helper(self._config.mesh)
        key = helper, mapping, num_args, keywords
        cached = self._compiled_functions.get(key)
        if cached is not None:
            return cached
        body = self._body(mapping, None if helper is None else helper.mesh)
        in_rule = self._config.in_rule
        in_rules: Any = None
        if in_rule is not None:
            # Each argument has the rule itself, so that leaf paths start inside the argument.
            by_name = dict.fromkeys(sorted(keywords), in_rule)
            in_rules = {'args': (in_rule,) * num_args, 'function': in_rule, 'kwargs': by_name}
        if helper is not None:
            compiled: Any = helper.sjit(
                body,
                in_shardings=None if in_rules is None else (None, in_rules, in_rules),
                out_shardings=None if out_rule is None else (out_rule, None),
                donate_argnums=1,
                on_mismatch='reshard',
                **self._config.jit_kwargs,
            )
        elif in_rule is None and out_rule is None:
            compiled = jax.jit(body, donate_argnums=1, **self._config.jit_kwargs)
        else:
            raise MeshError(
                f'{self._name} has a mapping or a rule, but no mesh is active: call it inside '
                '`with helper.get_context():`, or give named_jit mesh=helper.mesh'
            )
        return self._compiled_functions.add(key, compiled)

    def _body(
        self, mapping: LogicalAxisShardingRule | None, mesh: Mesh | AbstractMesh | None
    ) -> Callable[..., Any]:
        def body(static_call: _StaticCall, donated: Any, undonated: Any) -> tuple[Any, StaticPart]:
            def call_function() -> Any:
                # Combined in each trace, because the function may change its arguments.
                leaves = {True: iter(jax.tree.leaves(donated)), False: iter(jax.tree.leaves(undonated))}
                arrays = [next(leaves[is_donated]) for is_donated in static_call.donated]
                call = combine(arrays, static_call.static)
                return call['function'](*call['args'], **call['kwargs'])

            context = contextlib.nullcontext() if mapping is None else active_helper.activate_mapping(mapping)
            with context, haliax_mapping(mapping, mesh, call_function):
                output = call_function()
            data, static = partition(output)
            require_hashable(static, output, f'the output of {self._name} has', 'return something immutable')
            return data, static

        body.__name__ = body.__qualname__ = self._name
        return body


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _StaticCall:
    """The static part of a call, and whether each of its arrays is donated."""

    static: StaticPart
    donated: tuple[bool, ...]


def _rule_of(resources: Resources, argument: str = '') -> ShardingRule | None:
    """Converts resources to a rule that leaves arrays without names as they are, or to the compiler."""
    if resources is None:
        return None
    if not isinstance(resources, ShardingRule):
        if not isinstance(resources, Mapping | tuple | list):
            raise RuleError(f'named_jit: {argument} is a mapping or any rule, got {resources!r}')
        resources = as_rule(resources)
    is_lenient = isinstance(resources, LogicalAxisShardingRule) and not resources.strict
    return resources | None if is_lenient else resources


def _active_helper(mesh: Any) -> MeshShardingHelper | None:
    """Returns *mesh* if it is a helper, or the active helper, or a helper of the active mesh; else None."""
    context = active_helper.current()
    helper = context.helper if mesh is None and context is not None else mesh
    if isinstance(helper, MeshShardingHelper):
        return helper
    mesh = active_mesh(helper)
    return None if mesh is None else _helper_of_mesh(mesh)


@functools.lru_cache(maxsize=64)
def _helper_of_mesh(mesh: Mesh | AbstractMesh) -> MeshShardingHelper:
    if isinstance(mesh, AbstractMesh):  # constraints detect Manual axes themselves
        types = [AxisType.Auto if kind is AxisType.Manual else kind for kind in mesh.axis_types]
        mesh = AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=tuple(types))
    return MeshShardingHelper.from_mesh(mesh)

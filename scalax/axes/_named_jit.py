"""`named_jit`: compiled functions whose arrays are sharded by the names of their dimensions."""

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

Given = ParamSpec('Given')
Result = TypeVar('Result')
Resources = AxisMapping | ShardingRule | None


class FsdpOptions(JitOptions, total=False):
    """The options of `fsdp` that are given by name."""

    donate_args: Any
    donate_kwargs: Any
    mesh: Any


class NamedJitOptions(FsdpOptions, total=False):
    """The options of `named_jit` that are given by name."""

    in_axis_resources: Resources
    out_axis_resources: Resources


@overload
def named_jit(
    fn: Callable[Given, Result],
    axis_resources: AxisMapping | None = None,
    **options: Unpack[NamedJitOptions],
) -> NamedJitFunction[Given, Result]: ...
@overload
def named_jit(
    fn: None = None, axis_resources: AxisMapping | None = None, **options: Unpack[NamedJitOptions]
) -> Callable[[Callable[Given, Result]], NamedJitFunction[Given, Result]]: ...
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

    Arguments may be any trees: arrays (of JAX and of numpy) are data, everything else in them is part of the
    compiled program. So are *fn* itself, which may be a module or its method, and what it returns.

    Args:
        fn: the function; without it a decorator is returned.
        axis_resources: the mapping that is active inside; by default the one that is active at the call.
        in_axis_resources: the mapping, or any rule, by which arguments are sharded first; what names no
            dimensions stays where it is, as all arguments do by default.
        out_axis_resources: the same for outputs; by default `axis_resources`. What names no dimensions is
            left to the compiler.
        donate_args: True, or a prefix of the tuple of positional arguments with booleans: whose buffers may
            be used for outputs. A function in place of a boolean is called with each array and returns one.
            Arguments after a shorter prefix are not donated.
        donate_kwargs: the same for the dict of keyword arguments.
        mesh: a mesh or helper; by default, at the call, that of the active helper or of ``jax.set_mesh``.
        **jit_kwargs: options of ``jax.jit``, such as ``keep_unused``; None stands for JAX's default.

    Returns:
        A function with the name and the documentation of *fn*, and ``lower``.

    Raises:
        ArgumentError: leaves that are not arrays and cannot be hashed; all of them are named. Or an option of
            `MeshShardingHelper.sjit` that names arguments, such as ``batch_argnums``. Or donations of another
            form, or of a keyword that the function does not have.
        MeshError: there is something to shard by, and no mesh.
        RuleError: resources that are neither a mapping nor a rule.
        ShardingError: arrays that do not fit their names or the mesh; all of them are named.

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
    # They are about the arguments of the function that is compiled, which are others.
    if wrong := sorted(jit_kwargs.keys() & {field.name for field in dataclasses.fields(Options)}):
        raise ArgumentError(
            f'named_jit does not take {", ".join(wrong)}\n'
            'What to do: compile with helper.sjit, which does. In named_jit, everything but arrays is '
            'static, and donate_args and donate_kwargs choose what is donated.'
        )
    own = NamedJitOptions.__annotations__.keys() - JitOptions.__annotations__.keys()
    reject_unknown_options('named_jit', jit_kwargs, ['axis_resources', *sorted(own)])

    def compiled(fn: Callable[..., Any]) -> NamedJitFunction[..., Any]:
        if not callable(fn):
            raise ArgumentError(
                f'named_jit takes a function first, got {type(fn).__name__}: '
                'a mapping is axis_resources={...}'
            )
        shared = _Shared(
            None if axis_resources is None else as_rule(axis_resources),
            _rule_of(in_axis_resources, 'in_axis_resources'),
            _rule_of(out_axis_resources, 'out_axis_resources'),
            {'args': donate_args, 'kwargs': donate_kwargs},
            mesh,
            {name: value for name, value in jit_kwargs.items() if value is not None},
        )
        return NamedJitFunction(fn, shared)

    return compiled if fn is None else compiled(fn)


@overload
def fsdp(
    fn: Callable[Given, Result],
    parameter_mapping: Resources,
    compute_mapping: AxisMapping | None,
    **options: Unpack[FsdpOptions],
) -> NamedJitFunction[Given, Result]: ...
@overload
def fsdp(
    parameter_mapping: Resources, compute_mapping: AxisMapping | None, **options: Unpack[FsdpOptions]
) -> Callable[[Callable[Given, Result]], NamedJitFunction[Given, Result]]: ...
def fsdp(*args: Any, **kwargs: Any) -> Any:
    """FSDP by named axes: what goes in and comes out is sharded as parameters are stored.

    ``fsdp(fn, parameter_mapping, compute_mapping)``, or without *fn* as a decorator, is
    ``named_jit(fn, compute_mapping, in_axis_resources=parameter_mapping,
    out_axis_resources=parameter_mapping)``.

    Args:
        *args: *fn*, unless a decorator is wanted; *parameter_mapping*, the mapping by which parameters are
            stored, or any rule; *compute_mapping*, the mapping that is active inside.
        **kwargs: these three by name, and the options of `named_jit`.

    Raises:
        ArgumentError: a mapping is missing or passed twice; or an option that a mapping stands for.

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
    if 'param_mapping' in kwargs and 'parameter_mapping' not in kwargs:  # a name of earlier versions
        kwargs['parameter_mapping'] = kwargs.pop('param_mapping')
    positional = dict(zip(names, args, strict=False))
    problems = [
        *([f'{len(args)} positional arguments'] if len(args) > len(names) else []),
        *(f'{name} twice' for name in names if name in positional and name in kwargs),
        *(f'no {name}' for name in _FSDP_MAPPINGS if name not in positional and name not in kwargs),
        *(f'{name}, for which {source} stands' for name, source in _FSDP_RESOURCES.items() if name in kwargs),
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
class _Shared:
    """What all calls of a function share: the rules, what is donated (by part), and where it runs."""

    mapping: LogicalAxisShardingRule | None
    inputs: ShardingRule | None
    outputs: ShardingRule | None
    donated: Mapping[str, Any]
    mesh: Any
    jit_kwargs: Mapping[str, Any]


class NamedJitFunction(Generic[Given, Result]):
    """What `named_jit` returns: a function of `sjit` for each mesh and mapping that it is called under."""

    # Slots: functools.wraps of other libraries copies what is in ``__dict__``.
    __slots__ = ('__dict__', '__weakref__', '_fn', '_known', '_name', '_shared')

    __qualname__: str  # of the function that it was made of, as all that `functools.wraps` gives

    def __init__(self, fn: Callable[..., Any], shared: _Shared) -> None:
        functools.update_wrapper(self, fn, updated=())
        self._name, self._shared = name_of(fn), shared
        if isinstance(shared.donated['kwargs'], Mapping):
            self._check_keywords(CallSignature(fn), shared.donated['kwargs'])
        if inspect.ismethod(fn):
            # The arrays of the object are data. JAX would compare the bound method by identity.
            fn = jax.tree_util.Partial(fn.__func__, fn.__self__)
        self._fn = fn
        self._known: LRUCache[Any, Any] = LRUCache()

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __reduce__(self) -> str:
        return self.__qualname__

    def __call__(self, /, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        """Runs the compiled function."""
        compiled, operands = self._prepared(args, kwargs)
        try:
            return combine(*compiled(*operands))
        except TypeError:  # may be JAX's about a ShapeDtypeStruct, with the parameter names of `body`
            reject_structs({'args': args, 'function': self._fn, 'kwargs': kwargs}, self._name)
            raise

    def lower(self, /, *args: Any, **kwargs: Any) -> Any:
        """``jax.jit(...).lower`` of the compiled function of such a call."""
        compiled, operands = self._prepared(args, kwargs)
        return compiled.lower(*operands)

    def _prepared(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...]]:
        """The compiled function of a call, and its operands (`_Call`)."""
        whole = {'args': args, 'function': self._fn, 'kwargs': kwargs}
        data, static = partition(whole)
        remedy = 'pass something immutable (a tuple, a frozen dataclass)'
        require_hashable(static, whole, f'{self._name} got', remedy)
        flags = self._donations(whole)
        donated = tuple(flag for flag, array in zip(flags, static.arrays, strict=True) if array)
        arrays = [keep_only(data, [flag == kept for kept in donated]) for flag in (True, False)]
        return self._compiled(len(args), frozenset(kwargs)), (_Call(static, donated), *arrays)

    def _check_keywords(self, signature: CallSignature, donated: Mapping[str, Any]) -> None:
        """Raises ArgumentError about donated keywords that the function does not have."""
        known = dict.fromkeys([*signature.positional, *signature.keyword_only, *signature.wrapped_names])
        unknown = [name for name in donated if name not in known]
        if unknown and signature.keywords is None:
            raise ArgumentError(
                f'donate_kwargs of {self._name}: there is no argument {unknown[0]!r} '
                f'({did_you_mean(str(unknown[0]), known)})'
            )

    def _donations(self, whole: dict[str, Any]) -> list[bool]:
        """Whether each leaf of a call is donated."""
        flags: list[bool] = []
        for part, tree in whole.items():
            asked = self._shared.donated.get(part)
            prefix = asked
            if part == 'kwargs' and isinstance(asked, Mapping):
                prefix = {name: asked.get(name) for name in tree}
            elif part == 'args' and isinstance(asked, tuple | list):
                prefix = (*asked, *[None] * (len(tree) - len(asked)))
            prefix = jax.tree.map(
                lambda flag: False if flag is None else flag, prefix, is_leaf=lambda flag: flag is None
            )
            form = (
                f'donate_{part} of {self._name} is True, or a prefix of the {part} with booleans or functions'
            )
            wrong = f'{form}; got {asked!r}'
            for flag in jax.tree.leaves(prefix):
                if not isinstance(flag, bool | np.bool_) and not callable(flag):
                    raise ArgumentError(f'{wrong}. Positions and names are for jax.jit.')
            try:
                leaf_flags = jax.tree.leaves(jax.tree.broadcast(prefix, tree))
            except ValueError as error:
                raise ArgumentError(f'{wrong}. JAX reports: {error}') from None
            for flag, leaf in zip(leaf_flags, jax.tree.leaves(tree), strict=True):
                flags.append(bool(is_array(leaf) and flag(leaf) if callable(flag) else flag))
        return flags

    def _compiled(self, args: int, kwargs: frozenset[str]) -> Any:
        """The compiled function for so many arguments, and the mesh and the mapping that are in force."""
        mapping = self._shared.mapping or active_mapping(None)
        out = self._shared.outputs or _rule_of(mapping)
        place = _place_of(self._shared.mesh)
        key = place, mapping, args, kwargs
        known = self._known.get(key)
        if known is not None:
            return known
        body = self._body(mapping, None if place is None else place.mesh)
        rule = self._shared.inputs
        inputs: Any = None
        if rule is not None:
            # The rule once for every argument, so that leaf paths start inside of each.
            by_name = dict.fromkeys(sorted(kwargs), rule)
            inputs = {'args': (rule,) * args, 'function': rule, 'kwargs': by_name}
        if place is not None:
            compiled: Any = place.sjit(
                body,
                in_shardings=None if inputs is None else (None, inputs, inputs),
                out_shardings=None if out is None else (out, None),
                donate_argnums=1,
                on_mismatch='reshard',
                **self._shared.jit_kwargs,
            )
        elif rule is None and out is None:
            compiled = jax.jit(body, donate_argnums=1, **self._shared.jit_kwargs)
        else:
            raise MeshError(
                f'{self._name} has a mapping to shard by, and no mesh is active: call it inside '
                '`with helper.get_context():`, or give named_jit mesh=helper.mesh'
            )
        return self._known.add(key, compiled)

    def _body(
        self, mapping: LogicalAxisShardingRule | None, mesh: Mesh | AbstractMesh | None
    ) -> Callable[..., Any]:
        def body(call: _Call, donated: Any, given: Any) -> tuple[Any, StaticPart]:
            def call_function() -> Any:
                # Combined for each trace, because the function may change its arguments.
                parts = {True: iter(jax.tree.leaves(donated)), False: iter(jax.tree.leaves(given))}
                whole = combine([next(parts[flag]) for flag in call.donated], call.static)
                return whole['function'](*whole['args'], **whole['kwargs'])

            inside = contextlib.nullcontext() if mapping is None else active_helper.activate_mapping(mapping)
            with inside, haliax_mapping(mapping, mesh, call_function):
                output = call_function()
            data, static = partition(output)
            require_hashable(static, output, f'the output of {self._name} has', 'return something immutable')
            return data, static

        body.__name__ = body.__qualname__ = self._name
        return body


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Call:
    """The static part of a call, and which of its arrays are donated."""

    static: StaticPart
    donated: tuple[bool, ...]


def _rule_of(resources: Resources, argument: str = '') -> ShardingRule | None:
    """The rule of a mapping. Arrays without names stay as they are, or are left to the compiler."""
    if resources is None:
        return None
    if not isinstance(resources, ShardingRule):
        if not isinstance(resources, Mapping | tuple | list):
            raise RuleError(f'named_jit: {argument} is a mapping or any rule, got {resources!r}')
        resources = as_rule(resources)
    is_lenient = isinstance(resources, LogicalAxisShardingRule) and not resources.strict
    return resources | None if is_lenient else resources


def _place_of(mesh: Any) -> MeshShardingHelper | None:
    """The helper given or active, or one over the mesh in force; else None."""
    context = active_helper.current()
    helper = context.helper if mesh is None and context is not None else mesh
    if isinstance(helper, MeshShardingHelper):
        return helper
    found = active_mesh(helper)
    return None if found is None else _helper_over(found)


@functools.lru_cache(maxsize=64)
def _helper_over(mesh: Mesh | AbstractMesh) -> MeshShardingHelper:
    if isinstance(mesh, AbstractMesh):  # constraints find out for themselves which axes are Manual
        types = [AxisType.Auto if kind is AxisType.Manual else kind for kind in mesh.axis_types]
        mesh = AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=tuple(types))
    return MeshShardingHelper.from_mesh(mesh)

"""`sjit`, and the function that it returns, which behaves like a jitted function."""

from __future__ import annotations

import dataclasses
import functools
import operator
import types
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    ParamSpec,
    Self,
    TypedDict,
    TypeVar,
    overload,
)

import jax

from scalax._compile.call.call_key import Call, Shardings
from scalax._compile.call.placement import retype_leaves
from scalax._compile.call.resolve_arguments import OnMismatch, Options
from scalax._compile.call.signature import OMITTED, CallSignature
from scalax._compile.sjit.caller import generate_caller
from scalax._compile.sjit.dispatch import Dispatcher
from scalax._compile.sjit.program_table import Pipelines, Program
from scalax._core.context.active_helper import MeshOwner, checked_bindings, hashable
from scalax._core.util.lru_cache import LRUCache
from scalax._jax.tracing import as_struct, jit_options
from scalax._spmd.options import BatchPartitioning, checked_partitioning
from scalax._spmd.pipelines.config import Pipeline
from scalax._spmd.step import PartitionedStep
from scalax.errors import ArgumentError, did_you_mean, near_names
from scalax.rules._rule_tree import are_pure, cache_key, checked_rules

if TYPE_CHECKING:
    from scalax._spmd.report.explain import PropagationReport

Params = ParamSpec('Params')
OtherParams = ParamSpec('OtherParams')
Instance = TypeVar('Instance')
Result = TypeVar('Result')


class JitOptions(TypedDict, total=False):
    """The options of ``jax.jit`` that `sjit` passes on."""

    keep_unused: bool
    device: Any
    backend: str | None
    inline: Any
    compiler_options: Mapping[str, Any] | None


class SjitOptions(JitOptions, total=False):
    """The keyword-only options of `sjit`."""

    static_argnames: str | Iterable[str] | None
    donate_argnums: int | Iterable[int] | None
    donate_argnames: str | Iterable[str] | None
    batch_argnums: int | Iterable[int] | None
    batch_argnames: str | Iterable[str] | None
    on_mismatch: OnMismatch
    pipeline: Pipeline | None
    partitioning: BatchPartitioning | None


def reject_unknown_options(function_name: str, options: Iterable[str], option_names: Iterable[str]) -> None:
    """Raises ArgumentError about options that neither the function nor ``jax.jit`` has; names similar ones.

    Args:
        function_name: the name of the function that takes the options.
        options: the names of the options that it passes on to ``jax.jit``.
        option_names: the names of its other options.
    """
    # Options about arguments are never passed on to ``jax.jit``.
    about_arguments = {field.name for field in dataclasses.fields(Options)}
    names = dict.fromkeys([*option_names, *sorted(jit_options() - about_arguments)])
    if unknown := [option for option in options if option not in names]:
        hints = [did_you_mean(option, near_names(option, names)[:1] or names) for option in unknown]
        listed = ', '.join(f'{option!r} ({hint})' for option, hint in zip(unknown, hints, strict=True))
        raise ArgumentError(f'{function_name} has no option {listed}')


class SjitFunction(functools.partial[Result], Generic[Params, Result]):
    """A function made by `MeshShardingHelper.sjit`: called like the user's function, compiled for a mesh.

    It has the name, documentation and signature of the user's function, which is its ``__wrapped__``, and
    may be a method. Every method below takes the arguments of a call. Pickling stores the user's function,
    the helper and the options, as for functions of ``jax.jit``.
    """

    # A partial of the generated caller, because Python calls partials faster than any class with a
    # ``__call__``. Its attributes are slots, because libraries copy ``__dict__`` to functions that they
    # derive from this one.
    __slots__ = ('_definition', '_dispatcher')

    _definition: tuple[MeshOwner, Callable[..., Any], Mapping[str, Any]]  # the arguments of `sjit`
    _dispatcher: Dispatcher
    __name__: str
    __qualname__: str
    __wrapped__: Callable[Params, Result]

    if TYPE_CHECKING:  # at run time, the `__call__` of the partial is faster than a Python function

        def __call__(self, /, *args: Params.args, **kwargs: Params.kwargs) -> Result: ...

    @overload
    def __get__(self, instance: None, owner: Any = None) -> Self: ...
    # The first overload below is for methods. The second is for functions in attributes of a class, whose
    # first parameter is not an instance of the class.
    @overload
    def __get__(
        self: SjitFunction[Concatenate[Instance, OtherParams], Result], instance: Instance, owner: Any = None
    ) -> SjitFunction[OtherParams, Result]: ...
    @overload
    def __get__(self, instance: object, owner: Any = None) -> Self: ...
    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __repr__(self) -> str:
        return f'<SjitFunction of {self.__wrapped__!r}>'

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    def __reduce__(self) -> Any:
        helper, fun, options = self._definition
        return functools.partial(sjit, **options), (helper, fun)

    def lower(self, /, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """Lowers the function for a call, as ``jax.jit(...).lower`` does.

        Arguments may be arrays, ShapeDtypeStructs, types (``jax.typeof``), and other objects with a shape and
        a dtype.

        Returns:
            A ``jax.stages.Lowered``.
        """
        return self.trace(*args, **kwargs).lower()

    def trace(self, /, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        """Traces the function for a call, as ``jax.jit(...).trace`` does. Takes the arguments of `lower`."""
        flat_args = self._flatten(args, kwargs)
        program, entry, placed_args = self._dispatcher.prepare(flat_args)
        with self._dispatcher.args_placed:
            if len(args) == len(placed_args):  # later calls use the program that is compiled from this trace
                return program.jitted.trace(*placed_args)
            typed = Call(self._dispatcher.signature, placed_args)
            return _trace_as_user_call(program, typed, entry.argument_shardings, len(args), list(kwargs))

    def eval_shape(self, /, *args: Any, **kwargs: Any) -> Any:
        """Returns the outputs of a call as ``jax.ShapeDtypeStruct``, without running it."""
        program, _, placed_args = self._dispatcher.prepare(self._flatten(args, kwargs))
        with self._dispatcher.args_placed:
            return program.jitted.eval_shape(*placed_args)

    def explain_propagation(self, /, *args: Any, **kwargs: Any) -> PropagationReport:
        """Reports how a call is partitioned along its batch: every collective, with its reason.

        The call is not run. docs/partitioning.md describes the report.

        Example:
            >>> import jax.numpy as jnp
            >>> from scalax.sharding import FSDPShardingRule, MeshShardingHelper, PartitionSpec
            >>> helper = MeshShardingHelper([-1], ['fsdp'])
            >>> rules = FSDPShardingRule(min_fsdp_size=1), PartitionSpec('fsdp')
            >>> layer = helper.sjit(lambda w, x: jnp.tanh(x @ w), in_shardings=rules)
            >>> report = layer.explain_propagation(jnp.ones((8, 16)), jnp.ones((32, 8)))
            >>> [(row.kind, row.reason, row.array) for row in report.collectives]
            [('all_gather', 'weight w for dot_general', 'float32[8,16]')]
        """
        return self._dispatcher.explain_propagation(self._flatten(args, kwargs))

    def shardings_for(self, /, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], Any]:
        """Returns the shardings of the inputs and of the outputs of a call, without running it.

        Returns:
            A pair (inputs, outputs). The inputs are a tuple with one tree for each argument of the call that
            is not static, in the order of the parameters. Leaves are NamedShardings, or None where the
            compiler chooses the sharding.
        """
        flat_args = self._flatten(args, kwargs)
        _, entry, _ = self._dispatcher.prepare(flat_args)
        call = Call(self._dispatcher.signature, flat_args)
        inputs = tuple(
            call.treedefs[slot].unflatten(shardings)
            for slot, shardings in call.by_slot(entry.argument_shardings).items()
            if flat_args[slot] is not OMITTED
        )
        return inputs, entry.out_tree.unflatten(entry.output_shardings or ())

    def get_jitted_function_by_args(self, /, *args: Any, **kwargs: Any) -> Self:
        """Checks the arguments of a call and returns this function, which JAX accepts as a jitted one."""
        self._dispatcher.prepare(self._flatten(args, kwargs))
        return self

    def clear_cache(self) -> None:
        """Discards all traces and compiled programs."""
        for program in list(self._dispatcher.programs.values()):
            program.jitted.clear_cache()
        self._dispatcher.clear()

    def _flatten(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """Returns the flat arguments of a call that is not run.

        Objects with a shape and a dtype that are not arrays become structs.
        """
        flat_args = self._dispatcher.signature.flatten(args, kwargs)
        call = Call(self._dispatcher.signature, flat_args)
        leaves = [*map(as_struct, call.leaves)]
        if all(map(operator.is_, leaves, call.leaves)):
            return flat_args
        return tuple(call.with_leaves(leaves))


def sjit(
    helper: MeshOwner, fun: Callable[Params, Result], **option_fields: Any
) -> SjitFunction[Params, Result]:
    """Implements `MeshShardingHelper.sjit`. *option_fields* are the fields of `Options`."""
    options = Options(**option_fields)
    if not callable(fun):
        raise ArgumentError(
            f'sjit takes a function first, got {type(fun).__name__}: write '
            'helper.sjit(fun, in_shardings=...) or @helper.sjit(in_shardings=...)'
        )
    signature = CallSignature(
        fun,
        static=(options.static_argnums, options.static_argnames),
        donated=(options.donate_argnums, options.donate_argnames),
        batch=(options.batch_argnums, options.batch_argnames),
    )
    checked: dict[str, Any] = {}
    for option in ('in_shardings', 'args_sharding_constraint', 'out_shardings'):
        rules = getattr(options, option)
        if rules is not None:
            checked[option] = checked_rules(rules, f'{option} of {signature.name}')
            if option != 'out_shardings':
                signature.reject_unknown_names(rules, option)
    if options.on_mismatch not in ('error', 'reshard'):
        raise ArgumentError(f"on_mismatch is 'error' or 'reshard', got {options.on_mismatch!r}")
    if options.pipeline is not None and not isinstance(options.pipeline, Pipeline):
        raise ArgumentError(
            f"pipeline is Pipeline('stage', num_microbatches=8) or None, got {options.pipeline!r}"
        )
    checked_partitioning(options.partitioning)
    jax.jit(lambda: None, **options.jit_kwargs)  # raises about invalid options now rather than at a call
    checked['annotation_shardings'] = checked_bindings(options.annotation_shardings)
    # The checked rules are copies, because the caller may change lists and dicts of rules later, and other
    # functions may share the dispatcher.
    dispatcher = dispatcher_of(helper, fun, signature, dataclasses.replace(options, **checked))
    function: SjitFunction[Params, Result] = SjitFunction(
        copy_metadata(generate_caller(signature, dispatcher), fun, signature.name)
    )
    function._dispatcher, function._definition = dispatcher, (helper, fun, option_fields)
    copy_metadata(function, fun, signature.name)
    return function


def copy_metadata(call: Any, fun: Callable[..., Any], name: str) -> Any:
    """Gives a callable the name, documentation, signature and attributes of the user's function."""
    functools.update_wrapper(call, fun, updated=())
    if not hasattr(fun, '__name__'):
        call.__name__ = call.__qualname__ = name
    for attribute, value in getattr(fun, '__dict__', {}).items():
        # Methods such as ``lower``, which jax.jit puts there, belong to the user's function only.
        if not hasattr(SjitFunction, attribute):
            call.__dict__[attribute] = value
    call.__wrapped__ = fun
    return call


def helper_of(function: Any) -> MeshOwner | None:
    """Returns the helper that made an `SjitFunction`, or None for any other object."""
    return function._dispatcher.helper if isinstance(function, SjitFunction) else None


def call_of(function: SjitFunction[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    """Returns a call of a function as a `Call`."""
    return Call(function._dispatcher.signature, function._flatten(args, kwargs))


def argument_shardings(
    function: SjitFunction[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Shardings:
    """Returns the shardings that rules give the leaves of a call."""
    _, entry, _ = function._dispatcher.prepare(function._flatten(args, kwargs))
    return entry.argument_shardings


def with_options(
    function: SjitFunction[..., Any],
    helper: MeshOwner,
    transform: Callable[..., Any] | None = None,
    **options: Any,
) -> SjitFunction[..., Any]:
    """Returns an `SjitFunction` for another helper, with some other options.

    Args:
        function: the original function.
        helper: the helper.
        transform: maps the user's function to another function with the same parameters.
        options: the options of `sjit` that differ from the options of *function*.
    """
    _, fun, original_options = function._definition
    return sjit(helper, fun if transform is None else transform(fun), **{**original_options, **options})


def argument_names(function: Any, args: Sequence[Any]) -> list[str] | None:
    """Returns the names of the positional arguments that are not static.

    Returns None for any object but an `SjitFunction`.
    """
    if not isinstance(function, SjitFunction):
        return None
    signature = function._dispatcher.signature
    layout = signature.layout(max(len(args) - len(signature.positional), 0))
    return [layout.names[slot] for slot in layout.dynamic if slot < len(args)]


def pipelines_of(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Pipelines | None:
    """Returns the pipelines of a call, or None if it has none or the function is not an `SjitFunction`."""
    if not isinstance(function, SjitFunction):
        return None
    return function._dispatcher.prepare(function._flatten(args, kwargs))[1].pipelines


def partitioned_step(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> PartitionedStep | None:
    """Returns the partitioned step of a call.

    Returns None if the call is not partitioned, or the function is not an `SjitFunction`.
    """
    if not isinstance(function, SjitFunction):
        return None
    step = function._dispatcher.prepare(function._flatten(args, kwargs))[1].partitioned
    return None if isinstance(step, str) else step


_Dispatchers = LRUCache[Any, Dispatcher]
_dispatchers: weakref.WeakKeyDictionary[
    MeshOwner, weakref.WeakKeyDictionary[Callable[..., Any], _Dispatchers]
] = weakref.WeakKeyDictionary()


def dispatcher_of(
    helper: MeshOwner, fun: Callable[..., Any], signature: CallSignature, options: Options
) -> Dispatcher:
    """Returns the dispatcher of *fun* with these options, from a cache if it can be shared."""
    key = _dispatcher_key(fun, signature, options)
    if key is None:
        return Dispatcher(helper, fun, signature, options)
    functions = _dispatchers.setdefault(helper, weakref.WeakKeyDictionary())
    dispatchers = functions.setdefault(fun, LRUCache())
    return dispatchers.get(key) or dispatchers.add(key, Dispatcher(helper, fun, signature, options))


def _dispatcher_key(fun: Callable[..., Any], signature: CallSignature, options: Options) -> Any:
    """Returns the cache key of a function's dispatcher, or None if it cannot be shared."""
    function_type: Any = type(fun)
    if function_type.__eq__ is not object.__eq__ or not function_type.__weakrefoffset__:
        # The cache finds functions by equality. An equal function may close over other data, and may be freed
        # first.
        return None
    bindings = options.annotation_shardings
    rules = (options.in_shardings, options.out_shardings, options.args_sharding_constraint, bindings)
    if not are_pure(rules):
        return None  # each sjit function asks rules that are not pure
    key = (
        signature.key,
        hashable(cache_key(rules)),
        options.on_mismatch,
        options.pipeline,
        options.partitioning,
        tuple(sorted(options.jit_kwargs.items())),
    )
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _trace_as_user_call(
    program: Program, call: Call, shardings: Shardings, num_positional: int, names: Sequence[str]
) -> jax.stages.Traced:
    """Traces a program so that the compiled function takes arguments and keywords as the user wrote them.

    A program takes flat arguments. JAX does not support ``in_shardings`` for calls with keywords, so the
    arguments of the trace carry the shardings instead.

    Args:
        program: the program.
        call: the call.
        shardings: the shardings of the leaves of the call.
        num_positional: the number of arguments that the user passed by position.
        names: the names of the arguments that the user passed by keyword.
    """
    signature = call.signature

    def user_call(*args: Any, **keywords: Any) -> Any:
        return program.flat_function(*signature.flatten(args, keywords))

    user_call.__name__ = user_call.__qualname__ = signature.name
    user_call.__dict__['__signature__'] = signature.python_signature
    user_call.__dict__['__wrapped__'] = program.flat_function
    typed, leaves = list(call.flat_args), call.by_slot(call.leaves)
    for slot, slot_shardings in call.by_slot(shardings).items():
        targets = {
            i: sharding
            for i, (leaf, sharding) in enumerate(zip(leaves[slot], slot_shardings, strict=True))
            if sharding is not None and getattr(leaf, 'sharding', None) != sharding
        }
        if targets:
            typed[slot] = retype_leaves(typed[slot], targets)
    args, keywords, options = signature.as_user_call(program.layout, typed, num_positional, names)
    return jax.jit(user_call, **options, **program.options).trace(*args, **keywords)

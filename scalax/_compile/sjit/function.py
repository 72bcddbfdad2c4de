"""`sjit`, and what it returns: a function that behaves like a jitted one."""

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

Given = ParamSpec('Given')
Rest = ParamSpec('Rest')
Instance = TypeVar('Instance')
Result = TypeVar('Result')


class JitOptions(TypedDict, total=False):
    """The options of ``jax.jit`` that `sjit` hands on."""

    keep_unused: bool
    device: Any
    backend: str | None
    inline: Any
    compiler_options: Mapping[str, Any] | None


class SjitOptions(JitOptions, total=False):
    """The options of `sjit` that are given by name."""

    static_argnames: str | Iterable[str] | None
    donate_argnums: int | Iterable[int] | None
    donate_argnames: str | Iterable[str] | None
    batch_argnums: int | Iterable[int] | None
    batch_argnames: str | Iterable[str] | None
    on_mismatch: OnMismatch
    pipeline: Pipeline | None
    partitioning: BatchPartitioning | None


def reject_unknown_options(what: str, options: Iterable[str], known: Iterable[str]) -> None:
    """Raises ArgumentError about options that neither *what* nor ``jax.jit`` has, and names similar ones.

    Args:
        what: the function that takes the options.
        options: the names of further options, which *what* hands on to ``jax.jit``.
        known: the names of the options that *what* has itself.
    """
    # Options about arguments are not handed on: *what* has them itself, or refuses them.
    about_arguments = {field.name for field in dataclasses.fields(Options)}
    names = dict.fromkeys([*known, *sorted(jit_options() - about_arguments)])
    if unknown := [option for option in options if option not in names]:
        hints = [did_you_mean(option, near_names(option, names)[:1] or names) for option in unknown]
        listed = ', '.join(f'{option!r} ({hint})' for option, hint in zip(unknown, hints, strict=True))
        raise ArgumentError(f'{what} has no option {listed}')


class SjitFunction(functools.partial[Result], Generic[Given, Result]):
    """A function made by `MeshShardingHelper.sjit`: called like the user's, compiled for a mesh.

    It has the name, documentation and signature of the user's function, which is its ``__wrapped__``, and
    may be a method. Every method below takes the arguments of a call. It is pickled as ``jax.jit`` functions
    are: as the user's function, the helper and the options.
    """

    # A partial of the generated caller, because Python calls partials faster than any class with a
    # ``__call__``. Its own attributes are slots: libraries copy ``__dict__`` to the functions that they make
    # of this one.
    __slots__ = ('_dispatcher', '_given')

    _given: tuple[MeshOwner, Callable[..., Any], Mapping[str, Any]]
    _dispatcher: Dispatcher
    __name__: str
    __qualname__: str
    __wrapped__: Callable[Given, Result]

    if TYPE_CHECKING:  # at run time it is the partial's, because another one would cost more

        def __call__(self, /, *args: Given.args, **kwargs: Given.kwargs) -> Result: ...

    @overload
    def __get__(self, instance: None, owner: Any = None) -> Self: ...
    # A method; else an attribute that a class declares, whose first parameter is no instance of it.
    @overload
    def __get__(
        self: SjitFunction[Concatenate[Instance, Rest], Result], instance: Instance, owner: Any = None
    ) -> SjitFunction[Rest, Result]: ...
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
        helper, fun, options = self._given
        return functools.partial(sjit, **options), (helper, fun)

    def lower(self, /, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """``jax.jit(...).lower``: arrays, ShapeDtypeStructs, types (``jax.typeof``) and other objects with a
        shape and a dtype in.

        Returns:
            A ``jax.stages.Lowered``.
        """
        return self.trace(*args, **kwargs).lower()

    def trace(self, /, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        """``jax.jit(...).trace``: ``jax.stages.Traced`` out."""
        flat_args = self._flatten(args, kwargs)
        program, entry, placed = self._dispatcher.prepare(flat_args)
        with self._dispatcher.args_placed:
            if len(args) == len(placed):  # calls find what is compiled of this
                return program.jitted.trace(*placed)
            typed = Call(self._dispatcher.signature, placed)
            return _trace_as_called(program, typed, entry.argument_shardings, len(args), list(kwargs))

    def eval_shape(self, /, *args: Any, **kwargs: Any) -> Any:
        """The outputs as ``jax.ShapeDtypeStruct``; nothing is computed."""
        program, _, placed = self._dispatcher.prepare(self._flatten(args, kwargs))
        with self._dispatcher.args_placed:
            return program.jitted.eval_shape(*placed)

    def explain_propagation(self, /, *args: Any, **kwargs: Any) -> PropagationReport:
        """How a call is partitioned along the mesh axes of its batch: every collective, and its reason.

        docs/partitioning.md describes the report.

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
        """The shardings of a call without running it: (inputs, outputs).

        The inputs are one tree for each argument given that is not static, in the order of the
        parameters; leaves are NamedShardings, or None where the compiler decides.
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
        """This function, after a check of the arguments; JAX takes it as one of ``jax.jit``."""
        self._dispatcher.prepare(self._flatten(args, kwargs))
        return self

    def clear_cache(self) -> None:
        """Forgets everything traced and compiled."""
        for program in list(self._dispatcher.programs.values()):
            program.jitted.clear_cache()
        self._dispatcher.clear()

    def _flatten(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """The slots of a call that is not run, with structs for objects that have a shape and a dtype."""
        flat_args = self._dispatcher.signature.flatten(args, kwargs)
        call = Call(self._dispatcher.signature, flat_args)
        leaves = [*map(as_struct, call.leaves)]
        if all(map(operator.is_, leaves, call.leaves)):
            return flat_args
        return tuple(call.with_leaves(leaves))


def sjit(helper: MeshOwner, fun: Callable[Given, Result], **given: Any) -> SjitFunction[Given, Result]:
    """Compiles a function with shardings that rules give; *given* are the fields of `Options`."""
    options = Options(**given)
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
    own: dict[str, Any] = {}
    for what in ('in_shardings', 'args_sharding_constraint', 'out_shardings'):
        rules = getattr(options, what)
        if rules is not None:
            own[what] = checked_rules(rules, f'{what} of {signature.name}')
            if what != 'out_shardings':
                signature.reject_unknown_names(rules, what)
    if options.on_mismatch not in ('error', 'reshard'):
        raise ArgumentError(f"on_mismatch is 'error' or 'reshard', got {options.on_mismatch!r}")
    if options.pipeline is not None and not isinstance(options.pipeline, Pipeline):
        raise ArgumentError(
            f"pipeline is Pipeline('stage', num_microbatches=8) or None, got {options.pipeline!r}"
        )
    checked_partitioning(options.partitioning)
    jax.jit(lambda: None, **options.jit_kwargs)  # raises about wrong options here, and not at a call
    own['annotation_shardings'] = checked_bindings(options.annotation_shardings)
    # The caller may change lists and dicts of rules later, and others may share this state.
    dispatcher = dispatcher_of(helper, fun, signature, dataclasses.replace(options, **own))
    function: SjitFunction[Given, Result] = SjitFunction(
        copy_metadata(generate_caller(signature, dispatcher), fun, signature.name)
    )
    function._dispatcher, function._given = dispatcher, (helper, fun, given)
    copy_metadata(function, fun, signature.name)
    return function


def copy_metadata(call: Any, fun: Callable[..., Any], name: str) -> Any:
    """Gives a callable the name, documentation, signature and attributes of the user's function."""
    functools.update_wrapper(call, fun, updated=())
    if not hasattr(fun, '__name__'):
        call.__name__ = call.__qualname__ = name
    for attribute, value in getattr(fun, '__dict__', {}).items():
        # Methods that sjit, jax.jit and others put there belong to their function, and not to this one.
        if not hasattr(SjitFunction, attribute):
            call.__dict__[attribute] = value
    call.__wrapped__ = fun
    return call


def helper_of(function: Any) -> MeshOwner | None:
    """The helper that made an `SjitFunction`; None for anything else."""
    return function._dispatcher.helper if isinstance(function, SjitFunction) else None


def call_of(function: SjitFunction[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    """A call of a function, with its leaves."""
    return Call(function._dispatcher.signature, function._flatten(args, kwargs))


def argument_shardings(
    function: SjitFunction[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Shardings:
    """The shardings that rules give the leaves of a call."""
    _, entry, _ = function._dispatcher.prepare(function._flatten(args, kwargs))
    return entry.argument_shardings


def with_options(
    function: SjitFunction[..., Any],
    helper: MeshOwner,
    change: Callable[..., Any] | None = None,
    **options: Any,
) -> SjitFunction[..., Any]:
    """The user's function of an `SjitFunction`, or a function in its place, with some other options.

    Args:
        function: the function.
        helper: the helper.
        change: from the user's function to one with the same parameters.
        options: options of `sjit` in place of those that *function* was made with.
    """
    _, fun, given = function._given
    return sjit(helper, fun if change is None else change(fun), **{**given, **options})


def argument_names(function: Any, args: Sequence[Any]) -> list[str] | None:
    """The names of the positional arguments that are not static; None for anything but an `SjitFunction`."""
    if not isinstance(function, SjitFunction):
        return None
    signature = function._dispatcher.signature
    layout = signature.layout(max(len(args) - len(signature.positional), 0))
    return [layout.names[slot] for slot in layout.dynamic if slot < len(args)]


def pipelines_of(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Pipelines | None:
    """The pipelines of a call; None without, and for anything but an `SjitFunction`."""
    if not isinstance(function, SjitFunction):
        return None
    return function._dispatcher.prepare(function._flatten(args, kwargs))[1].pipelines


def partitioned_step(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> PartitionedStep | None:
    """The step on blocks of a call; None if it is not partitioned, and for anything but an `SjitFunction`."""
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
    """The state of *fun* with these options: a known one where it can be shared, or a new one."""
    key = _key(fun, signature, options)
    if key is None:
        return Dispatcher(helper, fun, signature, options)
    functions = _dispatchers.setdefault(helper, weakref.WeakKeyDictionary())
    kept = functions.setdefault(fun, LRUCache())
    return kept.get(key) or kept.add(key, Dispatcher(helper, fun, signature, options))


def _key(fun: Callable[..., Any], signature: CallSignature, options: Options) -> Any:
    """The cache key of the state of one function; None if it cannot be shared."""
    kind: Any = type(fun)
    if kind.__eq__ is not object.__eq__ or not kind.__weakrefoffset__:
        return None  # found by equality, and an equal function may close over other data and be freed first
    bindings = options.annotation_shardings
    rules = (options.in_shardings, options.out_shardings, options.args_sharding_constraint, bindings)
    if not are_pure(rules):
        return None  # rules that are not pure are asked anew by each sjit
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


def _trace_as_called(
    program: Program, call: Call, shardings: Shardings, count: int, names: Sequence[str]
) -> jax.stages.Traced:
    """Traces a program so that JAX's stages take arguments and keywords as the user writes them.

    A program takes flat arguments. JAX takes no ``in_shardings`` where there are keywords, so its arguments
    have shardings themselves.

    Args:
        program: the program.
        call: the call.
        shardings: those of the leaves of the call.
        count: how many arguments were given by position.
        names: which were given by name.
    """
    signature = call.signature

    def as_called(*args: Any, **keywords: Any) -> Any:
        return program.flat_function(*signature.flatten(args, keywords))

    as_called.__name__ = as_called.__qualname__ = signature.name
    as_called.__dict__['__signature__'] = signature.python_signature
    as_called.__dict__['__wrapped__'] = program.flat_function
    typed, leaves = list(call.flat_args), call.by_slot(call.leaves)
    for slot, each in call.by_slot(shardings).items():
        pairs = enumerate(zip(leaves[slot], each, strict=True))
        found = {i: to for i, (leaf, to) in pairs if to is not None and getattr(leaf, 'sharding', None) != to}
        if found:
            typed[slot] = retype_leaves(typed[slot], found)
    args, keywords, options = signature.as_user_call(program.layout, typed, count, names)
    return jax.jit(as_called, **options, **program.options).trace(*args, **keywords)

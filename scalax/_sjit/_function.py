"""What does sjit return? A function that behaves like a jitted one, with questions to ask it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, cast

import jax
from jax.sharding import AbstractMesh

from scalax._context import MeshOwner, checked_bindings
from scalax._prefix import RuleLike, check
from scalax._sjit._aot import LoweredCall
from scalax._sjit._boundary import OnMismatch, Options
from scalax._sjit._caller import dressed, generate_caller
from scalax._sjit._convention import OMITTED, Convention, name_of
from scalax._sjit._program import held
from scalax._sjit._signature import slot_path
from scalax._sjit._state import State
from scalax.errors import ArgumentError, MeshError, did_you_mean


class SjitFunction(Protocol):
    """A function made by `MeshShardingHelper.sjit`: called like the user's, compiled for a mesh.

    It is a real Python function with the user's name, documentation and signature, so it may be a method
    and can be pickled by name. Every method below takes the arguments of a call.
    """

    __wrapped__: Callable[..., Any]
    __name__: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the compiled function."""

    def lower(self, /, *args: Any, **kwargs: Any) -> Any:
        """``jax.jit(...).lower``: arrays or ShapeDtypeStructs in, ``jax.stages.Lowered`` out."""

    def trace(self, /, *args: Any, **kwargs: Any) -> Any:
        """``jax.jit(...).trace``: ``jax.stages.Traced`` out."""

    def eval_shape(self, /, *args: Any, **kwargs: Any) -> Any:
        """The outputs as ``jax.ShapeDtypeStruct``; nothing is computed."""

    def shardings_for(self, /, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], Any]:
        """The shardings of a call without running it: (inputs, outputs).

        The inputs are one tree for each argument given that is not static, in the order of the
        parameters; leaves are NamedShardings, or None where the compiler decides.
        """

    def get_jitted_function_by_args(self, /, *args: Any, **kwargs: Any) -> Any:
        """The ``jax.jit`` function that serves a call; it takes the arguments in the same way."""

    def clear_cache(self) -> None:
        """Forgets everything traced and compiled."""


def sjit(
    helper: MeshOwner,
    fun: Callable[..., Any],
    *,
    in_shardings: RuleLike = None,
    out_shardings: RuleLike = None,
    static_argnums: int | Iterable[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    donate_argnums: int | Iterable[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
    args_sharding_constraint: RuleLike = None,
    annotation_shardings: Mapping[str, RuleLike] | None = None,
    on_mismatch: OnMismatch = 'error',
    jit_kwargs: Mapping[str, Any],
) -> SjitFunction:
    """See `MeshShardingHelper.sjit`, which is documented for users."""
    if not callable(fun):
        raise ArgumentError(
            f'sjit takes a function first, got {type(fun).__name__}: write '
            'helper.sjit(fun, in_shardings=...) or @helper.sjit(in_shardings=...)'
        )
    if inspect.isgeneratorfunction(fun):
        raise ArgumentError(
            f'sjit takes a function that returns arrays, and {name_of(fun)} is a generator function: it has '
            'a yield in it. Return a list of what it yields, or compile what happens between two yields'
        )
    convention = Convention(fun, static_argnums, static_argnames, donate_argnums, donate_argnames)
    by_argument = {'in_shardings': in_shardings, 'args_sharding_constraint': args_sharding_constraint}
    for what, rules in {**by_argument, 'out_shardings': out_shardings}.items():
        check(rules, f'{what} of {convention.name}')
    for what, rules in by_argument.items():
        convention.check_names(rules, what)
    if on_mismatch not in ('error', 'reshard'):
        raise ArgumentError(f"on_mismatch is 'error' or 'reshard', got {on_mismatch!r}")
    options = Options(
        in_shardings,
        out_shardings,
        args_sharding_constraint,
        checked_bindings(annotation_shardings),
        on_mismatch,
        _checked_jit_kwargs(jit_kwargs),
    )
    state = State(helper, fun, convention, options)
    call = dressed(generate_caller(convention, state), fun, convention.name)
    methods = _Methods(state)
    for name in (
        'lower',
        'trace',
        'eval_shape',
        'shardings_for',
        'get_jitted_function_by_args',
        'clear_cache',
    ):
        setattr(call, name, getattr(methods, name))
    return cast(SjitFunction, call)


def owner_of(function: Any) -> MeshOwner | None:
    """The helper that made an `SjitFunction`; None for anything else."""
    methods = getattr(getattr(function, 'lower', None), '__self__', None)
    return methods.owner if isinstance(methods, _Methods) else None


def names_of_arguments(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[str | None] | None:
    """What messages call the arguments of a call that are no static ones; None if it is no `SjitFunction`.

    Extra keywords are one argument, whose name is None.
    """
    methods = getattr(getattr(function, 'lower', None), '__self__', None)
    return methods.names(args, kwargs) if isinstance(methods, _Methods) else None


class _Methods:
    """What an `SjitFunction` can do besides being called."""

    def __init__(self, state: State) -> None:
        self._state = state
        self.owner = state.helper

    def names(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str | None]:
        convention = self._state.convention
        layout = convention.layout(convention.extras_of(convention.row(args, kwargs)))
        return [slot_path(layout, slot) for slot in layout.dynamic]

    def lower(self, /, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self._state.helper.mesh, AbstractMesh):
            raise MeshError(
                'lower() needs devices, and this helper was made from an AbstractMesh: '
                "use .trace(...).lower(lowering_platforms=('tpu',))"
            )
        resolved, row = self._state.resolve(self._state.convention.row(args, kwargs))
        lowered = resolved.program.jitted.lower(*row)
        # What has no defaults and no keywords is called by the row of slots anyhow.
        return (
            lowered if not kwargs and len(row) == len(args) else LoweredCall(lowered, self._state.convention)
        )

    def trace(self, /, *args: Any, **kwargs: Any) -> Any:
        resolved, row = self._state.resolve(self._state.convention.row(args, kwargs))
        return resolved.program.jitted.trace(*row)

    def eval_shape(self, /, *args: Any, **kwargs: Any) -> Any:
        resolved, row = self._state.resolve(self._state.convention.row(args, kwargs))
        return resolved.program.jitted.eval_shape(*row)

    def shardings_for(self, /, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], Any]:
        resolved, row = self._state.resolve(self._state.convention.row(args, kwargs))
        inside = resolved.inside
        inputs = tuple(
            held(jax.tree.structure(row[slot]), shardings, 'they cannot be shown in place')
            for slot, shardings in inside.arguments.items()
            if row[slot] is not OMITTED
        )
        return inputs, held(resolved.out_tree, inside.outputs or (), 'they cannot be shown in place')

    def get_jitted_function_by_args(self, /, *args: Any, **kwargs: Any) -> Any:
        convention = self._state.convention
        row = convention.row(args, kwargs)
        resolved, _ = self._state.resolve(row)
        jitted = resolved.program.jitted
        if not kwargs:
            return jitted if len(row) == len(args) else resolved.program.of_first(len(args), row[len(args) :])

        @functools.wraps(self._state.fun)
        def by_convention(*args: Any, **kwargs: Any) -> Any:
            return jitted(*convention.row(args, kwargs))

        for name in ('lower', 'trace', 'eval_shape'):
            setattr(by_convention, name, _by_row(getattr(jitted, name), convention))
        return by_convention

    def clear_cache(self) -> None:
        for _, program in self._state.programs.items():
            if program.jitted is not None:
                program.jitted.clear_cache()
        self._state.clear()


def _by_row(method: Callable[..., Any], convention: Convention) -> Callable[..., Any]:
    return lambda *args, **kwargs: method(*convention.row(args, kwargs))


def _checked_jit_kwargs(jit_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    known = list(inspect.signature(jax.jit).parameters)
    for name in jit_kwargs:
        if name not in known:
            raise ArgumentError(
                f'sjit got an option {name!r} that neither it nor jax.jit has '
                f'({did_you_mean(name, [*known, "annotation_shardings", "on_mismatch"])})'
            )
    if jit_kwargs:
        jax.jit(lambda: None, **jit_kwargs)  # what is wrong with a value is said here, and not at a call
    return dict(jit_kwargs)

"""The dispatch of a call: finds or makes the program that serves it.

A call takes these stages. The next call of the same kind takes the first alone.

1. The generated caller (`caller`) tries `Dispatcher.fast_call`, and dispatches where there is none.
2. `Dispatcher.dispatch` decides where the call runs: in a program, inline, or without ``jax.jit``.
3. `Dispatcher._read` asks the rules for the shardings of the arguments, and makes the `CallKey`.
4. `Dispatcher._resolve` looks the key up, and goes on to 5 and 6 if it is new.
5. `Dispatcher._trace` traces the user's function, which gives the jaxpr and the shardings of the outputs.
6. `Dispatcher._program_of` finds the program of these shardings, or makes it (`Program.compile`).
7. `Dispatcher._placed` moves arguments to where the rules want them.
8. `Dispatcher._run` calls the program, and explains what it refuses.

Where the program that was tried raises, `Dispatcher.explain_or_retry` either raises an error that says why,
or lets the caller dispatch.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import threading
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AxisType

from scalax._mesh import meshes
from scalax._trace import constraints, contexts
from scalax._transforms.calls import placement, placement_errors
from scalax._transforms.calls.argument_shardings import ArgumentShardings, Options
from scalax._transforms.calls.call_key import CallKey, call_key
from scalax._transforms.calls.call_signature import CallLayout, CallSignature
from scalax._transforms.calls.placement import Shardings
from scalax._transforms.sjit.program import Program, ProgramTable, ShardingKey, WrongProgram, compress
from scalax._transforms.sjit.trace import TracedFunction, TraceShardings
from scalax._transforms.tracebacks import arose_below, hide_ours
from scalax._util.lru_cache import LRUCache


@dataclasses.dataclass(eq=False)
class Resolved:
    """One call key with its program.

    Attributes:
        program: the program that serves it.
        shardings: the shardings of its arguments and outputs.
        out_tree: the structure of the outputs.
        outputs_checked: whether a call has looked at where the outputs are.
    """

    program: Program
    shardings: TraceShardings
    out_tree: Any
    outputs_checked: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """One call, as the rules see it.

    Attributes:
        flat_args: the arguments, slot by slot.
        layout: the slots.
        arguments: the shardings of the arguments, by slot and leaf.
        typed_args: the arguments as they will be where the rules want them: structs for what moves;
            *flat_args* itself if nothing does.
        key: the key of the call with *typed_args*.
    """

    flat_args: Sequence[Any]
    layout: CallLayout
    arguments: Mapping[int, Shardings]
    typed_args: Sequence[Any]
    key: CallKey


@dataclasses.dataclass(eq=False)
class _Turn:
    """The right to trace one call key.

    The lock is re-entrant, so that a function that calls itself is told so. Two threads wait for one another
    only if what they trace calls itself by way of the other's, which no single thread could trace either.
    """

    lock: Any = dataclasses.field(default_factory=threading.RLock)
    taken: bool = False


class Dispatcher:
    """Finds or makes the program of each call. Safe to use from many threads.

    Threads that meet a new call key together trace the user's code once, as under ``jax.jit``: one does, and
    the others wait for it. What other keys need is held up by nobody.

    The helper and the user's function are held weakly, because this may live as long as they do
    (`dispatcher_of`): whoever calls holds them.

    Attributes:
        fast_call: what calls try first: the only program, or a `ProgramTable`; None before the first call.
    """

    fast_call: Callable[..., Any] | None

    def __init__(
        self,
        helper: contexts.MeshOwner,
        fun: Callable[..., Any],
        signature: CallSignature,
        options: Options,
    ) -> None:
        self.signature, self.options = signature, options
        self.rules = ArgumentShardings(helper, signature, options)
        self.mesh = self.rules.mesh
        self.function = TracedFunction(fun, self.rules)
        self._source = _source_of(fun)
        # Over types of another mesh with Explicit axes JAX ignores shardings, inside of another function.
        self._refuses_foreign = (
            self.rules.any_explicit or self.rules.any_rule or options.out_shardings is not None
        )
        self._placing = _Placing()
        # What is kept here, and refers to this in turn, does so by this: a function that nobody holds any
        # longer goes at once, with the arrays that it closes over.
        self._weak: Dispatcher = weakref.proxy(self)
        self.clear()

    @property
    def helper(self) -> contexts.MeshOwner:
        """Whose mesh it is."""
        return self.rules.helper

    def clear(self) -> None:
        """Forgets every program."""
        this = self._weak
        self.resolved: LRUCache[CallKey, Resolved] = LRUCache()
        self.programs: LRUCache[ShardingKey, Program] = LRUCache()
        self._arguments: LRUCache[CallKey, Mapping[int, Shardings]] = LRUCache()
        self._turns: LRUCache[CallKey, _Turn] = LRUCache()
        self._inlined: dict[CallLayout, Any] = {}
        self._table = ProgramTable(lambda flat_args: this._known(flat_args), lambda: this._wrong_program())
        self.function.forget()
        self.fast_call = None

    # What the generated caller runs -----------------------------------------------------------------

    def dispatch(self, flat_args: tuple[Any, ...]) -> Any:
        """Serves a call for which no program is known, or that the one tried cannot serve."""
        try:
            return self._dispatch(flat_args)
        except Exception as error:
            if _arose_inside(error):
                hide_ours(error)
            raise

    def _dispatch(self, flat_args: tuple[Any, ...]) -> Any:
        layout = self.signature.layout_of(flat_args)
        if self._runs_inline():
            return self._inline(layout, flat_args)
        if self._retyped_at_once():
            return self._inline_compiled(layout)(*flat_args)
        meshes.require_devices(self.mesh, f'a call of {self.signature.name}')
        placement_errors.reject_deleted(self.signature, layout, flat_args)
        call = self._read(flat_args)
        if jax.config.jax_disable_jit:  # the user's lines run with values, and nothing is traced
            return self.function.run(call.key, layout, flat_args, self._shardings_in(call))[0]
        resolved = self._resolve(call)
        placed_args = self._placed(call, placement.moved)
        moves = self._moves(mismatched=False)
        if call.typed_args is not flat_args and (moves.unplaced or moves.foreign):
            slots = placement.slots_to_place(flat_args, call.arguments, moves)
            resolved.program.place_first(slots, moves)
        self._table.learn(layout, flat_args, resolved.program)
        self.fast_call = self._table if len(self.programs.items()) > 1 else resolved.program.call
        return self._run(call, resolved, placed_args)

    def explain_or_retry(self, error: Exception, fast_call: Any, flat_args: tuple[Any, ...]) -> bool:
        """Whether *error* only means that *fast_call* cannot serve this call, and `dispatch` may.

        Raises:
            ScalaxError: nothing can serve the call, and we can say better why.
        """
        if isinstance(error, WrongProgram):
            return error.owner is self
        if _arose_inside(error):
            hide_ours(error)
            return False  # it comes from the user's code, or says what is wrong with the call
        if self._runs_inline():
            return True
        refusal = isinstance(error, ValueError)  # how JAX says what it does not take
        if refusal:
            placement_errors.reject_other_devices(self.signature.name, self.mesh)
        call = self._read(flat_args)
        # A run that failed has used up what was donated to it; of what was deleted before JAX says the same
        # again.
        if placement_errors.any_deleted(flat_args) and _fails_alike(error, fast_call, flat_args):
            placement_errors.reject_deleted(self.signature, call.layout, flat_args)
        if refusal:
            self._reject_elsewhere(call)
        known = self.resolved.get(call.key)
        program = fast_call.program(flat_args) if isinstance(fast_call, ProgramTable) else None
        used = program.call if program else fast_call
        if known is None or known.program.call is not used:
            return not isinstance(error, jax.errors.JaxRuntimeError)  # JAX refused the call before tracing it
        if self.options.on_mismatch == 'error':
            self._reject_mismatched(call)
            if refusal:
                placement_errors.reject_refused(self.signature, call.layout, flat_args, call.arguments)
        elif placement_errors.any_mismatched(flat_args, call.arguments) or (
            refusal and placement_errors.any_refused(flat_args, call.arguments)
        ):
            return True
        placement_errors.reject_donated_twice(self.signature, call.layout, flat_args, error)
        return False

    # Reading a call, and finding its program ---------------------------------------------------------

    def resolve(self, flat_args: Sequence[Any]) -> tuple[Resolved, Sequence[Any]]:
        """The program of a call that is not run, and the call's arguments as they would be placed.

        Raises:
            ShardingError, StructureError: the rules do not fit the arguments or the outputs.
            PlacementError: an argument is committed to another sharding.
        """
        try:
            call = self._read(flat_args)
            return self._resolve(call), self._placed(call, placement.as_moved)
        except Exception as error:
            if _arose_inside(error):
                hide_ours(error)
            raise

    def _read(self, flat_args: Sequence[Any]) -> Call:
        """Reads a call.

        Raises:
            ArgumentError: leaves that are not arrays, a static value that cannot be hashed, or options that
                name arguments which the call does not have.
            ShardingError, StructureError: the rules do not fit the arguments.
        """
        self.signature.reject_misnamed(flat_args)
        layout = self.signature.layout_of(flat_args)
        key = call_key(self.signature, layout, flat_args)
        arguments = self._arguments.get(key)
        if arguments is None:
            arguments = self.rules.arguments(layout, flat_args)
            self._arguments.put(key, arguments)
        if self._refuses_foreign:
            # JAX reshards to another mesh where all axes are Explicit.
            movable = AxisType.Auto not in self.mesh.axis_types
            placement_errors.reject_foreign_types(
                self.signature, layout, flat_args, self.mesh, movable=movable
            )
        typed_args = placement.place(flat_args, arguments, self._moves(), placement.as_moved)
        if typed_args is not flat_args:
            # Types may hold shardings: what counts is what they will be.
            key = call_key(self.signature, layout, typed_args)
        return Call(flat_args, layout, arguments, typed_args, key)

    def _resolve(self, call: Call) -> Resolved:
        if self.options.on_mismatch == 'error':
            self._reject_mismatched(call)
        known = self.resolved.get(call.key)
        if known is not None:
            return known
        # Traced with what the arguments will be: nothing moves before all rules are known to fit.
        with self._placing:
            return self._new(call)

    def _known(self, flat_args: Sequence[Any]) -> Program | None:
        """The program of a call, if one is known."""
        resolved = self.resolved.get(self._read(flat_args).key)
        return None if resolved is None else resolved.program

    def _new(self, call: Call) -> Resolved:
        """Resolves a call key that is new, or waits for the thread that does."""
        turn = self._turns.add(call.key, _Turn())
        with turn.lock:
            known = self.resolved.get(call.key)
            if known is not None:
                return known
            if turn.taken:
                raise RecursionError(
                    f'{self.signature.name} calls itself with arguments of the same shapes and dtypes'
                )
            turn.taken = True
            try:
                traced, program, shardings = self._trace(call)
            finally:
                turn.taken = False
            program = self._program_of(call, program, traced.out_tree, shardings)
            self.function.warn_unused(call.layout)
            return self.resolved.add(call.key, Resolved(program, shardings, traced.out_tree))

    def _trace(self, call: Call) -> tuple[jax.stages.Traced, Program, TraceShardings]:
        """Traces the user's function; in a program of its own, which is not compiled yet."""
        program = self._new_program(call.layout)
        program.shardings.put(call.key, self._shardings_in(call))
        # The same function object as in the program: JAX finds this trace again there.
        jitted = jax.jit(program.flat_function, static_argnums=call.layout.static)
        traced = self.function.trace(call.key, jitted, call.typed_args)
        shardings = program.shardings.get(call.key)
        assert shardings is not None
        return traced, program, shardings

    def _shardings_in(self, call: Call) -> TraceShardings:
        return TraceShardings(call.arguments, self.rules.constraints(call.layout, call.typed_args))

    def _program_of(self, call: Call, traced: Program, out_tree: Any, shardings: TraceShardings) -> Program:
        """The program that has these shardings: one that is there, or the one that was *traced*."""
        assert shardings.outputs is not None
        arguments = tuple(
            compress(jax.tree.structure(call.typed_args[slot]), call.arguments[slot])
            for slot in call.layout.dynamic
        )
        checked = call.key.paths is not None
        sharding_key = ShardingKey(call.layout, arguments, compress(out_tree, shardings.outputs), checked)
        program = self.programs.get(sharding_key)
        if program is None:
            kwargs = self.options.jit_kwargs
            if self.rules.any_explicit and sharding_key.outputs is None:
                # Outputs may depend on no argument, and JAX would drop what says on which devices to run.
                kwargs = {'keep_unused': True, **kwargs}
            traced.compile(sharding_key, self.signature, self.mesh.size, kwargs)
            program = self.programs.add(sharding_key, traced)
        if call.key.paths is not None:
            this = self._weak
            program.check_paths(call.key.paths, lambda: this._wrong_program())
        # What was found serves, whatever another thread has cleared since: this one may not be compiled.
        program.shardings.put(call.key, shardings)
        return program

    # Placing arguments, and running the program ------------------------------------------------------

    def _moves(self, mismatched: bool | None = None) -> placement.Moves:
        """Which arguments are moved at a call; *mismatched* by the option of the user."""
        # On Explicit axes types say how arrays are placed. Under a jax.set_mesh of other types only what is
        # placed finds its trace again. Elsewhere jax.jit places them.
        ambient = jax.sharding.get_abstract_mesh()
        unplaced = self.rules.any_explicit or constraints.has_other_types(ambient, self.mesh)
        if mismatched is None:
            mismatched = self.options.on_mismatch == 'reshard'
        foreign = self._refuses_foreign and not self.rules.any_explicit
        return placement.Moves(unplaced, mismatched, foreign)

    def _placed(self, call: Call, move: placement.Move) -> Sequence[Any]:
        if call.typed_args is call.flat_args:
            return call.flat_args
        return placement.place(call.flat_args, call.arguments, self._moves(), move)

    def _run(self, call: Call, resolved: Resolved, placed_args: Sequence[Any]) -> Any:
        program = resolved.program
        assert program.call is not None  # a resolved call has a compiled program
        with self._placing:
            try:
                outputs = program.call(*placed_args)
            except (ValueError, jax.errors.JaxRuntimeError) as error:
                if not _arose_inside(error):
                    self._explain(error, call)
                raise
        if not resolved.outputs_checked:
            resolved.outputs_checked = True
            placement_errors.warn_left_alone(self.signature, call.flat_args, call.arguments, outputs)
        return outputs

    def _explain(self, error: Exception, call: Call) -> None:
        """Raises a better error where the right program has refused a call."""
        if isinstance(error, ValueError):
            placement_errors.reject_other_devices(self.signature.name, self.mesh)
            self._reject_elsewhere(call)
            if self.options.on_mismatch == 'error':
                placement_errors.reject_refused(self.signature, call.layout, call.flat_args, call.arguments)
        placement_errors.reject_donated_twice(self.signature, call.layout, call.flat_args, error)

    def _reject_mismatched(self, call: Call) -> None:
        placement_errors.reject_mismatched(
            self.signature,
            call.layout,
            call.flat_args,
            call.arguments,
            self.rules.any_rule,
            returned=self.options.out_shardings is None and bool(self.resolved.items()),
        )

    def _reject_elsewhere(self, call: Call) -> None:
        placement_errors.reject_elsewhere(
            self.signature, call.layout, call.flat_args, call.arguments, self.mesh
        )

    # Calls that have no program ----------------------------------------------------------------------

    def _runs_inline(self) -> bool:
        """Whether a call is part of a function that has mesh axes of other types than the helper's.

        Inside `auto_axes` and `explicit_axes`, and inside shard_map, where shapes are local, too.
        """
        return _inside_manual_region() or constraints.mesh_in_force(self.mesh) is not self.mesh

    def _retyped_at_once(self) -> bool:
        """Whether JAX's own auto_axes or explicit_axes, which nothing compiles, runs this.

        Then axes have other types than those of a ``jax.set_mesh``.
        """
        ambient = jax.sharding.get_abstract_mesh()
        return (
            constraints.has_other_types(ambient, self.mesh)
            and jax.sharding.get_mesh().abstract_mesh != ambient
        )

    def _inline_compiled(self, layout: CallLayout) -> Any:
        """`_inline`, in a program of its own."""
        this = self._weak

        def inline(*flat_args: Any) -> Any:
            return this._inline(layout, flat_args)

        inline.__name__ = inline.__qualname__ = self.signature.name
        compiled = jax.jit(inline, static_argnums=layout.static)
        return self._inlined.setdefault(layout, compiled)

    def _inline(self, layout: CallLayout, flat_args: Sequence[Any]) -> Any:
        """Runs the user's function where it is called, by the types that mesh axes have there."""
        key = call_key(self.signature, layout, flat_args)
        if _inside_manual_region():
            return self.function.run_inline(key, layout, flat_args)
        mesh = constraints.mesh_in_force(self.mesh)
        rules = ArgumentShardings(self.helper, self.signature, self.options, mesh)
        arguments, sharded = rules.arguments(layout, flat_args), list(flat_args)
        for asked in (arguments, rules.constraints(layout, flat_args)):
            for slot, shardings in asked.items():
                sharded[slot] = constraints.apply_shardings(sharded[slot], shardings)
        outputs = self.function.run_inline(key, layout, sharded)
        return constraints.apply_shardings(outputs, rules.outputs(outputs, layout, flat_args, arguments))

    # What JAX traces of a program --------------------------------------------------------------------

    def _new_program(self, layout: CallLayout) -> Program:
        this, shardings = self._weak, LRUCache[CallKey, TraceShardings]()

        def flat_function(*flat_args: Any) -> Any:
            return this._in_trace(shardings, layout, flat_args)

        flat_function.__name__ = flat_function.__qualname__ = self.signature.name
        flat_function.__dict__['__signature__'] = self.signature.flat_signature(layout)
        flat_function.__dict__['__wrapped__'] = self._source  # where JAX's messages point
        return Program(layout, flat_function, shardings)

    def _in_trace(
        self, mine: LRUCache[CallKey, TraceShardings], layout: CallLayout, flat_args: Sequence[Any]
    ) -> Any:
        """The user's function, if a call is one for the program whose call keys are *mine*.

        Raises:
            WrongProgram: it is not.
        """
        if len(flat_args) != len(layout.slots):  # another number of extra positional arguments
            raise self._wrong_program()
        if self._runs_inline() and (not self._placing or _inside_manual_region()):
            raise self._wrong_program()
        if (
            self._refuses_foreign
            and not self._placing
            and placement_errors.any_foreign(flat_args, self.rules.mesh)
        ):
            raise self._wrong_program()
        key = call_key(self.signature, layout, flat_args)
        shardings = mine.get(key)
        if shardings is None:
            if key.paths is not None and not self._placing:
                raise self._wrong_program()  # the next calls are to come by way of a check
            known = None if jax.config.jax_disable_jit else self._join(layout, flat_args, key)
            if known is None or known.program.shardings is not mine:
                raise self._wrong_program()
            shardings = known.shardings
        outputs, found = self.function.run(key, layout, flat_args, shardings)
        if found is not shardings:
            mine.put(key, found)
        return outputs

    def _join(self, layout: CallLayout, flat_args: Sequence[Any], key: CallKey) -> Resolved | None:
        """Resolves a call key that some program was tried for; None if its types are not right yet."""
        known = self.resolved.get(key)
        if known is not None:
            return known
        arguments = self.rules.arguments(layout, flat_args)
        if self.rules.any_explicit and not self._placing and not placement.all_typed(flat_args, arguments):
            return None
        return self._new(Call(flat_args, layout, arguments, flat_args, key))

    def _wrong_program(self) -> WrongProgram:
        return WrongProgram(self, self.signature.name, other_types=self._runs_inline())


def _source_of(fun: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is where *fun* is in the source, and holds nothing of what that holds."""
    while isinstance(fun, functools.partial):
        fun = fun.func
    code = getattr(inspect.unwrap(fun), '__code__', None)
    if not isinstance(code, types.CodeType):
        return _unknown
    return types.FunctionType(code, {}, closure=tuple(types.CellType() for _ in code.co_freevars))


def _unknown() -> None:
    """Stands for a function whose source is not known."""


class _Placing(threading.local):
    """True in a thread while a program is called with arguments placed as well as can be.

    What still has no sharding in its type then only JAX can place, such as data for devices of other
    processes.
    """

    _depth = 0

    def __enter__(self) -> None:
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1

    def __bool__(self) -> bool:
        return self._depth > 0


def _fails_alike(error: Exception, call: Callable[..., Any], flat_args: Sequence[Any]) -> bool:
    """Whether a call of deleted arguments, which runs nothing, fails with the same error."""
    try:
        call(*flat_args)
    except Exception as again:
        return type(again) is type(error) and str(again) == str(error)
    return False


def _inside_manual_region() -> bool:
    """Whether this runs inside shard_map, where shapes are local and shardings are the caller's."""
    return bool(jax.sharding.get_abstract_mesh().manual_axes)


def _arose_inside(error: Exception) -> bool:
    """Whether *error* comes out of the user's code or its trace, and not from JAX on the way to it."""
    # What is not traced runs as a traced function alone.
    return arose_below(
        error,
        Dispatcher._in_trace.__code__,
        TracedFunction.run.__code__,
        TracedFunction.run_inline.__code__,
    )

"""The dispatch of a call: finds or makes the program that serves it.

A call takes these stages. The next call of the same kind takes the first alone.

1. The generated caller (`caller`) tries `Dispatcher.fast_call`, and dispatches where there is none.
2. `Dispatcher.dispatch` decides where the call runs: in a program, inline, or without ``jax.jit``.
3. `Dispatcher._read` computes the `CallKey`, and asks the rules for the shardings of the arguments.
4. `Dispatcher._find` finds the program of the key; if the key is new, 5 and 6 come first.
5. `Dispatcher._trace` traces the user's function, which gives the jaxpr and the shardings of the outputs.
6. `Dispatcher._build` gives the program of these shardings; if they are new, it makes the ``jax.jit``.
7. `Dispatcher._placed` moves arguments to the shardings of the rules.
8. `Dispatcher._run` calls the program, and explains what it refuses.

Where the program that was tried raises, `Dispatcher.explain_or_retry` either raises an error that says why,
or lets the caller dispatch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import AxisType

from scalax._follow.dependence import Dependence
from scalax._follow.jaxprs import is_on_mesh, opened
from scalax._mesh import meshes
from scalax._trace import constraints, contexts
from scalax._transforms.calls import placement, placement_errors
from scalax._transforms.calls.argument_shardings import ArgumentShardings, Options
from scalax._transforms.calls.call_key import Call, CallKey, call_key, note_flags
from scalax._transforms.calls.call_signature import CallLayout, CallSignature
from scalax._transforms.calls.placement import Moves, Shardings
from scalax._transforms.calls.placement_errors import ShardedCall
from scalax._transforms.sjit.program import Program, ProgramTable, ShardingKey, WrongProgram, compress
from scalax._transforms.sjit.trace import Recording, TracedFunction, TraceShardings
from scalax._transforms.tracebacks import HidingOurs
from scalax._util.lru_cache import LRUCache
from scalax._util.progress import progress

if TYPE_CHECKING:
    from scalax._transforms.followed_batch import BatchOfCall

_log = logging.getLogger('scalax.sjit')


@dataclasses.dataclass(eq=False)
class ProgramEntry:
    """The program of a call key.

    Attributes:
        program: the program that serves the key.
        shardings: the shardings of its traces.
        out_tree: the structure of the outputs.
        outputs_checked: whether a call has looked at where the outputs are.
    """

    program: Program
    shardings: TraceShardings
    out_tree: Any
    outputs_checked: bool = False


@dataclasses.dataclass(eq=False)
class KeyState:
    """What is known of a call key.

    The thread that traces the key holds the lock. It is re-entrant, so that a function that calls itself gets
    an error. Two threads wait for each other for ever only if two functions call each other with the same
    keys, which no single thread could trace either.

    Attributes:
        arguments: the shardings of the arguments, by slot and leaf. In the key of placed arrays they may be
            None: their types hold the sharding. Host data has a separate key, whose shardings are the target.
        entry: its program; None until the function was traced.
        tracing: whether it is traced now.
        lock: held meanwhile.
    """

    arguments: Mapping[int, Shardings]
    entry: ProgramEntry | None = None
    tracing: bool = False
    lock: Any = dataclasses.field(default_factory=threading.RLock)


@dataclasses.dataclass(frozen=True, eq=False)
class ReadCall:
    """A call with its key.

    Attributes:
        sharded: the call with the shardings of its arguments.
        moves: which arguments are moved.
        typed: the call as JAX will see it, with structs for arguments that move; the same call if none does.
        key: the key of `typed`.
        state: what is known of the key.
    """

    sharded: ShardedCall
    moves: Moves
    typed: Call
    key: CallKey
    state: KeyState


class Dispatcher:
    """Finds or makes the program of each call. Safe to use from many threads.

    Threads that meet a new call key together trace the user's code once, as under ``jax.jit``: one does, and
    the others wait for it. Calls of other keys do not wait.

    The helper and the user's function are held weakly, because this may live as long as they do
    (`dispatcher_of`): callers hold them.

    Attributes:
        fast_call: what calls try first: the only program, or a `ProgramTable`; None before the first call.
        args_placed: entered where a program is traced or run whose arguments are placed, or typed as placed.
            Then only JAX can place a leaf without a sharding in its type, such as data of other processes.
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
        self._function = TracedFunction(fun, self.rules)
        # In an outer trace JAX ignores in_shardings for values typed by another mesh with Explicit axes.
        self._refuses_foreign = (
            self.rules.any_explicit or self.rules.any_rule or options.out_shardings is not None
        )
        self.args_placed = _ThreadFlag()
        # Programs refer to this weakly, so that there is no cycle: a function that is no longer referenced is
        # freed at once, with the arrays that it closes over.
        self._weak: Dispatcher = weakref.proxy(self)
        self.clear()

    @property
    def helper(self) -> contexts.MeshOwner:
        """The helper of the mesh."""
        return self.rules.helper

    def clear(self) -> None:
        """Forgets every program."""
        this = self._weak
        self._states: LRUCache[CallKey, KeyState] = LRUCache()
        self.programs: LRUCache[ShardingKey, Program] = LRUCache()
        self._inlined: dict[CallLayout, Any] = {}
        self._table = ProgramTable(lambda flat_args: this._known(flat_args), lambda: this._wrong_program())
        self.fast_call = None

    # What the generated caller runs -----------------------------------------------------------------

    def dispatch(self, flat_args: tuple[Any, ...]) -> Any:
        """Serves a call for which no program is known, or that the one tried cannot serve."""
        with _users_code:
            call = Call.of(self.signature, flat_args)
            if self._runs_inline():
                return self._inline(call)
            if self._in_eager_axis_modes():
                return self._inline_compiled(call.layout)(*flat_args)
            self._require_devices()
            placement_errors.reject_deleted(call)
            read = self._read(call)
            if jax.config.jax_disable_jit:  # the user's lines run with values, and nothing is traced
                return self._function.run(call, self._shardings_in(call, read.state))[0]
            with self._progress(read):
                entry = self._find(read)
                placed_args = self._placed(read, placement.moved)
                moves = dataclasses.replace(read.moves, mismatched=False)
                if read.typed is not call and (moves.unplaced or moves.foreign):
                    shardings = read.sharded.shardings
                    slots = placement.slots_to_place(flat_args, shardings, moves)
                    forms = {
                        slot: compress(jax.tree.structure(flat_args[slot]), shardings[slot]) for slot in slots
                    }
                    entry.program.place_host_data(forms, moves)
                self._table.add(flat_args, entry.program)
                self.fast_call = self._table if len(self.programs.items()) > 1 else entry.program.call
                return self._run(read, entry, placed_args)

    def _require_devices(self) -> None:
        if not constraints.is_compiled():  # a jax.jit around it may lower for devices that are not here
            meshes.require_devices(self.mesh, f'a call of {self.signature.name}')

    def _progress(self, read: ReadCall) -> contextlib.AbstractContextManager[Any]:
        """Says what takes long where a call has to be traced and compiled."""
        if read.state.entry is not None and read.state.entry.outputs_checked:
            return contextlib.nullcontext()
        return progress(f'compiling {self.signature.name}', _log)

    def explain_or_retry(self, error: Exception, fast_call: Any, flat_args: tuple[Any, ...]) -> bool:
        """Whether *error* only means that *fast_call* cannot serve this call, and `dispatch` may.

        Raises:
            ScalaxError: nothing can serve the call, and the reason is known.
        """
        if isinstance(error, WrongProgram):
            return error.owner is self
        if _users_code.hide(error):
            return False
        if self._runs_inline():
            return True
        self._require_devices()
        read = self._read(Call.of(self.signature, flat_args))
        program = fast_call.find(flat_args) if isinstance(fast_call, ProgramTable) else None
        used, right = program.call if program else fast_call, read.state.entry
        if right is None or right.program.call is not used:
            # A runtime error comes from a run, which is not repeated; others were raised before tracing.
            return not isinstance(error, jax.errors.JaxRuntimeError)
        sharded = read.sharded
        if sharded.moves and (
            sharded.any(placement.is_mismatched)
            or (isinstance(error, ValueError) and sharded.any(placement_errors.is_refused))
        ):
            return True
        # A run that failed has deleted its donated arguments. If they were deleted before it, the same call
        # fails with the same error again.
        deleted = placement_errors.any_deleted(flat_args) and _fails_alike(error, fast_call, flat_args)
        explained = placement_errors.explained(error, sharded, deleted=deleted)
        if explained is not None:
            raise explained from None
        return False

    # Reading a call, and finding its program ---------------------------------------------------------

    def prepare(self, flat_args: Sequence[Any]) -> tuple[ProgramEntry, Sequence[Any]]:
        """The program of a call that is not run, and the call's arguments as they would be placed.

        Raises:
            ShardingError, StructureError: the rules do not fit the arguments or the outputs.
            PlacementError: an argument is committed to another sharding.
        """
        with _users_code:
            read = self._read(Call.of(self.signature, flat_args))
            return self._find(read), self._placed(read, placement.as_moved)

    def batch_of(self, flat_args: Sequence[Any]) -> BatchOfCall:
        """The batch of a call that is not run; raises as `prepare` does."""
        from scalax._transforms.followed_batch import batch_of_call  # here, because few programs ask

        shardings = self.prepare(flat_args)[0].shardings
        call = Call.of(self.signature, flat_args)
        batch = shardings.batch
        if batch is None:
            batch = self.rules.batch(
                call, {**shardings.arguments, **_inside(shardings.arguments, shardings.constraints)}
            )
        return batch_of_call(call, batch, shardings.followed, self.rules.why_not_followed(call))

    def _read(self, call: Call) -> ReadCall:
        """Reads a call.

        Raises:
            ArgumentError: leaves that are not arrays, a static value that cannot be hashed, or options that
                name arguments which the call does not have.
            ShardingError, StructureError: the rules do not fit the arguments.
        """
        self.signature.reject_misnamed(call.flat_args)
        key = call_key(call)
        state = self._state(key, call)
        if self._refuses_foreign:
            # JAX reshards to another mesh where all axes are Explicit.
            movable = AxisType.Auto not in self.mesh.axis_types
            placement_errors.reject_foreign_types(call, self.mesh, movable=movable)
        moves = self._moves()
        typed_args = placement.place(call.flat_args, state.arguments, moves, placement.as_moved)
        sharded = ShardedCall(
            call,
            state.arguments,
            self.mesh,
            self.rules.any_rule,
            moves.mismatched,
            may_be_returned=self.options.out_shardings is None and bool(self.programs.items()),
        )
        if typed_args is call.flat_args:
            return ReadCall(sharded, moves, call, key, state)
        # Types may hold shardings: the key is that of the arguments as they will be.
        typed = dataclasses.replace(call, flat_args=typed_args)
        key = call_key(typed)
        return ReadCall(sharded, moves, typed, key, self._states.add(key, KeyState(state.arguments)))

    def _state(self, key: CallKey, call: Call) -> KeyState:
        return self._states.get(key) or self._states.add(key, KeyState(self.rules.arguments(call)))

    def _moves(self) -> Moves:
        # On Explicit axes types hold shardings; under a jax.set_mesh of other types JAX finds the trace of
        # placed arrays only. Elsewhere jax.jit places host data.
        ambient = jax.sharding.get_abstract_mesh()
        unplaced = self.rules.any_explicit or constraints.has_other_types(ambient, self.mesh)
        foreign = self._refuses_foreign and not self.rules.any_explicit
        return Moves(unplaced, self.options.on_mismatch == 'reshard', foreign)

    def _find(self, read: ReadCall) -> ProgramEntry:
        placement_errors.reject_mismatched(read.sharded)
        if read.state.entry is not None:
            return read.state.entry
        # Traced with the types of the moved arguments: nothing moves before all rules are known to fit.
        with self.args_placed:
            return self._trace_and_build(read.typed, read.key, read.state)

    def _known(self, flat_args: Sequence[Any]) -> Program | None:
        """The program of a call, if it is known."""
        entry = self._read(Call.of(self.signature, flat_args)).state.entry
        return None if entry is None else entry.program

    def _trace_and_build(self, call: Call, key: CallKey, state: KeyState) -> ProgramEntry:
        """Traces a call key that is new and builds its program, or waits for the thread that does."""
        with state.lock:
            if state.entry is not None:
                return state.entry
            if state.tracing:
                raise RecursionError(
                    f'{self.signature.name} calls itself with arguments of the same shapes and dtypes'
                )
            state.tracing = True
            try:
                traced, program, shardings = self._trace(call, key, state)
            finally:
                state.tracing = False
            program = self._build(call, key, program, traced.out_tree, shardings)
            self._function.warn_unused(self.signature.name, any_static=bool(call.layout.static))
            state.entry = ProgramEntry(program, shardings, traced.out_tree)
            return state.entry

    def _trace(
        self, call: Call, key: CallKey, state: KeyState
    ) -> tuple[jax.stages.Traced, Program, TraceShardings]:
        """Traces the user's function; in a program of its own, which has no ``jax.jit`` yet."""
        program = self._new_program(call.layout)
        program.shardings.put(key, self._shardings_in(call, state))
        # The same function object as in the program: JAX finds this trace again there.
        try:
            traced = jax.jit(program.flat_function, static_argnums=call.layout.static).trace(*call.flat_args)
        except jax.errors.TracerBoolConversionError as error:
            note_flags(error, call)
            raise
        shardings = program.shardings.get(key)
        assert shardings is not None
        shardings = dataclasses.replace(shardings, recording=Recording.of(traced, key))
        if not self._knows_devices(traced.jaxpr, shardings):
            # In another program: JAX would find this trace again.
            shardings = dataclasses.replace(shardings, on_devices=True)
            program = self._new_program(call.layout)
        return traced, program, shardings

    def _knows_devices(self, jaxpr: Any, shardings: TraceShardings) -> bool:
        """Whether JAX knows the devices of a program, or its function says nothing of a mesh.

        It learns them of arguments that an output depends on, and of outputs.
        """
        if self.rules.any_explicit or any(shardings.outputs or ()) or not is_on_mesh(jaxpr):
            return True
        sharded = [each is not None for slot in shardings.arguments.values() for each in slot]
        others = len(opened(jaxpr).invars) - len(sharded)  # values of an outer trace
        dependent = Dependence(jaxpr, [*[False] * others, *sharded])
        return any(sharded) and any(map(dependent.__contains__, opened(jaxpr).outvars))

    def _shardings_in(self, call: Call, state: KeyState) -> TraceShardings:
        constraints = self.rules.constraints(call)
        batch = self.rules.followed(call, {**state.arguments, **_inside(state.arguments, constraints)})
        return TraceShardings(state.arguments, constraints, batch)

    def _build(
        self, call: Call, key: CallKey, new_program: Program, out_tree: Any, shardings: TraceShardings
    ) -> Program:
        """The program that has these shardings: one that is there, or *new_program*, with its ``jax.jit``."""
        assert shardings.outputs is not None
        trees = [(jax.tree.structure(call.flat_args[slot]), slot) for slot in call.layout.dynamic]
        arguments = tuple([compress(treedef, shardings.arguments[slot]) for treedef, slot in trees])
        outputs, checked = compress(out_tree, shardings.outputs), key.paths is not None
        sharding_key = ShardingKey(call.layout, arguments, outputs, shardings.on_devices, checked)
        program = self.programs.get(sharding_key)
        if program is None:
            kwargs = self.options.jit_kwargs
            no_outputs = shardings.on_devices and not out_tree.num_leaves
            if outputs is None and (self.rules.any_explicit or no_outputs):
                # JAX drops what outputs do not depend on, and with it the devices to run on.
                kwargs = {'keep_unused': True, **kwargs}
            new_program.make_jit(sharding_key, self.signature, self.mesh.size, kwargs)
            program = self.programs.add(sharding_key, new_program)
        if key.paths is not None:
            this = self._weak
            program.check_paths(key.paths, lambda: this._wrong_program())
        # Kept even if another thread has cleared meanwhile: looked up again, it might be one not built yet.
        program.shardings.put(key, shardings)
        return program

    # Placing arguments, and running the program ------------------------------------------------------

    def _placed(self, read: ReadCall, move: placement.Move) -> Sequence[Any]:
        call = read.sharded.call
        if read.typed is call:
            return call.flat_args
        return placement.place(call.flat_args, read.sharded.shardings, read.moves, move)

    def _run(self, read: ReadCall, entry: ProgramEntry, placed_args: Sequence[Any]) -> Any:
        call = entry.program.call
        assert call is not None  # the entry is of a program that is built
        with self.args_placed:
            try:
                outputs = call(*placed_args)
            except (ValueError, jax.errors.JaxRuntimeError) as error:
                if _users_code.hide(error):
                    raise
                explained = placement_errors.explained(error, read.sharded)
                if explained is None:
                    raise
                raise explained from None
        if not entry.outputs_checked:
            entry.outputs_checked = True
            placement_errors.warn_left_alone(read.sharded, outputs)
        return outputs

    # Calls that have no program ----------------------------------------------------------------------

    def _runs_inline(self) -> bool:
        """Whether a call is part of a function whose mesh axes have other types than the helper's.

        Inside `auto_axes`, `explicit_axes` and shard_map (where shapes are local, too).
        """
        ambient = jax.sharding.get_abstract_mesh()
        if ambient.empty:
            return False
        return bool(ambient.manual_axes) or constraints.retyped_mesh(self.mesh) is not self.mesh

    def _in_eager_axis_modes(self) -> bool:
        """Whether this runs in JAX's own auto_axes or explicit_axes, outside of any ``jax.jit``.

        The types of axes in force then differ from those of ``jax.set_mesh``.
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
            return this._inline(Call(this.signature, layout, flat_args))

        inline.__name__ = inline.__qualname__ = self.signature.name
        return self._inlined.setdefault(layout, jax.jit(inline, static_argnums=layout.static))

    def _inline(self, call: Call) -> Any:
        """Runs the user's function where it is called, by the types that mesh axes have there."""
        call_key(call)  # raises about leaves that are not arrays
        if _inside_manual_region():
            return self._function.run_inline(call)
        mesh = constraints.retyped_mesh(self.mesh)
        rules = ArgumentShardings(self.helper, self.signature, self.options, mesh)
        arguments, sharded = rules.arguments(call), list(call.flat_args)
        for asked in (arguments, rules.constraints(call)):
            for slot, shardings in asked.items():
                sharded[slot] = constraints.apply_shardings(sharded[slot], shardings)
        outputs = self._function.run_inline(dataclasses.replace(call, flat_args=sharded))
        return constraints.apply_shardings(outputs, rules.outputs(outputs, call, arguments))

    # What JAX traces of a program --------------------------------------------------------------------

    def _new_program(self, layout: CallLayout) -> Program:
        this, shardings = self._weak, LRUCache[CallKey, TraceShardings]()

        def flat_function(*flat_args: Any) -> Any:
            return this._in_trace(shardings, layout, flat_args)

        return Program(layout, self._function.as_users(flat_function, layout), shardings)

    def _in_trace(
        self, mine: LRUCache[CallKey, TraceShardings], layout: CallLayout, flat_args: Sequence[Any]
    ) -> Any:
        """The user's function, if a call is one for the program whose call keys are *mine*.

        Raises:
            WrongProgram: it is not.
        """
        if len(flat_args) != len(layout.slots):  # another number of extra positional arguments
            raise self._wrong_program()
        if self._runs_inline() and (not self.args_placed or _inside_manual_region()):
            raise self._wrong_program()
        call = Call(self.signature, layout, flat_args)
        unchecked = self._refuses_foreign and not self.args_placed
        if unchecked and placement_errors.any_foreign(call, self.mesh):
            raise self._wrong_program()
        key = call_key(call)
        shardings = mine.get(key)
        if shardings is None:
            if key.paths is not None and not self.args_placed:
                raise self._wrong_program()  # later calls have to pass `Program.check_paths`
            entry = None if jax.config.jax_disable_jit else self._adopt_key(call, key)
            if entry is None or entry.program.shardings is not mine:
                raise self._wrong_program()
            shardings = entry.shardings
        outputs, found = self._function.run(call, shardings)
        if found is not shardings:
            mine.put(key, found)
        return outputs

    def _adopt_key(self, call: Call, key: CallKey) -> ProgramEntry | None:
        """The program of a call key that some program was tried for; None if types are not right yet."""
        state = self._state(key, call)
        if state.entry is not None:
            return state.entry
        unplaced = self.rules.any_explicit and not self.args_placed
        if unplaced and not placement.all_typed(call.flat_args, state.arguments):
            return None
        return self._trace_and_build(call, key, state)

    def _wrong_program(self) -> WrongProgram:
        return WrongProgram(self, self.signature.name, other_types=self._runs_inline())


class _ThreadFlag(threading.local):
    """A context manager that is true in the threads that have entered it."""

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
    except Exception as again:  # noqa: BLE001 - only compared with the one that is raised
        return type(again) is type(error) and str(again) == str(error)
    return False


def _inside(
    arguments: Mapping[int, Shardings], constraints: Mapping[int, Shardings]
) -> Mapping[int, Shardings]:
    """The shardings of constrained arguments inside the function; a leaf without a constraint stays."""
    return {
        slot: [before if now is None else now for now, before in zip(each, arguments[slot], strict=True)]
        for slot, each in constraints.items()
    }


def _inside_manual_region() -> bool:
    """Whether this runs inside shard_map, where shapes are local and shardings are the caller's."""
    return bool(jax.sharding.get_abstract_mesh().manual_axes)


# The user's function runs below these, traced or not.
_users_code = HidingOurs(
    Dispatcher._in_trace.__code__, TracedFunction.run.__code__, TracedFunction.run_inline.__code__
)

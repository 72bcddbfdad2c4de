"""The dispatch of a call: finds or makes the program that serves it.

A call takes these stages. The next call of the same kind takes the first alone.

1. The generated caller (`caller`) tries `Dispatcher.fast_call`, and dispatches where there is none.
2. `Dispatcher.dispatch` decides where the call runs, and goes through the other stages.
3. `Dispatcher._read` computes the `CallKey` of the leaves (`Call`), and asks the rules for their shardings.
4. `Dispatcher._program_of` checks where the arguments are, and finds the program of the key
   (`_program_of_key`); if the key is new, 5 and 6 come first.
5. `Dispatcher._trace` traces the user's function, which gives the jaxpr and the shardings of the outputs.
6. `Dispatcher._program_with` gives the program of these shardings; if they are new, it makes the ``jax.jit``.
7. `ResolvedCall.place` moves arguments to the shardings of the rules.
8. `Dispatcher._run` calls the program, and explains what it refuses.

Where the program that was tried raises, `Dispatcher.explain_or_retry` either raises an error that says why,
or lets the caller dispatch. Calls that have no program run inline.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import AxisType, Mesh

from scalax._compile.call import placement, placement_errors
from scalax._compile.call.call_key import (
    Call,
    CallKey,
    Shardings,
    call_key,
    is_deleted,
    is_foreign,
    is_single_device,
    type_matches,
)
from scalax._compile.call.placement import ReshardPolicy
from scalax._compile.call.resolve_arguments import FunctionRules, Options, ResolvedCall
from scalax._compile.call.signature import CallLayout, CallSignature
from scalax._compile.sjit.batch_arguments import batch_paths, why_not_partitioned
from scalax._compile.sjit.program_table import (
    Entry,
    Program,
    ProgramTable,
    WrongProgram,
    compress,
    expand,
)
from scalax._compile.sjit.trace import TracedFunction, record, runs_inline
from scalax._compile.tracebacks import HidingOurs
from scalax._compile.xla_workarounds.rewrite import apply_workarounds
from scalax._core.context import constraints
from scalax._core.mesh import meshes
from scalax._core.util import lru_cache
from scalax._core.util.progress import progress
from scalax._core.util.stack_space import with_stack_space
from scalax._data.host import process_collectives
from scalax._jax.tracing import is_abstract, is_compiled
from scalax._jaxpr.batch_dependence import BatchDependence
from scalax._jaxpr.user_shardings import names_mesh
from scalax.errors import MeshError, PartitioningWarning, warn
from scalax.rules._unused_rules import warn_unsharded

if TYPE_CHECKING:
    from scalax._core.context.active_helper import MeshOwner
    from scalax._spmd.report.explain import PropagationReport

_log = logging.getLogger('scalax.sjit')


class _ThisThread(threading.local):
    """What a thread does with the programs of a function.

    As a context manager it is entered where a program is traced or run whose arguments are placed, or typed
    as placed. Then only JAX can place a leaf without a sharding in its type, such as data of other processes.

    Attributes:
        entry: of the call that it is about to trace; None again once the user's function runs.
    """

    entry: Entry | None = None
    _depth = 0

    def __enter__(self) -> None:
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1

    def __bool__(self) -> bool:
        return self._depth > 0


class Dispatcher:
    """Finds or makes the program of each call. Safe to use from many threads.

    Threads that meet a new call key together trace the user's code once, as under ``jax.jit``: one does, and
    the others wait for it. Calls of other keys do not wait.

    The helper and the user's function are held weakly, because this may live as long as they do
    (`dispatcher_of`): callers hold them.

    Attributes:
        fast_call: what calls try first: the only program, or a `ProgramTable`; None before the first call.
        programs: the programs, by their shardings.
        args_placed: entered where a program is traced or run whose arguments are placed (`_ThisThread`).
    """

    fast_call: Callable[..., Any] | None

    def __init__(
        self, helper: MeshOwner, fun: Callable[..., Any], signature: CallSignature, options: Options
    ) -> None:
        self.signature, self.options = signature, options
        self.rules = FunctionRules(helper, signature, options)
        self.mesh = self.rules.mesh
        self._function = TracedFunction(helper, fun, self.rules)
        self._has_devices = meshes.has_devices(self.mesh)
        if isinstance(self.mesh, Mesh) and self._has_devices:
            process_collectives.processes_of(
                self.mesh
            )  # the exit of the program waits for those that there are
        self.args_placed = _ThisThread()
        # Re-entrant: comparing keys may run users' code, which may come back here.
        self._lock = threading.RLock()
        # Programs refer to this weakly, so that there is no cycle: a function that is no longer referenced is
        # freed at once, with the arrays that it closes over.
        self._weak: Dispatcher = weakref.proxy(self)
        self._warned = False
        self.clear()

    @property
    def helper(self) -> MeshOwner:
        """The helper of the mesh."""
        return self._function.helper

    def clear(self) -> None:
        """Forgets every program."""
        this = self._weak
        self._entries = functools.lru_cache(maxsize=lru_cache.SIZE)(Entry)
        self.programs: dict[Any, Program] = {}
        self._table = ProgramTable(lambda flat_args: this._known(flat_args), lambda: this._wrong_program())
        self.fast_call = None
        self._compares_paths = False  # of arguments whose structure does not determine them, at every call

    # What the generated caller runs -----------------------------------------------------------------

    def dispatch(self, flat_args: tuple[Any, ...]) -> Any:
        """Serves a call for which no program is known, or that the one tried cannot serve."""
        try:
            ambient = jax.sharding.get_abstract_mesh()
            if not ambient.empty:
                if runs_inline(self.mesh):
                    return self._function.run_inline(Call(self.signature, flat_args))
                switched = constraints.has_other_types(ambient, self.mesh)
                if switched and jax.sharding.get_mesh().abstract_mesh != ambient:
                    name = self.signature.name
                    raise MeshError(f'{name} needs a jax.jit around the auto_axes or explicit_axes of JAX')
            if not self._has_devices:
                self._require_devices()
            call = Call(self.signature, flat_args)
            if any(map(is_deleted, call.leaves)):
                placement_errors.reject_deleted(call)
            if any(map(is_abstract, call.leaves)):
                placement_errors.reject_abstract(call)
            read, entry = self._read(call)
            if jax.config.jax_disable_jit:  # the user's lines run with values, and nothing is traced
                return self._function.run(call, Entry(entry.key, read.shardings))
            # What is new is compiled, which takes long.
            doing = f'compiling {self.signature.name}'
            with contextlib.nullcontext() if entry.outputs_checked else progress(doing, _log):
                program = self._program_of(read, entry)
                placed_args = flat_args if read.typed is call else read.place(placement.move_leaves)
                if read.typed is not call and (read.policy.moves_unplaced or read.policy.retypes_foreign):
                    self._place_host_data(read, program)
                self._table.add(flat_args, program)
                fast_call = self._table if len(self.programs) > 1 else program.call
                self.fast_call = None if self._compares_paths else fast_call
                return self._run(read, entry, placed_args)
        except Exception as error:
            self.rules.resolutions = self.rules.resolutions and []  # which hold the arguments
            _users_code.hide(error)
            raise

    def _require_devices(self) -> None:
        if not is_compiled():  # a jax.jit around it may lower for devices that are not here
            meshes.require_devices(self.mesh, f'a call of {self.signature.name}')

    def explain_or_retry(self, error: Exception, fast_call: Any, flat_args: tuple[Any, ...]) -> bool:
        """Whether *error* only means that *fast_call* cannot serve this call, and `dispatch` may.

        Raises:
            ScalaxError: nothing can serve the call, and the reason is known.
        """
        if isinstance(error, WrongProgram):
            return error.owner is self
        if _users_code.hide(error):
            return False
        if runs_inline(self.mesh):
            return True
        if not self._has_devices:
            self._require_devices()
        read, entry = self._read(Call(self.signature, flat_args))
        program = fast_call.find(flat_args) if isinstance(fast_call, ProgramTable) else None
        used, right = program.call if program else fast_call, entry.program
        if right is None or right.call is not used:
            # A runtime error comes from a run, which is not repeated; others were raised before tracing.
            return not isinstance(error, jax.errors.JaxRuntimeError)
        if isinstance(error, ValueError) and placement.target_shardings(
            read.call.leaves, read.shardings, read.policy
        ):
            return True  # of an argument that moves first
        placement_errors.raise_known_cause(error, read)
        return False

    # Questions about a call that is not run -----------------------------------------------------------

    def prepare(self, flat_args: Sequence[Any]) -> tuple[Program, Entry, Sequence[Any]]:
        """The program of a call that is not run, what is known of it, and the arguments as it takes them.

        Types stand in place of the arguments that would move.

        Raises:
            ShardingError, StructureError: the rules do not fit the arguments or the outputs.
            PlacementError: an argument is committed to another sharding.
        """
        with _users_code:
            call = placement.with_devices(
                Call(self.signature, flat_args), self.mesh, lambda call: self._read(call)[0].shardings
            )
            read, entry = self._read(call)
            return self._program_of(read, entry), entry, read.place(placement.retype_leaves)

    def explain_propagation(self, flat_args: Sequence[Any]) -> PropagationReport:
        """How a call that is not run is partitioned along its batch; raises as `prepare` does."""
        from scalax._spmd.report.explain import (  # here, because few programs ask
            PropagationReport,
            make_propagation_report,
        )

        _, entry, _ = self.prepare(flat_args)
        name, mesh, step = self.signature.name, self.mesh.shape, entry.partitioned
        call, outside = Call(self.signature, flat_args), entry.gradient_outside
        if step is None or isinstance(step, str):
            reason = step or '; '.join(filter(None, why_not_partitioned(self.rules, call)))
            return PropagationReport(name, dict(mesh), reason=reason, gradient_outside=outside)
        return make_propagation_report(
            name, mesh, step, batch_paths(call, entry.batch), gradient_outside=outside
        )

    # Reading a call, and completing what is known of its key ------------------------------------------

    def _read(self, call: Call) -> tuple[ResolvedCall, Entry]:
        """Reads a call; returns it with what is known of its key.

        Raises:
            ArgumentError: leaves that are not arrays, or a static value that cannot be hashed.
            ShardingError, StructureError: the rules do not fit the arguments.
        """
        key = call_key(call)
        entry = self._entry(key, call)
        shardings = entry.arguments
        if key.any_explicit:
            # In an outer trace JAX ignores in_shardings for values typed by another mesh with Explicit axes.
            # To a mesh where all axes are Explicit it reshards them.
            movable = AxisType.Auto not in self.mesh.axis_types
            placement_errors.reject_foreign_types(call, self.mesh, movable=movable)
        # On Explicit axes types hold shardings; under a jax.set_mesh of other types JAX finds the trace of
        # placed arrays only. Elsewhere jax.jit places host data.
        ambient = jax.sharding.get_abstract_mesh()
        retyped = not ambient.empty and constraints.has_other_types(ambient, self.mesh)
        policy = ReshardPolicy(
            moves_unplaced=self.rules.any_explicit or retyped,
            moves_mismatched=self.options.on_mismatch == 'reshard',
            retypes_foreign=key.any_explicit and not self.rules.any_explicit,
        )
        typed = call
        if any(policy):
            typed_args = placement.place_arguments(call, shardings, policy, placement.retype_leaves)
            if typed_args is not call.flat_args:
                # Types may hold shardings: the key is that of the arguments as they will be.
                typed = Call(self.signature, typed_args)
                entry = self._entry(call_key(typed), typed, shardings)
        return ResolvedCall(
            self.rules, call, shardings, policy, typed, called_before=bool(self.programs)
        ), entry

    def _entry(self, key: CallKey, call: Call, shardings: Shardings | None = None) -> Entry:
        """What is known of a key, at least the *shardings* of the arguments, or those of the rules."""
        with self._lock:  # of threads that meet, one makes it
            entry: Entry = self._entries(key)
        if entry.arguments is None:
            arguments = self.rules.arguments(call) if shardings is None else shardings
            with self._lock:  # of answers of rules that differ, one counts
                if entry.arguments is None:
                    entry.arguments = arguments
        return entry

    def _known(self, flat_args: Sequence[Any]) -> Program | None:
        """The program of a call, if it is known."""
        return self._read(Call(self.signature, flat_args))[1].program

    def _program_of(self, read: ResolvedCall, entry: Entry) -> Program:
        """The program of a call, after the check that its arguments are where they belong."""
        if any(map(self.rules.is_wrong, read.call.leaves, read.shardings)):
            placement_errors.reject_mismatched(read)
        # Traced with the types of the moved arguments: nothing moves before all rules are known to fit.
        with self.args_placed:
            return self._program_of_key(read.typed, entry)

    def _program_of_key(self, call: Call, entry: Entry) -> Program:
        """The program of a key; makes it if it is new, or waits for the thread that does."""
        with entry.lock:
            if entry.program is not None:
                return entry.program
            if entry.tracing:
                raise RecursionError(
                    f'{self.signature.name} calls itself with arguments of the same shapes and dtypes'
                )
            entry.tracing = True
            try:
                flat_function = self._trace(call, entry)
            finally:
                entry.tracing = False
            program = self._program_with(call, entry, flat_function)
            if self.options.annotation_shardings:
                self._function.warn_unused(any_static=bool(call.layout.static))
            if self.options.partitioning is not None and entry.partitioned is None:
                self._warn_not_partitioned(call)
            resolutions, self.rules.resolutions = self.rules.resolutions, None  # of the first call
            if resolutions and True in [each.any_replicated for each in resolutions]:
                warn_unsharded(self.signature.name, resolutions, self.mesh.shape)
            self._compares_paths |= entry.key.paths is not None
            entry.program = program
            return program

    def _warn_not_partitioned(self, call: Call) -> None:
        """Warns, once, that the user asks for partitioning, and that nothing of a call is a batch."""
        why, remedy = why_not_partitioned(self.rules, call)
        if self._warned or not remedy or self.mesh.size == 1:
            return
        self._warned = True
        warn(
            f'{self.signature.name}: partitioning={self.options.partitioning} has no effect: {why}. It runs '
            'as jax.jit runs it, and the compiler alone decides how activations are sharded.\n'
            f'What to do: {remedy}.',
            PartitioningWarning,
        )

    @with_stack_space
    def _trace(self, call: Call, entry: Entry) -> Callable[..., Any]:
        """Traces the user's function, and notes what comes out; returns what a program jits."""
        entry.outputs, entry.jaxpr, entry.on_devices = None, None, False  # of a trace that failed
        flat_function = self._flat_function(call.layout)
        self.args_placed.entry = entry
        # The same function object as in the program: JAX finds this trace again there.
        try:
            traced = jax.jit(flat_function, static_argnums=call.layout.static).trace(*call.flat_args)
        except jax.errors.TracerBoolConversionError as error:
            placement_errors.add_flags_note(error, call)
            raise
        finally:
            self.args_placed.entry = None
        record(entry, traced)
        entry.on_devices = not self._knows_devices(traced.jaxpr, entry)
        axes = sorted(entry.batch.batch_axes) if entry.batch else ()
        right = apply_workarounds(
            traced.jaxpr, self.mesh, axes, name=self.signature.name, can_change=entry.jaxpr is not None
        )
        if right is not traced.jaxpr:
            entry.jaxpr = right
        # Another function where its outputs or its jaxpr change: JAX would find this trace again.
        changed = entry.on_devices or right is not traced.jaxpr
        return self._flat_function(call.layout) if changed else flat_function

    def _knows_devices(self, jaxpr: Any, entry: Entry) -> bool:
        """Whether JAX knows the devices of a program, or its function says nothing of a mesh.

        It learns them of arguments that an output depends on, and of outputs.
        """
        if self.rules.any_explicit or any(entry.outputs or ()) or not names_mesh(jaxpr, self.mesh):
            return True
        sharded = [each is not None for each in entry.arguments]
        others = len(jaxpr.in_avals) - len(sharded)  # values of an outer trace
        dependent = BatchDependence(jaxpr, [*[False] * others, *sharded], certain=True)
        return any(sharded) and any(dependent.of_results)

    def _program_with(self, call: Call, entry: Entry, flat_function: Callable[..., Any]) -> Program:
        """The program that has the shardings of a trace: one that is there, or one of *flat_function*.

        Programs are known by their slots, the shardings of arguments and outputs, and what else they do.
        """
        assert entry.outputs is not None
        arguments = tuple(map(compress, call.treedefs.values(), call.by_slot(entry.arguments).values()))
        outputs = compress(entry.out_tree, entry.outputs)
        shardings = call.layout, arguments, outputs, entry.on_devices
        program = self.programs.get(shardings)
        if program is None:
            options = dict(self.options.jit_kwargs)
            if outputs is not None:
                options['out_shardings'] = expand(outputs)
            elif self.rules.any_explicit or (entry.on_devices and not entry.out_tree.num_leaves):
                # JAX drops what outputs do not depend on, and with it the devices to run on.
                options.setdefault('keep_unused', True)
            new = Program(
                self.signature,
                call.layout,
                flat_function,
                arguments,
                options,
                guards=self.mesh.size > 1,
            )
            if len(self.programs) >= lru_cache.SIZE:
                self.programs.clear()
            program = self.programs.setdefault(shardings, new)
        return program

    # Running the program -------------------------------------------------------------------------

    def _place_host_data(self, read: ResolvedCall, program: Program) -> None:
        """Makes a program place host data in the slots of a call from now on."""
        policy = read.policy._replace(moves_mismatched=False)
        leaves, shardings = (read.call.by_slot(each) for each in (read.call.leaves, read.shardings))
        forms = {
            slot: compress(tree, shardings[slot])
            for slot, tree in read.call.treedefs.items()
            if placement.target_shardings(leaves[slot], shardings[slot], policy)
        }
        program.place_host_data(forms, policy)

    def _run(self, read: ResolvedCall, entry: Entry, placed_args: Sequence[Any]) -> Any:
        assert entry.program is not None
        with self.args_placed:
            self.args_placed.entry = entry  # if JAX traces: another thread may have cleared what it had
            try:
                outputs = entry.program.call(*placed_args)
            except (ValueError, jax.errors.JaxRuntimeError) as error:
                if not _users_code.hide(error):
                    placement_errors.raise_known_cause(error, read)
                raise
            finally:
                self.args_placed.entry = None
        if not entry.outputs_checked:
            entry.outputs_checked = True
            if self.mesh.size > 1 and any(map(is_single_device, jax.tree.leaves(outputs))):
                placement_errors.warn_single_device_outputs(read.call, read.shardings, outputs)
        return outputs

    # What JAX traces of a program --------------------------------------------------------------------

    def _flat_function(self, layout: CallLayout) -> Callable[..., Any]:
        """A new function of slots for a program of such calls."""
        this, token = self._weak, object()

        def flat_function(*flat_args: Any) -> Any:
            return this._in_trace(token, layout, flat_args)

        flat_function.__dict__['token'] = token
        return self._function.as_users(flat_function, layout)

    def _in_trace(self, token: object, layout: CallLayout, flat_args: Sequence[Any]) -> Any:
        """The user's function, if a call is one for the program with this token.

        Raises:
            WrongProgram: it is not.
        """
        if len(flat_args) != len(layout.names):  # another number of extra positional arguments
            raise self._wrong_program()
        ambient = jax.sharding.get_abstract_mesh()
        if not ambient.empty and runs_inline(self.mesh) and (not self.args_placed or ambient.manual_axes):
            raise self._wrong_program()
        call, entry = Call(self.signature, flat_args), self.args_placed.entry
        self.args_placed.entry = None
        # Of a trace that JAX begins, such as the one of numpy data, it is not known which call it is for.
        return self._function.run(call, entry or self._found_in_trace(token, call))

    def _found_in_trace(self, token: object, call: Call) -> Entry:
        """What is known of a call that JAX traces for the program with this token."""
        placed = bool(self.args_placed)
        if not placed and any(is_foreign(x, self.mesh) for x in call.leaves):
            raise self._wrong_program()
        key = call_key(call)
        entry = self._entry(key, call)
        if entry.program is None:
            if jax.config.jax_disable_jit or (key.paths is not None and not placed):
                raise self._wrong_program()  # paths have to be compared at later calls
            pairs = zip(call.leaves, entry.arguments, strict=True)
            if (
                self.rules.any_explicit
                and not placed
                and not all(to is None or type_matches(x, to) for x, to in pairs)
            ):
                raise self._wrong_program()  # types are not right yet
        if self._program_of_key(call, entry).flat_function.__dict__['token'] is not token:
            raise self._wrong_program()
        return entry

    def _wrong_program(self) -> WrongProgram:
        return WrongProgram(self)


# The user's function runs below these, traced or not.
_users_code = HidingOurs(
    Dispatcher._in_trace.__code__, TracedFunction.run.__code__, TracedFunction.run_users.__code__
)

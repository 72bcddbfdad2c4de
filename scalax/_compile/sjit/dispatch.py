"""The dispatch of a call to the program that serves it.

A call passes through these stages. The next call of the same kind passes through the first stage only.

1. The generated caller (`caller`) tries `Dispatcher.fast_call`, and dispatches if there is none.
2. `Dispatcher.dispatch` decides whether the call runs inline, and goes through the other stages.
3. `Dispatcher._resolve` computes the `CallKey` of the leaves (`Call`), and resolves their shardings by the
   rules.
4. `Dispatcher._checked_program` checks the placement of the arguments, and finds the program of the key
   (`_program_for_key`). If the key is new, stages 5 and 6 come first.
5. `Dispatcher._trace` traces the user's function, which yields the jaxpr and the shardings of the outputs.
6. `Dispatcher._program_for_shardings` returns the program of these shardings. If they are new, it creates the
   ``jax.jit``.
7. `ResolvedCall.place` moves arguments to the shardings of the rules.
8. `Dispatcher._run` calls the program, and explains why if JAX rejects the call.

If the program that was tried raises, `Dispatcher.explain_or_retry` either raises an error that explains why,
or lets the caller dispatch.
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
from scalax._compile.sjit.find_batch import batch_paths, why_not_partitioned
from scalax._compile.sjit.program_table import (
    Program,
    ProgramTable,
    TraceCacheEntry,
    WrongProgram,
    compress,
    expand,
)
from scalax._compile.sjit.trace import TracedFunction, record, runs_inline
from scalax._compile.tracebacks import HideInternalFrames
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


class _ThreadState(threading.local):
    """The state of a thread that traces or runs a program of a function.

    As a context manager it marks code that traces or runs a program with placed arguments, or with types of
    placed arguments. Inside, a leaf may lack a sharding in its type only if JAX has to place it, such as data
    of other processes.

    Attributes:
        entry: the entry of the call that the thread is about to trace. It is None again once the user's
            function runs.
    """

    entry: TraceCacheEntry | None = None
    _depth = 0

    def __enter__(self) -> None:
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1

    def __bool__(self) -> bool:
        return self._depth > 0


class Dispatcher:
    """Finds or creates the program of each call. It is thread-safe.

    If several threads call the function with the same new key, one thread traces the user's code, as under
    ``jax.jit``, and the others wait for it. Calls with other keys do not wait.

    The helper and the user's function are held weakly, because a dispatcher may live as long as they do
    (`dispatcher_of`). Callers hold strong references.

    Attributes:
        fast_call: the only program, or a `ProgramTable`, which calls try first. None before the first call.
        programs: the programs, by their shardings.
        args_placed: marks code that traces or runs a program with placed arguments (`_ThreadState`).
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
            # Registers the processes: the exit of the program waits for their pending work.
            process_collectives.processes_of(self.mesh)
        self.args_placed = _ThreadState()
        # Re-entrant, because comparing keys may run users' code, which may call the function.
        self._lock = threading.RLock()
        # Programs refer to the dispatcher weakly, so that there is no reference cycle: a function without
        # references is freed at once, with the arrays that it closes over.
        self._weak: Dispatcher = weakref.proxy(self)
        self._warned = False
        self.clear()

    @property
    def helper(self) -> MeshOwner:
        """The helper of the mesh."""
        return self._function.helper

    def clear(self) -> None:
        """Forgets every program."""
        dispatcher = self._weak
        self._entries = functools.lru_cache(maxsize=lru_cache.SIZE)(TraceCacheEntry)
        self.programs: dict[Any, Program] = {}
        self._table = ProgramTable(
            lambda flat_args: dispatcher._existing_program(flat_args), lambda: dispatcher._wrong_program()
        )
        self.fast_call = None
        # Whether every call has to compare leaf paths, because tree structures do not determine them.
        self._compares_paths = False

    # Called by the generated caller -----------------------------------------------------------------

    def dispatch(self, flat_args: tuple[Any, ...]) -> Any:
        """Serves a call that no known program can serve."""
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
            resolved, entry = self._resolve(call)
            if jax.config.jax_disable_jit:  # the user's code runs with values, and nothing is traced
                return self._function.run(call, TraceCacheEntry(entry.key, resolved.shardings))
            # A new call has to be compiled, which may take long.
            task = f'compiling {self.signature.name}'
            with contextlib.nullcontext() if entry.outputs_checked else progress(task, _log):
                program = self._checked_program(resolved, entry)
                any_move, policy = resolved.typed is not call, resolved.policy
                placed_args = resolved.place(placement.move_leaves) if any_move else flat_args
                if any_move and (policy.moves_unplaced or policy.retypes_foreign):
                    self._place_host_data(resolved, program)
                self._table.add(flat_args, program)
                fast_call = self._table if len(self.programs) > 1 else program.call
                self.fast_call = None if self._compares_paths else fast_call
                return self._run(resolved, entry, placed_args)
        except Exception as error:
            self.rules.resolutions = self.rules.resolutions and []  # they hold the arguments
            _user_code.hide(error)
            raise

    def _require_devices(self) -> None:
        if not is_compiled():  # an enclosing jax.jit may lower for devices that are not attached
            meshes.require_devices(self.mesh, f'a call of {self.signature.name}')

    def explain_or_retry(self, error: Exception, fast_call: Any, flat_args: tuple[Any, ...]) -> bool:
        """Returns whether `dispatch` may serve a call that raised *error* in *fast_call*.

        Raises:
            ScalaxError: no program can serve the call, and the cause is known.
        """
        if isinstance(error, WrongProgram):
            return error.owner is self
        if _user_code.hide(error):
            return False
        if runs_inline(self.mesh):
            return True
        if not self._has_devices:
            self._require_devices()
        resolved, entry = self._resolve(Call(self.signature, flat_args))
        program = fast_call.find(flat_args) if isinstance(fast_call, ProgramTable) else None
        tried_call, right_program = program.call if program else fast_call, entry.program
        if right_program is None or right_program.call is not tried_call:
            # A runtime error comes from a run, which is not repeated. Other errors precede the trace.
            return not isinstance(error, jax.errors.JaxRuntimeError)
        if isinstance(error, ValueError) and placement.target_shardings(
            resolved.call.leaves, resolved.shardings, resolved.policy
        ):
            return True  # JAX rejected an argument that `dispatch` moves
        placement_errors.raise_known_cause(error, resolved)
        return False

    # Calls that are not run ---------------------------------------------------------------------------

    def prepare(self, flat_args: Sequence[Any]) -> tuple[Program, TraceCacheEntry, Sequence[Any]]:
        """Returns the program of a call that is not run, its entry, and the arguments of the program.

        Types replace the arguments that a call would move.

        Raises:
            ShardingError, StructureError: the rules do not match the arguments or the outputs.
            PlacementError: an argument is committed to another sharding.
        """
        with _user_code:
            call = placement.with_devices(
                Call(self.signature, flat_args), self.mesh, lambda call: self._resolve(call)[0].shardings
            )
            resolved, entry = self._resolve(call)
            program = self._checked_program(resolved, entry)
            return program, entry, resolved.place(placement.retype_leaves)

    def explain_propagation(self, flat_args: Sequence[Any]) -> PropagationReport:
        """Reports how a call is partitioned along its batch, without running it. Raises as `prepare` does."""
        # Imported here, because few programs need it.
        from scalax._spmd.report.explain import PropagationReport, make_propagation_report

        _, entry, _ = self.prepare(flat_args)
        name, mesh, step = self.signature.name, self.mesh.shape, entry.partitioned
        call, outside = Call(self.signature, flat_args), entry.gradient_outside
        if step is None or isinstance(step, str):
            reason = step or '; '.join(filter(None, why_not_partitioned(self.rules, call)))
            return PropagationReport(name, dict(mesh), reason=reason, gradient_outside=outside)
        return make_propagation_report(
            name, mesh, step, batch_paths(call, entry.batch), gradient_outside=outside
        )

    # Resolving a call, and filling in the entry of its key --------------------------------------------

    def _resolve(self, call: Call) -> tuple[ResolvedCall, TraceCacheEntry]:
        """Resolves the shardings of a call by the rules, and returns them with the entry of its key.

        Raises:
            ArgumentError: a leaf is not an array, or a static value cannot be hashed.
            ShardingError, StructureError: the rules do not match the arguments.
        """
        key = call_key(call)
        entry = self._entry(key, call)
        shardings = entry.argument_shardings
        if key.any_explicit:
            # In an outer trace JAX ignores in_shardings for values with a type of another mesh with Explicit
            # axes. Only if all axes of this mesh are Explicit does JAX reshard them.
            movable = AxisType.Auto not in self.mesh.axis_types
            placement_errors.reject_foreign_types(call, self.mesh, movable=movable)
        # jax.jit places host data itself, except in two cases: on Explicit axes types hold shardings, and
        # under a jax.set_mesh with other axis types JAX only finds the trace of placed arrays.
        ambient = jax.sharding.get_abstract_mesh()
        has_other_types = not ambient.empty and constraints.has_other_types(ambient, self.mesh)
        policy = ReshardPolicy(
            moves_unplaced=self.rules.any_explicit or has_other_types,
            moves_mismatched=self.options.on_mismatch == 'reshard',
            retypes_foreign=key.any_explicit and not self.rules.any_explicit,
        )
        typed = call
        if any(policy):
            typed_args = placement.place_arguments(call, shardings, policy, placement.retype_leaves)
            if typed_args is not call.flat_args:
                # Types may hold shardings, so the key is computed from the types after the move.
                typed = Call(self.signature, typed_args)
                entry = self._entry(call_key(typed), typed, shardings)
        called_before = bool(self.programs)
        return ResolvedCall(self.rules, call, shardings, policy, typed, called_before), entry

    def _entry(self, key: CallKey, call: Call, shardings: Shardings | None = None) -> TraceCacheEntry:
        """Returns the entry of a key, with the shardings of the arguments.

        Args:
            key: the key.
            call: the call.
            shardings: the shardings of the arguments, or None to resolve them by the rules.
        """
        with self._lock:  # one thread creates the entry
            entry: TraceCacheEntry = self._entries(key)
        if entry.argument_shardings is None:
            arguments = self.rules.arguments(call) if shardings is None else shardings
            with self._lock:  # rules may give threads different answers, of which one is used
                if entry.argument_shardings is None:
                    entry.argument_shardings = arguments
        return entry

    def _existing_program(self, flat_args: Sequence[Any]) -> Program | None:
        """Returns the program of a call if it exists."""
        return self._resolve(Call(self.signature, flat_args))[1].program

    def _checked_program(self, resolved: ResolvedCall, entry: TraceCacheEntry) -> Program:
        """Returns the program of a call after checking the placement of its arguments."""
        if any(map(self.rules.is_misplaced, resolved.call.leaves, resolved.shardings)):
            placement_errors.reject_mismatched(resolved)
        # The trace uses the types of the moved arguments: nothing moves before all rules have been checked.
        with self.args_placed:
            return self._program_for_key(resolved.typed, entry)

    def _program_for_key(self, call: Call, entry: TraceCacheEntry) -> Program:
        """Returns the program of a key. A new program is created by one thread, and others wait for it."""
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
            program = self._program_for_shardings(call, entry, flat_function)
            if self.options.annotation_shardings:
                self._function.warn_unused(any_static=bool(call.layout.static))
            if self.options.partitioning is not None and entry.partitioned is None:
                self._warn_not_partitioned(call)
            resolutions, self.rules.resolutions = self.rules.resolutions, None
            if resolutions and True in [resolution.any_replicated for resolution in resolutions]:
                warn_unsharded(self.signature.name, resolutions, self.mesh.shape)
            self._compares_paths |= entry.key.paths is not None
            entry.program = program
            return program

    def _warn_not_partitioned(self, call: Call) -> None:
        """Warns, once, that the option `partitioning` has no effect on a call without a batch."""
        reason, remedy = why_not_partitioned(self.rules, call)
        if self._warned or not remedy or self.mesh.size == 1:
            return
        self._warned = True
        warn(
            f'{self.signature.name}: partitioning={self.options.partitioning} has no effect: {reason}. It '
            'runs as jax.jit runs it, and the compiler alone decides how activations are sharded.\n'
            f'What to do: {remedy}.',
            PartitioningWarning,
        )

    @with_stack_space
    def _trace(self, call: Call, entry: TraceCacheEntry) -> Callable[..., Any]:
        """Traces the user's function, records the trace in *entry*, and returns the function to jit."""
        # An earlier trace may have failed after setting some of these.
        entry.output_shardings, entry.jaxpr, entry.constrains_outputs = None, None, False
        flat_function = self._flat_function(call.layout)
        self.args_placed.entry = entry
        # The program jits the same function object, so that JAX finds this trace again.
        try:
            traced = jax.jit(flat_function, static_argnums=call.layout.static).trace(*call.flat_args)
        except jax.errors.TracerBoolConversionError as error:
            placement_errors.add_flags_note(error, call)
            raise
        finally:
            self.args_placed.entry = None
        record(entry, traced)
        entry.constrains_outputs = not self._jax_knows_devices(traced.jaxpr, entry)
        axes = sorted(entry.batch.batch_axes) if entry.batch else ()
        corrected = apply_workarounds(
            traced.jaxpr, self.mesh, axes, name=self.signature.name, can_change=entry.jaxpr is not None
        )
        if corrected is not traced.jaxpr:
            entry.jaxpr = corrected
        # If the outputs or the jaxpr have changed, JAX must not find this trace again.
        has_changed = entry.constrains_outputs or corrected is not traced.jaxpr
        return self._flat_function(call.layout) if has_changed else flat_function

    def _jax_knows_devices(self, jaxpr: Any, entry: TraceCacheEntry) -> bool:
        """Whether JAX can determine the devices of a program, or the program does not use the mesh.

        JAX takes the devices from the outputs' shardings, from arguments that an output depends on, and from
        the mesh of a `shard_map` that computes the outputs, as in a partitioned step.
        """
        outputs = entry.output_shardings or ()
        if self.rules.any_explicit or any(outputs):
            return True
        is_partitioned = entry.partitioned is not None and not isinstance(entry.partitioned, str)
        if is_partitioned and outputs and isinstance(self.mesh, Mesh):
            return True
        if not names_mesh(jaxpr, self.mesh):
            return True
        is_sharded = [sharding is not None for sharding in entry.argument_shardings]
        num_captured = len(jaxpr.in_avals) - len(is_sharded)  # values of an outer trace
        dependence = BatchDependence(jaxpr, [*[False] * num_captured, *is_sharded], definite_only=True)
        return any(is_sharded) and any(dependence.result_depends)

    def _program_for_shardings(
        self, call: Call, entry: TraceCacheEntry, flat_function: Callable[..., Any]
    ) -> Program:
        """Returns the program that has the shardings of a trace. A new program jits *flat_function*."""
        assert entry.output_shardings is not None
        arguments = tuple(
            map(compress, call.treedefs.values(), call.by_slot(entry.argument_shardings).values())
        )
        outputs = compress(entry.out_tree, entry.output_shardings)
        shardings = call.layout, arguments, outputs, entry.constrains_outputs
        program = self.programs.get(shardings)
        if program is None:
            options = dict(self.options.jit_kwargs)
            if outputs is not None:
                options['out_shardings'] = expand(outputs)
            elif self.rules.any_explicit or (entry.constrains_outputs and not entry.out_tree.num_leaves):
                # JAX drops arguments that no output depends on, and could then not determine the devices.
                options.setdefault('keep_unused', True)
            new_program = Program(
                self.signature,
                call.layout,
                flat_function,
                arguments,
                options,
                on_several_devices=self.mesh.size > 1,
            )
            if len(self.programs) >= lru_cache.SIZE:
                self.programs.clear()
            program = self.programs.setdefault(shardings, new_program)
        return program

    # Running the program -------------------------------------------------------------------------

    def _place_host_data(self, resolved: ResolvedCall, program: Program) -> None:
        """Makes a program place host data in the slots of a call from now on."""
        call, policy = resolved.call, resolved.policy._replace(moves_mismatched=False)
        leaves, shardings = call.by_slot(call.leaves), call.by_slot(resolved.shardings)
        host_data_shardings = {
            slot: compress(treedef, shardings[slot])
            for slot, treedef in call.treedefs.items()
            if placement.target_shardings(leaves[slot], shardings[slot], policy)
        }
        program.place_host_data(host_data_shardings, policy)

    def _run(self, resolved: ResolvedCall, entry: TraceCacheEntry, placed_args: Sequence[Any]) -> Any:
        assert entry.program is not None
        with self.args_placed:
            self.args_placed.entry = entry  # JAX may trace again, if another thread has cleared its cache
            try:
                outputs = entry.program.call(*placed_args)
            except (ValueError, jax.errors.JaxRuntimeError) as error:
                if not _user_code.hide(error):
                    placement_errors.raise_known_cause(error, resolved)
                raise
            finally:
                self.args_placed.entry = None
        if not entry.outputs_checked:
            entry.outputs_checked = True
            if self.mesh.size > 1 and any(map(is_single_device, jax.tree.leaves(outputs))):
                placement_errors.warn_single_device_outputs(resolved.call, resolved.shardings, outputs)
        return outputs

    # Traced by JAX -----------------------------------------------------------------------------------

    def _flat_function(self, layout: CallLayout) -> Callable[..., Any]:
        """Returns a new function of slots, with a token that identifies its program."""
        dispatcher, token = self._weak, object()

        def flat_function(*flat_args: Any) -> Any:
            return dispatcher._run_in_trace(token, layout, flat_args)

        flat_function.__dict__['token'] = token
        return self._function.with_user_metadata(flat_function, layout)

    def _run_in_trace(self, token: object, layout: CallLayout, flat_args: Sequence[Any]) -> Any:
        """Runs the user's function inside the trace of the program with this token.

        Raises:
            WrongProgram: the call needs another program.
        """
        if len(flat_args) != len(layout.names):  # another number of extra positional arguments
            raise self._wrong_program()
        ambient = jax.sharding.get_abstract_mesh()
        if not ambient.empty and runs_inline(self.mesh) and (not self.args_placed or ambient.manual_axes):
            raise self._wrong_program()
        call, entry = Call(self.signature, flat_args), self.args_placed.entry
        self.args_placed.entry = None
        # A trace that JAX started by itself, such as for numpy data, has no entry yet.
        return self._function.run(call, entry or self._entry_in_trace(token, call))

    def _entry_in_trace(self, token: object, call: Call) -> TraceCacheEntry:
        """Returns the entry of a call that JAX traces for the program with this token.

        Raises:
            WrongProgram: the call needs another program.
        """
        placed = bool(self.args_placed)
        if not placed and any(is_foreign(x, self.mesh) for x in call.leaves):
            raise self._wrong_program()
        key = call_key(call)
        entry = self._entry(key, call)
        if entry.program is None:
            if jax.config.jax_disable_jit or (key.paths is not None and not placed):
                raise self._wrong_program()  # later calls have to compare paths
            pairs = zip(call.leaves, entry.argument_shardings, strict=True)
            if (
                self.rules.any_explicit
                and not placed
                and not all(sharding is None or type_matches(leaf, sharding) for leaf, sharding in pairs)
            ):
                raise self._wrong_program()  # the arguments have to be placed first
        if self._program_for_key(call, entry).flat_function.__dict__['token'] is not token:
            raise self._wrong_program()
        return entry

    def _wrong_program(self) -> WrongProgram:
        return WrongProgram(self)


# The user's function runs inside of these functions, traced or not.
_user_code = HideInternalFrames(
    Dispatcher._run_in_trace.__code__, TracedFunction.run.__code__, TracedFunction.run_user_function.__code__
)

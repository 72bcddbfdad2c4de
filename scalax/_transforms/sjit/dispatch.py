"""Which program serves a call? The state of one sjit function: its programs and recordings."""

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
from scalax._transforms.sjit.choice import Chooser
from scalax._transforms.sjit.program import Known, Program, ShardingKey, WrongProgram, compress
from scalax._transforms.sjit.replay import Recordings
from scalax._transforms.sjit.trace import TracedFunction, TraceShardings, reject_other_devices
from scalax._transforms.tracebacks import arose_below, hide_ours
from scalax._util.lru_cache import Recent


@dataclasses.dataclass(frozen=True, eq=False)
class Resolved:
    """One signature with its program.

    Attributes:
        program: the program that serves it.
        inside: the shardings of its arguments and outputs.
        out_tree: the structure of the outputs.
    """

    program: Program
    inside: TraceShardings
    out_tree: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """One call, looked at: its row and layout, the shardings of its arguments, and its signature.

    The signature is that of the arguments where the rules want them.
    """

    flat_args: Sequence[Any]
    layout: CallLayout
    arguments: Mapping[int, Shardings]
    key: CallKey


class Dispatcher:
    """Finds or makes the program of each call. Safe to use from many threads.

    Threads that meet a new signature together trace the user's code once, as under ``jax.jit``: one does, and
    the others wait for it. What other signatures need is held up by nobody.

    The helper and the user's function are held weakly, because this may live as long as they do
    (`_shared`): whoever calls holds them.

    Attributes:
        fast_call: what calls try first: the only program, or one that chooses; None before the first call.
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
        self.resolved: Recent[CallKey, Resolved] = Recent()
        self.programs: Recent[ShardingKey, Program] = Recent()
        self._arguments: Recent[CallKey, Mapping[int, Shardings]] = Recent()
        self._turns: Recent[CallKey, Any] = Recent()
        self._inlined: dict[CallLayout, Any] = {}
        self.function.recordings = Recordings()
        self.fast_call = None

    # What the generated caller runs -----------------------------------------------------------------

    def explain_or_retry(self, error: Exception, fast_call: Any, flat_args: tuple[Any, ...]) -> bool:
        """Whether *error* only means that *hot* cannot serve this call, and `slow` may.

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
            reject_other_devices(self.signature.name, self.helper.mesh)
        call = self._look(flat_args)
        # A run that failed has used up what was donated to it; of what was deleted before JAX says the same
        # again.
        if placement_errors.any_deleted(flat_args) and _fails_alike(error, fast_call, flat_args):
            placement_errors.reject_deleted(self.signature, call.layout, flat_args)
        if refusal:
            self._reject_elsewhere(call.layout, flat_args, call.arguments)
        known = self.resolved.get(call.key)
        program = fast_call.program(flat_args) if isinstance(fast_call, Chooser) else None
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

    def dispatch(self, flat_args: tuple[Any, ...]) -> Any:
        """Serves a call that the hot program cannot serve."""
        try:
            return self._serve(flat_args)
        except Exception as error:
            if _arose_inside(error):
                hide_ours(error)
            raise

    def _serve(self, flat_args: tuple[Any, ...]) -> Any:
        layout = self.signature.layout(self.signature.extras_of(flat_args))
        if self._runs_inline():
            return self._inline(layout, flat_args)
        if self._retyped_at_once():
            return self._inline_compiled(layout)(*flat_args)
        meshes.require_devices(self.helper.mesh, f'a call of {self.signature.name}')
        placement_errors.reject_deleted(self.signature, layout, flat_args)
        if jax.config.jax_disable_jit:  # the user's lines run with values, and nothing is traced
            call = self._look(flat_args)
            inside = TraceShardings(call.arguments, self.rules.constraints(layout, flat_args))
            return self.function.run(call.key, layout, flat_args, inside)
        resolved, placed = self._resolve(flat_args, placement.moved)
        program = resolved.program
        moves = self._moves(mismatched=False)
        if moves.unplaced or moves.foreign:
            slots = placement.slots_to_place(flat_args, resolved.inside.arguments, moves)
            program.place_first(slots, moves)
        assert program.call is not None  # a resolved signature has a compiled program
        self.fast_call = self._fastest(program.call)
        with self._placing:
            try:
                outputs = program.call(*placed)
            except (ValueError, jax.errors.JaxRuntimeError) as error:
                if not _arose_inside(error):
                    self._explain(error, layout, flat_args, resolved.inside.arguments)
                raise
        if not resolved.inside.looked_at:
            resolved.inside.looked_at = True
            placement_errors.warn_left_alone(self.signature, flat_args, resolved.inside.arguments, outputs)
        return outputs

    def _explain(
        self,
        error: Exception,
        layout: CallLayout,
        flat_args: Sequence[Any],
        arguments: Mapping[int, Shardings],
    ) -> None:
        """Raises a better error where the right program has refused a call."""
        if isinstance(error, ValueError):
            reject_other_devices(self.signature.name, self.helper.mesh)
            self._reject_elsewhere(layout, flat_args, arguments)
            if self.options.on_mismatch == 'error':
                placement_errors.reject_refused(self.signature, layout, flat_args, arguments)
        placement_errors.reject_donated_twice(self.signature, layout, flat_args, error)

    def _runs_inline(self) -> bool:
        """Whether a call is part of a function that has mesh axes of other types than the helper's.

        Inside `auto_axes` and `explicit_axes`, and inside shard_map, where shapes are local, too.
        """
        mesh = self.helper.mesh
        return _inside_manual_region() or constraints.mesh_in_force(mesh) is not mesh

    def _retyped_at_once(self) -> bool:
        """Whether JAX's own auto_axes or explicit_axes, which nothing compiles, runs this.

        Then axes have other types than those of a ``jax.set_mesh``.
        """
        ambient = jax.sharding.get_abstract_mesh()
        return (
            constraints.has_other_types(ambient, self.helper.mesh)
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
            return self.function.run(key, layout, flat_args, None)
        mesh = constraints.mesh_in_force(self.helper.mesh)
        rules = ArgumentShardings(self.helper, self.signature, self.options, mesh)
        arguments, sharded = rules.arguments(layout, flat_args), list(flat_args)
        for asked in (arguments, rules.constraints(layout, flat_args)):
            for slot, shardings in asked.items():
                sharded[slot] = constraints.apply_shardings(sharded[slot], shardings)
        outputs = self.function.run(key, layout, sharded, None)
        return constraints.apply_shardings(outputs, rules.outputs(outputs, layout, flat_args, arguments))

    def _fastest(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """What the next calls try first: the only program there is, or one that chooses."""
        cases = [(known.program.layout, s, known.program) for s, known in self.resolved.items()]
        if len({id(program) for _, _, program in cases}) < 2:  # none, if another thread has cleared them
            return call
        this = self._weak
        return Chooser(cases, lambda flat_args: this._look(flat_args).key, lambda: this._miss())

    def _miss(self) -> WrongProgram:
        return WrongProgram(self, self.signature.name, other_types=self._runs_inline())

    # Resolving ---------------------------------------------------------------------------------------

    def _look(self, flat_args: Sequence[Any]) -> Call:
        """Reads a call.

        Raises:
            ArgumentError: leaves that are not arrays, a static value that cannot be hashed, or options that
                name arguments which the call does not have.
            ShardingError, StructureError: the rules do not fit the arguments.
        """
        self.signature.reject_misnamed(flat_args)
        layout = self.signature.layout(self.signature.extras_of(flat_args))
        given = call_key(self.signature, layout, flat_args)
        arguments = self._arguments.get(given)
        if arguments is None:
            arguments = self.rules.arguments(layout, flat_args)
            self._arguments.put(given, arguments)
        if self._refuses_foreign:
            # JAX reshards to another mesh where all axes are Explicit.
            movable = AxisType.Auto not in self.helper.mesh.axis_types
            placement_errors.reject_foreign_types(
                self.signature, layout, flat_args, self.helper.mesh, movable=movable
            )
        moved = self._placed(flat_args, arguments, placement.as_moved)
        if any(one is not other for one, other in zip(moved, flat_args, strict=True)):
            # Types may hold shardings: what counts is what they will be.
            given = call_key(self.signature, layout, moved)
        return Call(flat_args, layout, arguments, given)

    def _moves(self, mismatched: bool | None = None) -> placement.Moves:
        """Which arguments are moved at a call; *mismatched* by the option of the user."""
        # On Explicit axes types say how arrays are placed. Under a jax.set_mesh of other types only what is
        # placed finds its trace again. Elsewhere jax.jit places them.
        ambient = jax.sharding.get_abstract_mesh()
        unplaced = self.rules.any_explicit or constraints.has_other_types(ambient, self.helper.mesh)
        if mismatched is None:
            mismatched = self.options.on_mismatch == 'reshard'
        foreign = self._refuses_foreign and not self.rules.any_explicit
        return placement.Moves(unplaced, mismatched, foreign)

    def _placed(
        self, flat_args: Sequence[Any], arguments: Mapping[int, Shardings], move: placement.Move
    ) -> list[Any]:
        return placement.place(flat_args, arguments, self._moves(), move)

    def resolve(self, flat_args: Sequence[Any]) -> tuple[Resolved, Sequence[Any]]:
        """The program of a call that is not run, and the call's row as moved arguments would be.

        Raises:
            ShardingError, StructureError: the rules do not fit the arguments or the outputs.
            PlacementError: an argument is committed to another sharding.
        """
        try:
            return self._resolve(flat_args, placement.as_moved)
        except Exception as error:
            if _arose_inside(error):
                hide_ours(error)
            raise

    def _resolve(self, flat_args: Sequence[Any], move: placement.Move) -> tuple[Resolved, Sequence[Any]]:
        call = self._look(flat_args)
        if self.options.on_mismatch == 'error':
            self._reject_mismatched(call)
        known = self.resolved.get(call.key)
        if known is None:
            # Traced with what the arguments will be: nothing moves before all rules are known to fit.
            as_moved = self._placed(flat_args, call.arguments, placement.as_moved)
            with self._placing:
                known = self._new(dataclasses.replace(call, flat_args=as_moved))
        return known, self._placed(flat_args, call.arguments, move)

    def _reject_mismatched(self, call: Call) -> None:
        placement_errors.reject_mismatched(
            self.signature,
            call.layout,
            call.flat_args,
            call.arguments,
            self.rules.any_rule,
            returned=self.options.out_shardings is None and bool(self.resolved.items()),
        )

    def _reject_elsewhere(
        self, layout: CallLayout, flat_args: Sequence[Any], arguments: Mapping[int, Shardings]
    ) -> None:
        placement_errors.reject_elsewhere(self.signature, layout, flat_args, arguments, self.helper.mesh)

    def _new(self, call: Call) -> Resolved:
        """Resolves a signature that was never seen, or waits for the thread that does."""
        # Re-entrant: a function that calls itself is told so. Two threads wait for one another only if what
        # they trace calls itself by way of the other's, which no single thread could trace either.
        with self._turns.add(call.key, threading.RLock()):
            return self.resolved.get(call.key) or self._traced(call)

    def _traced(self, call: Call) -> Resolved:
        """Traces the user's code for a signature, and finds its program."""
        flat_args, layout, key = call.flat_args, call.layout, call.key
        inside = TraceShardings(call.arguments, self.rules.constraints(layout, flat_args))
        program = self._program(layout)
        program.known.put(key, inside)
        # The same function object as in the program below: JAX finds this trace again there.
        jitted = jax.jit(program.inner, static_argnums=layout.static)
        traced = self.function.recordings.record(key, jitted, flat_args, len(key.types))
        assert inside.outputs is not None  # the trace has set them
        forms = tuple(compress(jax.tree.structure(flat_args[i]), call.arguments[i]) for i in layout.dynamic)
        outputs = compress(traced.out_tree, inside.outputs)
        shape = ShardingKey(layout, forms, outputs, checked=key.paths is not None)
        known = self.programs.get(shape)
        if known is None:
            kwargs = self.options.jit_kwargs
            if self.rules.any_explicit and shape.outputs is None:
                # Outputs may depend on no argument, and JAX would drop what says on which devices to run.
                kwargs = {'keep_unused': True, **kwargs}
            program.compile(shape, self.signature, self.helper.mesh.size, kwargs)
            known = self.programs.add(shape, program)
        if key.paths is not None:
            this = self._weak
            known.check_paths(key.paths, lambda: this._miss())
        # What was found serves, whatever another thread has cleared since: this one may not be compiled.
        known.known.put(key, inside)
        self.function.warn_unused(layout)
        return self.resolved.add(key, Resolved(known, inside, traced.out_tree))

    # The traced function -----------------------------------------------------------------------------

    def _program(self, layout: CallLayout) -> Program:
        this, known = self._weak, Known()

        def inner(*flat_args: Any) -> Any:
            return this._inside(known, layout, flat_args)

        inner.__name__ = inner.__qualname__ = self.signature.name
        inner.__dict__['__signature__'] = self.signature.flat_signature(layout)
        inner.__dict__['__wrapped__'] = self._source  # where JAX's messages point
        return Program(layout, inner, known)

    def _inside(self, mine: Known, layout: CallLayout, flat_args: Sequence[Any]) -> Any:
        """What JAX traces of a program."""
        if len(flat_args) != len(layout.slots):  # another number of extra positional arguments
            raise self._miss()
        if _inside_manual_region() or (self._runs_inline() and not self._placing):
            raise self._miss()
        if (
            not self._placing
            and self._refuses_foreign
            and placement_errors.any_foreign(flat_args, self.rules.mesh)
        ):
            raise self._miss()
        key = call_key(self.signature, layout, flat_args)
        inside = mine.get(key)
        if inside is None:
            if key.paths is not None and not self._placing:
                raise self._miss()  # the next calls are to come by way of a check
            known = None if jax.config.jax_disable_jit else self._joining(layout, flat_args, key)
            if known is None or known.program.known is not mine:
                raise self._miss()
            inside = known.inside
        return self.function.run(key, layout, flat_args, inside)

    def _joining(self, layout: CallLayout, flat_args: Sequence[Any], key: CallKey) -> Resolved | None:
        """A signature that some program was tried for, resolved; None if its types are not right yet."""
        known = self.resolved.get(key)
        if known is not None:
            return known
        arguments = self.rules.arguments(layout, flat_args)
        if self.rules.any_explicit and not self._placing and not placement.all_typed(flat_args, arguments):
            return None
        return self._new(Call(flat_args, layout, arguments, key))


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
    # What is not traced runs as a body alone.
    return arose_below(error, Dispatcher._inside.__code__, TracedFunction.run.__code__)

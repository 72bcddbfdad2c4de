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
from scalax._transforms.calls.boundaries import Boundary, Options
from scalax._transforms.calls.conventions import Convention, Layout
from scalax._transforms.calls.placement import Shardings
from scalax._transforms.calls.signatures import Signature, signature_of
from scalax._transforms.sjit.choice import Chooser
from scalax._transforms.sjit.program import Known, Missed, Program, Shape, collapsed
from scalax._transforms.sjit.replay import Recordings
from scalax._transforms.sjit.trace import Body, Inside, reject_other_devices
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
    inside: Inside
    out_tree: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """One call, looked at: its row and layout, the shardings of its arguments, and its signature.

    The signature is that of the arguments where the rules want them.
    """

    row: Sequence[Any]
    layout: Layout
    arguments: Mapping[int, Shardings]
    signature: Signature


class State:
    """Finds or makes the program of each call. Safe to use from many threads.

    Threads that meet a new signature together trace the user's code once, as under ``jax.jit``: one does, and
    the others wait for it. What other signatures need is held up by nobody.

    The helper and the user's function are held weakly, because this may live as long as they do
    (`_shared`): whoever calls holds them.

    Attributes:
        hot: what calls try first: the program that the last ones used, or one that chooses.
    """

    hot: Callable[..., Any]

    def __init__(
        self,
        helper: contexts.MeshOwner,
        fun: Callable[..., Any],
        convention: Convention,
        options: Options,
    ) -> None:
        self.convention, self.options = convention, options
        self.boundary = Boundary(helper, convention, options)
        self.body = Body(fun, self.boundary)
        self._source = _source_of(fun)
        # Over types of another mesh with Explicit axes JAX ignores shardings, inside of another function.
        self._refuses_foreign = (
            self.boundary.any_explicit or self.boundary.any_rule or options.out_shardings is not None
        )
        self._placing = _Placing()
        # What is kept here, and refers to this in turn, does so by this: a function that nobody holds any
        # longer goes at once, with the arrays that it closes over.
        self._weak: State = weakref.proxy(self)
        self.clear()

    @property
    def helper(self) -> contexts.MeshOwner:
        """Whose mesh it is."""
        return self.boundary.helper

    def clear(self) -> None:
        """Forgets every program."""
        self.resolved: Recent[Signature, Resolved] = Recent()
        self.programs: Recent[Shape, Program] = Recent()
        self._arguments: Recent[Signature, Mapping[int, Shardings]] = Recent()
        self._turns: Recent[Signature, Any] = Recent()
        self._inlined: dict[Layout, Any] = {}
        self.body.recordings = Recordings()
        self.hot = self._nothing_yet()

    def _nothing_yet(self) -> Callable[..., Any]:
        this = self._weak

        def nothing_yet(*row: Any) -> Any:
            raise this._miss()

        return nothing_yet

    # What the generated caller runs -----------------------------------------------------------------

    def missed(self, error: Exception, hot: Any, row: tuple[Any, ...]) -> bool:
        """Whether *error* only means that *hot* cannot serve this call, and `slow` may.

        Raises:
            ScalaxError: nothing can serve the call, and we can say better why.
        """
        if isinstance(error, Missed):
            return error.owner is self
        if _arose_inside(error):
            hide_ours(error)
            return False  # it comes from the user's code, or says what is wrong with the call
        if self._runs_inline():
            return True
        refusal = isinstance(error, ValueError)  # how JAX says what it does not take
        if refusal:
            reject_other_devices(self.convention.name, self.helper.mesh)
        call = self._look(row)
        # A run that failed has used up what was donated to it; of what was deleted before JAX says the same
        # again.
        if placement_errors.any_deleted(row) and _fails_alike(error, hot, row):
            placement_errors.reject_deleted(self.convention, call.layout, row)
        if refusal:
            self._reject_elsewhere(call.layout, row, call.arguments)
        known = self.resolved.get(call.signature)
        program = hot.program(row) if isinstance(hot, Chooser) else None
        used = program.call if program else hot
        if known is None or known.program.call is not used:
            return not isinstance(error, jax.errors.JaxRuntimeError)  # JAX refused the call before tracing it
        if self.options.on_mismatch == 'error':
            self._reject_mismatched(call)
            if refusal:
                placement_errors.reject_refused(self.convention, call.layout, row, call.arguments)
        elif placement_errors.any_mismatched(row, call.arguments) or (
            refusal and placement_errors.any_refused(row, call.arguments)
        ):
            return True
        placement_errors.reject_donated_twice(self.convention, call.layout, row, error)
        return False

    def slow(self, row: tuple[Any, ...]) -> Any:
        """Serves a call that the hot program cannot serve."""
        try:
            return self._serve(row)
        except Exception as error:
            if _arose_inside(error):
                hide_ours(error)
            raise

    def _serve(self, row: tuple[Any, ...]) -> Any:
        layout = self.convention.layout(self.convention.extras_of(row))
        if self._runs_inline():
            return self._inline(layout, row)
        if self._retyped_at_once():
            return self._inline_compiled(layout)(*row)
        meshes.require_devices(self.helper.mesh, f'a call of {self.convention.name}')
        placement_errors.reject_deleted(self.convention, layout, row)
        if jax.config.jax_disable_jit:  # the user's lines run with values, and nothing is traced
            call = self._look(row)
            inside = Inside(call.arguments, self.boundary.constraints(layout, row))
            return self.body.run(call.signature, layout, row, inside)
        resolved, placed = self._resolve(row, placement.moved)
        program = resolved.program
        moves = self._moves(mismatched=False)
        if moves.unplaced or moves.foreign:
            slots = placement.slots_to_place(row, resolved.inside.arguments, moves)
            program.place_first(slots, moves)
        assert program.call is not None  # a resolved signature has a compiled program
        self.hot = self._hottest(program.call)
        with self._placing:
            try:
                outputs = program.call(*placed)
            except (ValueError, jax.errors.JaxRuntimeError) as error:
                if not _arose_inside(error):
                    self._explain(error, layout, row, resolved.inside.arguments)
                raise
        if not resolved.inside.looked_at:
            resolved.inside.looked_at = True
            placement_errors.warn_left_alone(self.convention, row, resolved.inside.arguments, outputs)
        return outputs

    def _explain(
        self, error: Exception, layout: Layout, row: Sequence[Any], arguments: Mapping[int, Shardings]
    ) -> None:
        """Raises a better error where the right program has refused a call."""
        if isinstance(error, ValueError):
            reject_other_devices(self.convention.name, self.helper.mesh)
            self._reject_elsewhere(layout, row, arguments)
            if self.options.on_mismatch == 'error':
                placement_errors.reject_refused(self.convention, layout, row, arguments)
        placement_errors.reject_donated_twice(self.convention, layout, row, error)

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

    def _inline_compiled(self, layout: Layout) -> Any:
        """`_inline`, in a program of its own."""
        this = self._weak

        def inline(*row: Any) -> Any:
            return this._inline(layout, row)

        inline.__name__ = inline.__qualname__ = self.convention.name
        compiled = jax.jit(inline, static_argnums=layout.static)
        return self._inlined.setdefault(layout, compiled)

    def _inline(self, layout: Layout, row: Sequence[Any]) -> Any:
        """Runs the user's function where it is called, by the types that mesh axes have there."""
        signature = signature_of(self.convention, layout, row)
        if _inside_manual_region():
            return self.body.run(signature, layout, row, None)
        mesh = constraints.mesh_in_force(self.helper.mesh)
        boundary = Boundary(self.helper, self.convention, self.options, mesh)
        arguments, sharded = boundary.arguments(layout, row), list(row)
        for asked in (arguments, boundary.constraints(layout, row)):
            for slot, shardings in asked.items():
                sharded[slot] = constraints.apply_shardings(sharded[slot], shardings)
        outputs = self.body.run(signature, layout, sharded, None)
        return constraints.apply_shardings(outputs, boundary.outputs(outputs, layout, row, arguments))

    def _hottest(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """What the next calls try first: the only program there is, or one that chooses."""
        cases = [(known.program.layout, s, known.program) for s, known in self.resolved.items()]
        if len({id(program) for _, _, program in cases}) < 2:  # none, if another thread has cleared them
            return call
        this = self._weak
        return Chooser(cases, lambda row: this._look(row).signature, lambda: this._miss())

    def _miss(self) -> Missed:
        return Missed(self, self.convention.name, other_types=self._runs_inline())

    # Resolving ---------------------------------------------------------------------------------------

    def _look(self, row: Sequence[Any]) -> Call:
        """Reads a call.

        Raises:
            ArgumentError: leaves that are not arrays, a static value that cannot be hashed, or options that
                name arguments which the call does not have.
            ShardingError, StructureError: the rules do not fit the arguments.
        """
        self.convention.reject_misnamed(row)
        layout = self.convention.layout(self.convention.extras_of(row))
        given = signature_of(self.convention, layout, row)
        arguments = self._arguments.get(given)
        if arguments is None:
            arguments = self.boundary.arguments(layout, row)
            self._arguments.put(given, arguments)
        if self._refuses_foreign:
            # JAX reshards to another mesh where all axes are Explicit.
            movable = AxisType.Auto not in self.helper.mesh.axis_types
            placement_errors.reject_foreign_types(
                self.convention, layout, row, self.helper.mesh, movable=movable
            )
        moved = self._placed(row, arguments, placement.as_moved)
        if any(one is not other for one, other in zip(moved, row, strict=True)):
            # Types may hold shardings: what counts is what they will be.
            given = signature_of(self.convention, layout, moved)
        return Call(row, layout, arguments, given)

    def _moves(self, mismatched: bool | None = None) -> placement.Moves:
        """Which arguments are moved at a call; *mismatched* by the option of the user."""
        # On Explicit axes types say how arrays are placed. Under a jax.set_mesh of other types only what is
        # placed finds its trace again. Elsewhere jax.jit places them.
        ambient = jax.sharding.get_abstract_mesh()
        unplaced = self.boundary.any_explicit or constraints.has_other_types(ambient, self.helper.mesh)
        if mismatched is None:
            mismatched = self.options.on_mismatch == 'reshard'
        foreign = self._refuses_foreign and not self.boundary.any_explicit
        return placement.Moves(unplaced, mismatched, foreign)

    def _placed(
        self, row: Sequence[Any], arguments: Mapping[int, Shardings], move: placement.Move
    ) -> list[Any]:
        return placement.place(row, arguments, self._moves(), move)

    def resolve(self, row: Sequence[Any]) -> tuple[Resolved, Sequence[Any]]:
        """The program of a call that is not run, and the call's row as moved arguments would be.

        Raises:
            ShardingError, StructureError: the rules do not fit the arguments or the outputs.
            PlacementError: an argument is committed to another sharding.
        """
        try:
            return self._resolve(row, placement.as_moved)
        except Exception as error:
            if _arose_inside(error):
                hide_ours(error)
            raise

    def _resolve(self, row: Sequence[Any], move: placement.Move) -> tuple[Resolved, Sequence[Any]]:
        call = self._look(row)
        if self.options.on_mismatch == 'error':
            self._reject_mismatched(call)
        known = self.resolved.get(call.signature)
        if known is None:
            # Traced with what the arguments will be: nothing moves before all rules are known to fit.
            as_moved = self._placed(row, call.arguments, placement.as_moved)
            with self._placing:
                known = self._new(dataclasses.replace(call, row=as_moved))
        return known, self._placed(row, call.arguments, move)

    def _reject_mismatched(self, call: Call) -> None:
        placement_errors.reject_mismatched(
            self.convention,
            call.layout,
            call.row,
            call.arguments,
            self.boundary.any_rule,
            returned=self.options.out_shardings is None and bool(self.resolved.items()),
        )

    def _reject_elsewhere(
        self, layout: Layout, row: Sequence[Any], arguments: Mapping[int, Shardings]
    ) -> None:
        placement_errors.reject_elsewhere(self.convention, layout, row, arguments, self.helper.mesh)

    def _new(self, call: Call) -> Resolved:
        """Resolves a signature that was never seen, or waits for the thread that does."""
        # Re-entrant: a function that calls itself is told so. Two threads wait for one another only if what
        # they trace calls itself by way of the other's, which no single thread could trace either.
        with self._turns.add(call.signature, threading.RLock()):
            return self.resolved.get(call.signature) or self._traced(call)

    def _traced(self, call: Call) -> Resolved:
        """Traces the user's code for a signature, and finds its program."""
        row, layout, signature = call.row, call.layout, call.signature
        inside = Inside(call.arguments, self.boundary.constraints(layout, row))
        program = self._program(layout)
        program.known.put(signature, inside)
        # The same function object as in the program below: JAX finds this trace again there.
        jitted = jax.jit(program.inner, static_argnums=layout.static)
        traced = self.body.recordings.record(signature, jitted, row, len(signature.types))
        assert inside.outputs is not None  # the trace has set them
        forms = tuple(collapsed(jax.tree.structure(row[i]), call.arguments[i]) for i in layout.dynamic)
        outputs = collapsed(traced.out_tree, inside.outputs)
        shape = Shape(layout, forms, outputs, checked=signature.paths is not None)
        known = self.programs.get(shape)
        if known is None:
            kwargs = self.options.jit_kwargs
            if self.boundary.any_explicit and shape.outputs is None:
                # Outputs may depend on no argument, and JAX would drop what says on which devices to run.
                kwargs = {'keep_unused': True, **kwargs}
            program.compile(shape, self.convention, self.helper.mesh.size, kwargs)
            known = self.programs.add(shape, program)
        if signature.paths is not None:
            this = self._weak
            known.check_paths(signature.paths, lambda: this._miss())
        # What was found serves, whatever another thread has cleared since: this one may not be compiled.
        known.known.put(signature, inside)
        self.body.warn_unused(layout)
        return self.resolved.add(signature, Resolved(known, inside, traced.out_tree))

    # The traced function -----------------------------------------------------------------------------

    def _program(self, layout: Layout) -> Program:
        this, known = self._weak, Known()

        def inner(*row: Any) -> Any:
            return this._inside(known, layout, row)

        inner.__name__ = inner.__qualname__ = self.convention.name
        inner.__dict__['__signature__'] = self.convention.row_signature(layout)
        inner.__dict__['__wrapped__'] = self._source  # where JAX's messages point
        return Program(layout, inner, known)

    def _inside(self, mine: Known, layout: Layout, row: Sequence[Any]) -> Any:
        """What JAX traces of a program."""
        if len(row) != len(layout.slots):  # another number of extra positional arguments
            raise self._miss()
        if _inside_manual_region() or (self._runs_inline() and not self._placing):
            raise self._miss()
        if (
            not self._placing
            and self._refuses_foreign
            and placement_errors.any_foreign(row, self.boundary.mesh)
        ):
            raise self._miss()
        signature = signature_of(self.convention, layout, row)
        inside = mine.get(signature)
        if inside is None:
            if signature.paths is not None and not self._placing:
                raise self._miss()  # the next calls are to come by way of a check
            known = None if jax.config.jax_disable_jit else self._joining(layout, row, signature)
            if known is None or known.program.known is not mine:
                raise self._miss()
            inside = known.inside
        return self.body.run(signature, layout, row, inside)

    def _joining(self, layout: Layout, row: Sequence[Any], signature: Signature) -> Resolved | None:
        """A signature that some program was tried for, resolved; None if its types are not right yet."""
        known = self.resolved.get(signature)
        if known is not None:
            return known
        arguments = self.boundary.arguments(layout, row)
        if self.boundary.any_explicit and not self._placing and not placement.all_typed(row, arguments):
            return None
        return self._new(Call(row, layout, arguments, signature))


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


def _fails_alike(error: Exception, call: Callable[..., Any], row: Sequence[Any]) -> bool:
    """Whether a call of deleted arguments, which runs nothing, fails with the same error."""
    try:
        call(*row)
    except Exception as again:
        return type(again) is type(error) and str(again) == str(error)
    return False


def _inside_manual_region() -> bool:
    """Whether this runs inside shard_map, where shapes are local and shardings are the caller's."""
    return bool(jax.sharding.get_abstract_mesh().manual_axes)


def _arose_inside(error: Exception) -> bool:
    """Whether *error* comes out of the user's code or its trace, and not from JAX on the way to it."""
    # What is not traced runs as a body alone.
    return arose_below(error, State._inside.__code__, Body.run.__code__)

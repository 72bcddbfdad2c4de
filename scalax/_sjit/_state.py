"""Which program serves a call? The state of one sjit function: its programs and recordings."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding

from scalax import _context, _mesh
from scalax._constrain import apply_shardings
from scalax._sjit import _placement
from scalax._sjit._boundary import Boundary, Options, Outputs
from scalax._sjit._choice import Chooser
from scalax._sjit._convention import Convention, Layout
from scalax._sjit._placement import Shardings
from scalax._sjit._program import Missed, Program, Shape, collapsed
from scalax._sjit._replay import Recordings
from scalax._sjit._signature import Signature, dynamic_leaves, placement_kinds, signature_of
from scalax.errors import MeshError, UnusedAnnotationWarning, did_you_mean, near_names, warn


@dataclasses.dataclass(frozen=True, eq=False)
class Resolved:
    """One signature with its program and its shardings.

    Attributes:
        program: the program that serves it.
        arguments: the shardings of the arguments, by slot and leaf.
        outputs: what the function returns.
        out_shardings: the shardings of the outputs, leaf by leaf.
    """

    program: Program
    arguments: Mapping[int, Shardings]
    outputs: Outputs
    out_shardings: Sequence[NamedSharding | None]


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

    No lock is held while a user's code is traced: two threads that meet a new signature together may
    both resolve it, as under ``jax.jit``, and the first one's program is kept.
    """

    def __init__(
        self,
        helper: _context.MeshOwner,
        fun: Callable[..., Any],
        convention: Convention,
        options: Options,
    ) -> None:
        self.helper, self.fun, self.convention, self.options = helper, fun, convention, options
        self.boundary = Boundary(helper, convention, options)
        self.contexts = _context.ContextCache(helper)
        self._warned = False
        self._placing = _Placing()
        self._hot_is: tuple[dict[str, Any], str] = ({}, 'hot')
        self.clear()

    def clear(self) -> None:
        """Forgets every program."""
        self.resolved: dict[Signature, Resolved] = {}
        self.programs: dict[Shape, Program] = {}
        self.recordings = Recordings()
        self._arguments: dict[Signature, Mapping[int, Shardings]] = {}
        self.hot = self._nothing_yet

    def keep_hot_in(self, namespace: dict[str, Any], name: str) -> None:
        """Says where the caller looks for the program to try."""
        self._hot_is = namespace, name
        self.hot = self._nothing_yet

    @property
    def hot(self) -> Callable[..., Any]:
        """What calls try first: the program that the last ones used, or one that chooses."""
        namespace, name = self._hot_is
        return namespace[name]

    @hot.setter
    def hot(self, call: Callable[..., Any]) -> None:
        namespace, name = self._hot_is
        namespace[name] = call

    def _nothing_yet(self, *row: Any) -> Any:
        raise self._miss()

    # What the generated caller runs -----------------------------------------------------------------

    def missed(self, error: Exception, hot: Any, row: tuple[Any, ...]) -> bool:
        """Whether *error* only means that *hot* cannot serve this call, and `slow` may.

        Raises:
            ScalaxError: nothing can serve the call, and we can say better why.
        """
        if isinstance(error, Missed):
            return error.owner is self
        if error.__dict__.get('scalax_raised_by') is self:
            return False  # it comes from the user's code, or says what is wrong with the call
        if _inside_manual_region():
            return True
        call = self._look(row)
        known = self.resolved.get(call.signature)
        program = hot.program(row) if isinstance(hot, Chooser) else None
        used = program.call if program else hot
        if known is None or known.program.call is not used:
            return True  # JAX refused the call before tracing it
        if 'deleted' in str(error):
            _placement.reject_deleted(self.convention, call.layout, row)
        if self.options.on_mismatch == 'error':
            _placement.reject_mismatched(self.convention, call.layout, row, call.arguments)
            return False
        return _placement.any_mismatched(row, call.arguments)

    def slow(self, row: tuple[Any, ...]) -> Any:
        """Serves a call that the hot program cannot serve."""
        if _inside_manual_region():
            layout = self.convention.layout(self.convention.extras_of(row))
            return self._run(signature_of(self.convention, layout, row), layout, row, {})
        _mesh.require_devices(self.helper.mesh, f'a call of {self.convention.name}')
        resolved, placed = self.resolve(row, jax.device_put)
        call = resolved.program.call
        assert call is not None  # a resolved signature has a compiled program
        self.hot = self._hottest(call)
        with self._placing:
            return call(*placed)

    def _hottest(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """What the next calls try first: the only program there is, or one that chooses."""
        cases = [(known.program.layout, s, known.program) for s, known in list(self.resolved.items())]
        if len({id(program) for _, _, program in cases}) < 2:  # none, if another thread has cleared them
            return call
        return Chooser(cases, lambda row: self._look(row).signature, self._miss)

    def _miss(self) -> Missed:
        return Missed(self, self.convention.name)

    # Resolving ---------------------------------------------------------------------------------------

    def _look(self, row: Sequence[Any]) -> Call:
        """Reads a call.

        Raises:
            ArgumentError: leaves that are not arrays, or a static value that cannot be hashed.
            ShardingError, StructureError: the rules do not fit the arguments.
        """
        layout = self.convention.layout(self.convention.extras_of(row))
        given = signature_of(self.convention, layout, row)
        arguments = self._arguments.get(given)
        if arguments is None:
            arguments = self.boundary.arguments(layout, row)
            self._arguments[given] = arguments
        if self.boundary.any_explicit:
            # The types of arguments hold their shardings there, so what counts is what they will be.
            moved = self._placed(row, layout, arguments, _placement.as_moved)
            given = signature_of(self.convention, layout, moved)
        return Call(row, layout, arguments, given)

    def _placed(
        self, row: Sequence[Any], layout: Layout, arguments: Mapping[int, Shardings], move: Any
    ) -> list[Any]:
        return _placement.place(
            layout,
            row,
            arguments,
            everything=self.boundary.any_explicit,
            mismatched=self.options.on_mismatch == 'reshard',
            move=move,
        )

    def resolve(self, row: Sequence[Any], move: Any = _placement.as_moved) -> tuple[Resolved, Sequence[Any]]:
        """The program of a call, and the call's row with its arguments moved where needed.

        Args:
            row: the call.
            move: ``jax.device_put`` to run the call; by default nothing is moved, and the row holds
                what moved arguments would be.

        Raises:
            ShardingError, StructureError: the rules do not fit the arguments or the outputs.
            PlacementError: an argument is committed to another sharding.
        """
        call = self._look(row)
        _placement.reject_deleted(self.convention, call.layout, row)
        if self.options.on_mismatch == 'error':
            _placement.reject_mismatched(self.convention, call.layout, row, call.arguments)
        known = self.resolved.get(call.signature)
        if known is None:
            # Traced with what the arguments will be: nothing moves before all rules are known to fit.
            moved = self._placed(row, call.layout, call.arguments, _placement.as_moved)
            with self._placing:
                known = self._new(dataclasses.replace(call, row=moved))
        return known, self._placed(row, call.layout, call.arguments, move)

    def _new(self, call: Call) -> Resolved:
        """Resolves a signature that was never seen: traces the user's code, and finds its program."""
        try:
            return self._traced(call)
        except Exception as error:
            # So that `missed` knows it again: the user's code must not run a second time.
            error.__dict__['scalax_raised_by'] = self
            raise

    def _traced(self, call: Call) -> Resolved:
        row, layout, signature, arguments = call.row, call.layout, call.signature, call.arguments
        constraints = self.boundary.constraints(layout, row)
        program = self._program(layout)
        program.known[signature] = constraints
        # The same function object as in the program below: JAX finds this trace again there.
        jitted = jax.jit(program.inner, static_argnums=layout.static)
        outputs = Outputs.of(self.recordings.record(signature, jitted, row, len(signature.types)))
        out_shardings = self.boundary.outputs(outputs, layout, row, arguments)
        forms = tuple(collapsed(jax.tree.structure(row[slot]), arguments[slot]) for slot in layout.dynamic)
        shape = Shape(layout, forms, collapsed(outputs.treedef, out_shardings))
        if shape not in self.programs:
            devices = self.helper.mesh.size
            program.compile(shape, self.convention, devices, self.options.jit_kwargs)
        program = self.programs.setdefault(shape, program)
        program.known[signature] = constraints
        self._warn_unused(layout)
        resolved = Resolved(program, arguments, outputs, out_shardings)
        return self.resolved.setdefault(signature, resolved)

    def _warn_unused(self, layout: Layout) -> None:
        """Warns, once, about bound names that nothing used."""
        names = self.options.annotation_shardings
        if self._warned or not names:
            return
        self._warned = True
        context = self.contexts.get(names)
        seen = sorted(context.asked - set(names))
        unused = [name for name in names if name not in context.used]
        if layout.static:
            # Other static values may lead through other code: only a misspelling is certain.
            unused = [name for name in unused if near_names(name, seen)]
        if unused:
            asked = (
                '; '.join(f'{name!r} ({did_you_mean(name, seen)})' for name in unused)
                if seen
                else f'{", ".join(map(repr, unused))} (it asked for no other name)'
            )
            warn(
                f'{self.convention.name}: annotation_shardings binds names that no '
                f'with_sharding_annotation in it used: {asked}',
                UnusedAnnotationWarning,
            )

    # The traced function -----------------------------------------------------------------------------

    def _program(self, layout: Layout) -> Program:
        def inner(*row: Any) -> Any:
            if _inside_manual_region():
                raise self._miss()
            signature = signature_of(self.convention, layout, row)
            if signature not in program.known:
                if self.boundary.any_explicit and not self._placing and self._unplaced(layout, row):
                    raise self._miss()
                if not self._serves(program, signature, layout, row):
                    raise self._miss()
            return self._run(signature, layout, row, program.known[signature])

        inner.__name__ = inner.__qualname__ = self.convention.name
        inner.__dict__['__signature__'] = self.convention.row_signature(layout)
        inner.__dict__['__wrapped__'] = self.fun  # where JAX's messages point
        program = Program(layout, inner)
        return program

    def _serves(self, program: Program, signature: Signature, layout: Layout, row: Sequence[Any]) -> bool:
        """Whether *program* is right for a signature that it was not made for."""
        known = self.resolved.get(signature)
        if known is None:
            arguments = self.boundary.arguments(layout, row)
            known = self._new(Call(row, layout, arguments, signature))
        return known.program is program

    def _unplaced(self, layout: Layout, row: Sequence[Any]) -> bool:
        """Whether a leaf that should have an Explicit sharding in its type has none."""
        return any(
            sharding is not None and jax.typeof(leaf).sharding.mesh.empty
            for slot, wanted in self.boundary.arguments(layout, row).items()
            for leaf, sharding in zip(jax.tree.leaves(row[slot]), wanted, strict=True)
        )

    def _run(
        self,
        signature: Signature,
        layout: Layout,
        row: Sequence[Any],
        constraints: Mapping[int, Shardings],
    ) -> Any:
        """Runs the user's function, or replays it, with this function's mesh and bindings in force."""
        context = self.contexts.get(self.options.annotation_shardings)
        with _context.entered(context), self._mesh_entered():
            leaves, _ = dynamic_leaves(layout, row)
            trace, kinds = self.recordings.contexts.current(), placement_kinds(leaves)
            recording = self.recordings.find(signature, trace, kinds)
            # Values instead of tracers come with jax.disable_jit, and from JAX looking for a nan: then
            # the user's lines should run.
            if recording is not None and all(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
                return recording.replay(leaves)
            constrained = list(row)
            for slot, shardings in constraints.items():
                constrained[slot] = apply_shardings(row[slot], shardings)
            args, keywords = self.convention.restore(constrained)
            self.recordings.user_code_ran(signature, trace, kinds)
            return self.fun(*args, **keywords)

    def _mesh_entered(self) -> Any:
        """Enters the helper's mesh where the user's code needs it, or must not see another.

        On Auto axes alone it needs none; and shard_map over a mesh of one's own would object to it.
        """
        ambient, mesh = jax.sharding.get_abstract_mesh(), self.helper.mesh
        if jax.config.jax_disable_jit:  # arrays with shardings of their own, and nothing traced
            return contextlib.nullcontext()
        if ambient.manual_axes or (ambient.empty and not self.boundary.any_explicit):
            return contextlib.nullcontext()
        if not ambient.empty and ambient.size != mesh.size:
            raise MeshError(
                f'{self.convention.name} is compiled for a mesh of {mesh.size} devices, and is called '
                f'under jax.set_mesh of one of {ambient.size}: leave that mesh for the call'
            )
        return jax.sharding.use_abstract_mesh(mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh)


class _Placing(threading.local):
    """True in a thread while a program is called with arguments placed as well as can be.

    What still has no sharding in its type then is a value of an outer trace, which only JAX can place.
    """

    _depth = 0

    def __enter__(self) -> None:
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1

    def __bool__(self) -> bool:
        return self._depth > 0


def _inside_manual_region() -> bool:
    """Whether this runs inside shard_map, where shapes are local and shardings are the caller's."""
    return bool(jax.sharding.get_abstract_mesh().manual_axes)

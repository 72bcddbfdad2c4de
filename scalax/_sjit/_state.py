"""Which program serves a call? The state of one sjit function: its programs and recordings."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import AbstractMesh, NamedSharding

from scalax import _context, _mesh
from scalax._constrain import apply_shardings
from scalax._sjit import _placement
from scalax._sjit._boundary import Boundary, Options
from scalax._sjit._choice import Chooser
from scalax._sjit._convention import Convention, Layout
from scalax._sjit._placement import Shardings
from scalax._sjit._program import Missed, Program, Shape, collapsed
from scalax._sjit._replay import Recordings, trace_context
from scalax._sjit._signature import Signature, dynamic_leaves, signature_of
from scalax.errors import UnusedAnnotationWarning, did_you_mean, warn

if TYPE_CHECKING:
    from scalax._helper import MeshShardingHelper


@dataclasses.dataclass(frozen=True, eq=False)
class Resolved:
    """One signature with its program and its shardings.

    Attributes:
        program: the program that serves it.
        arguments: the shardings of the arguments, by slot and leaf.
        out_info: the outputs as ShapeDtypeStructs.
        out_shardings: the shardings of the outputs, leaf by leaf; None where nothing is asked.
    """

    program: Program
    arguments: Mapping[int, Shardings]
    out_info: Any
    out_shardings: Sequence[NamedSharding | None] | None


class State:
    """Finds or makes the program of each call. Safe to use from many threads.

    No lock is held while a user's code is traced: two threads that meet a new signature together may
    both resolve it, as under ``jax.jit``, and the first one's program is kept.
    """

    def __init__(
        self,
        helper: MeshShardingHelper,
        fun: Callable[..., Any],
        convention: Convention,
        options: Options,
    ) -> None:
        self.helper, self.fun, self.convention, self.options = helper, fun, convention, options
        self.boundary = Boundary(helper, convention, options)
        self.contexts = _context.ContextCache(helper)
        self._warned = False
        self._placing = _Placing()
        self.clear()

    def clear(self) -> None:
        """Forgets every program."""
        self.resolved: dict[Signature, Resolved] = {}
        self.programs: dict[Shape, Program] = {}
        self.recordings = Recordings()
        self.hot: Callable[..., Any] = self._nothing_yet

    def _nothing_yet(self, *row: Any) -> Any:
        raise Missed(self)

    # What the generated caller runs -----------------------------------------------------------------

    def missed(self, error: Exception, hot: Any, row: tuple[Any, ...]) -> bool:
        """Whether *error* only means that *hot* cannot serve this call, and `slow` may.

        Raises:
            ScalaxError: nothing can serve the call, and we can say better why.
        """
        if isinstance(error, Missed):
            return error.owner is self
        layout, signature = self._read(row)
        known = self.resolved.get(signature)
        used = hot.program(row).call if isinstance(hot, Chooser) else hot
        if known is None or known.program.call is not used:
            return True  # JAX refused the call before tracing it
        _placement.reject_deleted(self.convention, layout, row)
        if self.options.on_mismatch == 'error':
            _placement.reject_mismatched(self.convention, layout, row, known.arguments)
            return False
        return _placement.any_mismatched(row, known.arguments)

    def slow(self, row: tuple[Any, ...]) -> Any:
        """Serves a call that the hot program cannot serve."""
        layout, signature = self._read(row)
        if _inside_manual_region():
            return self._run(signature, layout, row, {})
        _placement.reject_deleted(self.convention, layout, row)
        _mesh.require_devices(self.helper.mesh, f'a call of {self.convention.name}')
        resolved, placed = self.resolve(row)
        call = resolved.program.call
        assert call is not None  # a resolved signature has a compiled program
        self.hot = call if len(self.programs) == 1 else self._chooser()
        with self._placing:
            return call(*placed)

    def _chooser(self) -> Chooser:
        cases = [(known.program.layout, s, known.program) for s, known in list(self.resolved.items())]
        return Chooser(cases, lambda row: self._read(row)[1])

    def _read(self, row: Sequence[Any]) -> tuple[Layout, Signature]:
        layout = self.convention.layout(self.convention.extras_of(row))
        return layout, signature_of(self.convention, layout, row)

    # Resolving ---------------------------------------------------------------------------------------

    def resolve(self, row: Sequence[Any]) -> tuple[Resolved, Sequence[Any]]:
        """The program of a call, and the call's row with its arguments moved where needed.

        Raises:
            ShardingError, StructureError: the rules do not fit the arguments or the outputs.
            PlacementError: an argument is committed to another sharding.
        """
        layout, signature = self._read(row)
        known = self.resolved.get(signature)
        arguments = known.arguments if known else self.boundary.arguments(layout, row)
        if self.options.on_mismatch == 'error':
            _placement.reject_mismatched(self.convention, layout, row, arguments)
        place = functools.partial(
            _placement.place,
            layout,
            row,
            arguments,
            # Explicit shardings are part of the types of arguments: host data must have one too.
            everything=self.boundary.any_explicit,
            mismatched=self.options.on_mismatch == 'reshard',
        )
        if known is None:
            # Traced with what the arguments will be: nothing moves before all rules are known to fit.
            with self._placing:
                known = self._new(place(move=_placement.as_moved), layout, signature, arguments)
        return known, place()

    def _new(
        self,
        row: Sequence[Any],
        layout: Layout,
        signature: Signature,
        arguments: Mapping[int, Shardings],
    ) -> Resolved:
        """Resolves a signature that was never seen: traces the user's code, and finds its program."""
        constraints = self.boundary.constraints(layout, row)
        program = self._program(layout)
        program.known[signature] = constraints
        out_info = out_shardings = outputs = None
        if self.boundary.must_see_outputs(layout):
            # The same function object as in the program below: JAX finds this trace again there.
            jitted = jax.jit(program.inner, static_argnums=layout.static)
            out_info = self.recordings.record(signature, jitted, row).out_info
            out_shardings = self.boundary.outputs(out_info, layout, row, arguments)
            outputs = _form(out_shardings, out_info)
        forms = tuple(_form(arguments[slot], row[slot]) for slot in layout.dynamic)
        shape = Shape(layout, forms, outputs)
        program = self.programs.setdefault(shape, program)
        if program.jitted is None:
            devices = self.helper.mesh.size
            program.compile(shape, self.convention, devices, self.options.jit_kwargs)
        program.known[signature] = constraints
        if out_info is None:
            out_info = self.recordings.record(signature, program.jitted, row).out_info
        self._warn_unused()
        resolved = Resolved(program, arguments, out_info, out_shardings)
        return self.resolved.setdefault(signature, resolved)

    def _warn_unused(self) -> None:
        """Warns, once, about bound names that nothing used."""
        names = self.options.annotation_shardings
        if self._warned or not names:
            return
        self._warned = True
        context = self.contexts.get(names)
        unused = [name for name in names if name not in context.used]
        if unused:
            seen = sorted(context.asked - set(names))
            near = '; '.join(f'{name!r} ({did_you_mean(name, seen)})' for name in unused)
            warn(
                f'{self.convention.name}: annotation_shardings binds names that no '
                f'with_sharding_annotation in it used: {near}',
                UnusedAnnotationWarning,
            )

    # The traced function -----------------------------------------------------------------------------

    def _program(self, layout: Layout) -> Program:
        def inner(*row: Any) -> Any:
            if _inside_manual_region():
                raise Missed(self)
            signature = signature_of(self.convention, layout, row)
            if self.boundary.any_explicit and self._unplaced(signature, layout, row):
                raise Missed(self)
            if signature not in program.known and not self._serves(program, signature, layout, row):
                raise Missed(self)
            return self._run(signature, layout, row, program.known[signature])

        inner.__name__ = inner.__qualname__ = self.convention.name
        inner.__signature__ = self.convention.row_signature(layout)  # type: ignore[attr-defined]
        program = Program(layout, inner)
        return program

    def _serves(self, program: Program, signature: Signature, layout: Layout, row: Sequence[Any]) -> bool:
        """Whether *program* is right for a signature that it was not made for."""
        known = self.resolved.get(signature)
        if known is None:
            known = self._new(row, layout, signature, self.boundary.arguments(layout, row))
        return known.program is program

    def _unplaced(self, signature: Signature, layout: Layout, row: Sequence[Any]) -> bool:
        """Whether a leaf that should have an Explicit sharding in its type has none."""
        if self._placing:
            return False
        known = self.resolved.get(signature)
        arguments = known.arguments if known else self.boundary.arguments(layout, row)
        return any(
            sharding is not None and jax.typeof(leaf).sharding.mesh.empty
            for slot, wanted in arguments.items()
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
        with _context.entered(context), jax.sharding.use_abstract_mesh(self._mesh_inside()):
            trace = trace_context()
            recording = self.recordings.find(signature, trace)
            if recording is not None:
                return recording.replay(dynamic_leaves(layout, row)[0])
            constrained = list(row)
            for slot, shardings in constraints.items():
                constrained[slot] = apply_shardings(row[slot], shardings)
            args, keywords = self.convention.restore(constrained)
            self.recordings.user_code_ran(signature, trace)
            return self.fun(*args, **keywords)

    def _mesh_inside(self) -> AbstractMesh:
        """The mesh that the user's code sees: inside shard_map that of the caller."""
        if _inside_manual_region():
            return jax.sharding.get_abstract_mesh()
        mesh = self.helper.mesh
        return mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh


class _Placing(threading.local):
    """True in a thread that is calling a program with arguments placed as well as can be.

    What still has no sharding in its type then is a value of an outer trace, which only JAX can place.
    """

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1

    def __bool__(self) -> bool:
        return self.depth > 0


def _form(shardings: Shardings, tree: Any) -> Any:
    return collapsed(jax.tree.structure(tree), shardings)


def _inside_manual_region() -> bool:
    """Whether this runs inside shard_map, where shapes are local and shardings are the caller's."""
    return bool(jax.sharding.get_abstract_mesh().manual_axes)

"""Which program serves a call? The state of one sjit function: its rules, programs and recordings."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import jax
from jax.sharding import AbstractMesh, NamedSharding

from scalax import _context, _mesh, _resolve
from scalax._constrain import apply_shardings
from scalax._prefix import RuleLike
from scalax._sjit import _placement
from scalax._sjit._convention import Convention, Layout
from scalax._sjit._program import (
    Missed,
    Program,
    Shape,
    collapsed,
    donated_shardings,
)
from scalax._sjit._replay import Recordings, trace_context
from scalax._sjit._signature import Signature, dynamic_leaves, signature_of, slot_path
from scalax.errors import (
    Problem,
    ShardingError,
    UnusedAnnotationWarning,
    did_you_mean,
)

if TYPE_CHECKING:
    from scalax._helper import MeshShardingHelper

OnMismatch = Literal['error', 'reshard']


@dataclasses.dataclass(frozen=True, eq=False)
class Options:
    """What the user said to sjit; see `MeshShardingHelper.sjit`."""

    in_shardings: RuleLike = None
    out_shardings: RuleLike = None
    args_sharding_constraint: RuleLike = None
    annotation_shardings: Mapping[str, RuleLike] = dataclasses.field(default_factory=dict)
    on_mismatch: OnMismatch = 'error'
    jit_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, eq=False)
class Resolved:
    """One signature with its program and the shardings of its arguments, by slot and leaf."""

    program: Program
    arguments: dict[int, _placement.Shardings]
    constraints: dict[int, _placement.Shardings]
    out_info: Any = None
    out_shardings: list[NamedSharding | None] | None = None


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
        self.explicit = jax.sharding.AxisType.Explicit in helper.mesh.axis_types
        self.contexts = _context.ContextCache(helper)
        self.clear()
        self._warned = False

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
        """Whether *error* only means that *hot* was the wrong program for this call.

        Raises:
            ScalaxError: the call cannot be served by any program, and we can say better why.
        """
        if isinstance(error, Missed):
            return error.owner is self
        layout, signature = self._read(row)
        known = self.resolved.get(signature)
        if known is None or known.program.call is not hot:
            return True  # JAX refused the call before tracing it
        _placement.reject_deleted(self.convention, layout, row)
        return self._moves_needed(known, layout, row)

    def slow(self, row: tuple[Any, ...]) -> Any:
        """Serves a call for which the hot program is not right."""
        layout, signature = self._read(row)
        if _inside_manual_region():
            return self._run(signature, layout, row, {})
        _placement.reject_deleted(self.convention, layout, row)
        _mesh.require_devices(self.helper.mesh, f'a call of {self.convention.name}')
        resolved, placed = self.resolve(row, layout, signature)
        call = resolved.program.call
        assert call is not None  # a resolved signature has a compiled program
        self.hot = call
        return call(*placed)

    def _read(self, row: Sequence[Any]) -> tuple[Layout, Signature]:
        layout = self.convention.layout(self.convention.extras_of(row))
        return layout, signature_of(self.convention, layout, row)

    def _moves_needed(self, known: Resolved, layout: Layout, row: Sequence[Any]) -> bool:
        """Whether arguments must be moved before the program takes them; raises if they may not be."""
        if self.options.on_mismatch == 'error':
            _placement.reject_mismatched(self.convention, layout, row, known.arguments)
            return False
        return _placement.any_mismatched(row, known.arguments)

    # Resolving ---------------------------------------------------------------------------------------

    def resolve(
        self, row: Sequence[Any], layout: Layout | None = None, signature: Signature | None = None
    ) -> tuple[Resolved, list[Any]]:
        """The program of a call, and the call's row with its arguments moved where needed.

        Raises:
            ShardingError, StructureError: the rules do not fit the arguments or the outputs.
            PlacementError: an argument is committed to another sharding.
        """
        if layout is None or signature is None:
            layout, signature = self._read(row)
        known = self.resolved.get(signature)
        if known is None:
            arguments = self._by_slot(self.options.in_shardings, layout, row, 'in_shardings')
            constraints = self._by_slot(
                self.options.args_sharding_constraint,
                layout,
                row,
                'args_sharding_constraint',
                _resolve.Use.INTERMEDIATE,
            )
        else:
            arguments = known.arguments
        if self.options.on_mismatch == 'error':
            _placement.reject_mismatched(self.convention, layout, row, arguments)
        placed = self._placed(arguments, layout, row)
        if known is None:
            known = self._new(placed, layout, signature, arguments, constraints)
        return known, placed

    def _placed(
        self, arguments: dict[int, _placement.Shardings], layout: Layout, row: Sequence[Any]
    ) -> list[Any]:
        return _placement.place(
            layout,
            row,
            arguments,
            # Explicit shardings are part of the types of arguments: host data must have one too.
            everything=self.explicit,
            mismatched=self.options.on_mismatch == 'reshard',
        )

    def _by_slot(
        self,
        rules: RuleLike,
        layout: Layout,
        row: Sequence[Any],
        what: str,
        use: _resolve.Use = _resolve.Use.BOUNDARY,
    ) -> dict[int, _placement.Shardings]:
        """The shardings of the leaves of every dynamic slot; raises about all bad leaves together."""
        by_slot = self.convention.rules_by_slot(rules, row, what)
        shardings: dict[int, _placement.Shardings] = {}
        problems: list[Problem] = []
        where, mesh = f'the arguments of {self.convention.name!r}', ''
        for slot in layout.dynamic:
            try:
                shardings[slot] = _resolve.resolve(
                    by_slot[slot],
                    jax.tree.map(_as_struct, row[slot]),
                    self.helper.mesh,
                    use=use,
                    where=where,
                    at=slot_path(layout, slot, ''),
                    on_indivisible=self.helper.on_indivisible,
                ).shardings
            except ShardingError as error:
                problems.extend(error.problems)
                mesh = error.mesh
        if problems:
            raise ShardingError(problems, mesh, f'{where} ({what})')
        return shardings

    def _new(
        self,
        row: list[Any],
        layout: Layout,
        signature: Signature,
        arguments: dict[int, _placement.Shardings],
        constraints: dict[int, _placement.Shardings],
    ) -> Resolved:
        """Resolves a signature that was never seen."""
        program = self._program(layout, constraints)
        program.known.add(signature)
        out_info = out_shardings = None
        asks_outputs = self.options.out_shardings is not None
        outputs = None
        if asks_outputs or layout.donated or self.explicit:
            # The same function object as in the program below: JAX finds this trace again there.
            jitted = jax.jit(program.inner, static_argnums=layout.static)
            out_info = self.recordings.record(signature, jitted, row).out_info
            out_shardings = self._outputs(out_info, row, layout, arguments)
            outputs = self._form(out_shardings, out_info)
        shape = Shape(
            layout,
            tuple(self._form(arguments[slot], row[slot]) for slot in layout.dynamic),
            tuple(self._form(constraints[slot], row[slot]) for slot in layout.dynamic),
            outputs,
        )
        shared = self.programs.setdefault(shape, program)
        if shared.jitted is None:
            shared.compile(shape, self.convention, self.options.jit_kwargs)
        shared.known.add(signature)
        if out_info is None:
            out_info = self.recordings.record(signature, shared.jitted, row).out_info
        self._warn_unused()
        resolved = Resolved(shared, arguments, constraints, out_info, out_shardings)
        return self.resolved.setdefault(signature, resolved)

    @staticmethod
    def _form(shardings: _placement.Shardings, tree: Any) -> Any:
        return collapsed(jax.tree.structure(tree), shardings)

    def _outputs(
        self,
        out_info: Any,
        row: Sequence[Any],
        layout: Layout,
        arguments: dict[int, _placement.Shardings],
    ) -> list[NamedSharding | None]:
        """The shardings of the outputs: what the rules say, then what donation asks for."""
        shardings = _resolve.resolve(
            self.options.out_shardings,
            out_info,
            self.helper.mesh,
            use=_resolve.Use.BOUNDARY,
            where=f'the outputs of {self.convention.name!r} (out_shardings)',
            on_indivisible=self.helper.on_indivisible,
        ).shardings
        donated = [(jax.tree.map(_as_struct, row[slot]), arguments[slot]) for slot in layout.donated]
        shardings = donated_shardings(out_info, shardings, donated)
        if self.explicit and not any(any(wanted) for wanted in arguments.values()):
            # Without any placed argument JAX would not know on which devices to run: the types say.
            typed = [self._typed(leaf) for leaf in jax.tree.leaves(out_info)]
            shardings = [given or own for given, own in zip(shardings, typed, strict=True)]
        return shardings

    def _typed(self, leaf: Any) -> NamedSharding | None:
        sharding = getattr(leaf, 'sharding', None)
        if not isinstance(sharding, NamedSharding) or sharding.mesh.empty:
            return None
        return _resolve.named_sharding(self.helper.mesh, sharding.spec)

    def _warn_unused(self) -> None:
        """Warns, once, about bound names that nothing used."""
        names = self.options.annotation_shardings
        if self._warned or not names:
            return
        self._warned = True
        context = self.contexts.get(names)
        unused = [name for name in names if name not in context.used]
        if unused:
            seen = sorted(context.asked)
            near = '; '.join(f'{name!r} ({did_you_mean(name, seen)})' for name in unused)
            warnings.warn(
                f'{self.convention.name}: annotation_shardings binds names that no '
                f'with_sharding_annotation in it used: {near}',
                UnusedAnnotationWarning,
                stacklevel=2,
            )

    # The traced function -----------------------------------------------------------------------------

    def _program(self, layout: Layout, constraints: dict[int, _placement.Shardings]) -> Program:
        def inner(*row: Any) -> Any:
            if _inside_manual_region():
                raise Missed(self)
            signature = signature_of(self.convention, layout, row)
            if signature not in program.known:
                raise Missed(self)
            if self.explicit and self._unplaced(signature, layout, row):
                raise Missed(self)
            return self._run(signature, layout, row, constraints)

        inner.__name__ = inner.__qualname__ = self.convention.name
        inner.__signature__ = self.convention.row_signature(layout)  # type: ignore[attr-defined]
        program = Program(layout, inner)
        return program

    def _unplaced(self, signature: Signature, layout: Layout, row: Sequence[Any]) -> bool:
        """Whether a leaf that should have a sharding in its type has none."""
        resolved = self.resolved.get(signature)
        if resolved is None:
            return False  # the first trace, of arguments that were placed just now
        return any(
            sharding is not None and jax.typeof(leaf).sharding.mesh.empty
            for slot, wanted in resolved.arguments.items()
            for leaf, sharding in zip(jax.tree.leaves(row[slot]), wanted, strict=True)
        )

    def _run(
        self,
        signature: Signature,
        layout: Layout,
        row: Sequence[Any],
        constraints: dict[int, _placement.Shardings],
    ) -> Any:
        """Runs the user's function, or replays it, with this function's mesh and bindings in force."""
        context = self.contexts.get(self.options.annotation_shardings)
        mesh = jax.sharding.get_abstract_mesh() if _inside_manual_region() else self._abstract_mesh
        with _context.entered(context), jax.sharding.use_abstract_mesh(mesh):
            trace = trace_context()
            recording = self.recordings.find(signature, trace)
            if recording is not None:
                return recording.replay(dynamic_leaves(layout, row)[0])
            constrained = list(row)
            for slot, shardings in constraints.items():
                constrained[slot] = apply_shardings(row[slot], list(shardings))
            args, keywords = self.convention.restore(constrained)
            self.recordings.user_code_ran(signature, trace)
            return self.fun(*args, **keywords)

    @property
    def _abstract_mesh(self) -> AbstractMesh:
        mesh = self.helper.mesh
        return mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh


def _inside_manual_region() -> bool:
    """Whether this runs inside shard_map, where shapes are local and shardings are the caller's."""
    return bool(jax.sharding.get_abstract_mesh().manual_axes)


def _as_struct(leaf: Any) -> Any:
    """A leaf without its data: rules see shapes and dtypes only."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    aval = jax.typeof(leaf)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)

"""What runs inside a program? The user's function, or its recording, with its mesh and its bindings."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding

from scalax._trace import contexts
from scalax._trace.constraints import apply_shardings
from scalax._transforms.calls.argument_shardings import ArgumentShardings
from scalax._transforms.calls.call_key import CallKey, dynamic_leaves, placement_kinds
from scalax._transforms.calls.call_signature import CallLayout
from scalax._transforms.calls.placement import Shardings, as_typed
from scalax._transforms.calls.placement_errors import reject_foreign_types
from scalax._transforms.sjit.lost_updates import Updates
from scalax._transforms.sjit.replay import Recordings
from scalax._util.lru_cache import Recent
from scalax.errors import MeshError, UnusedAnnotationWarning, did_you_mean, near_names, warn


@dataclasses.dataclass(eq=False)
class TraceShardings:
    """What the trace of one signature needs to know, and what it finds.

    Attributes:
        arguments: the shardings of the arguments, by slot and leaf.
        constraints: the shardings to which they are constrained inside, likewise.
        outputs: the shardings of the outputs, leaf by leaf; None until the function was traced.
        looked_at: whether it was looked at where outputs came out.
    """

    arguments: Mapping[int, Shardings]
    constraints: Mapping[int, Shardings]
    outputs: Sequence[NamedSharding | None] | None = None
    looked_at: bool = False


class TracedFunction:
    """Runs the function of one sjit while JAX traces it.

    Attributes:
        recordings: what was traced before.
    """

    def __init__(self, fun: Callable[..., Any], rules: ArgumentShardings) -> None:
        self._fun, self._rules = _weakly(fun), rules
        self._mesh, self._signature = rules.helper.mesh, rules.signature
        self._names = rules.options.annotation_shardings
        self._uses = contexts.Uses(frozenset(self._names))
        self._contexts: Recent[contexts.Context, contexts.Context] = (
            Recent()
        )  # held, so that JAX finds traces
        self._warned = False
        self.recordings = Recordings()

    def run(
        self, key: CallKey, layout: CallLayout, flat_args: Sequence[Any], inside: TraceShardings | None
    ) -> Any:
        """The outputs of a call, sharded as *inside* says; without it, as they come, on the mesh in force."""
        with self._mesh_entered(layout, flat_args) if inside else contextlib.nullcontext():
            context = contexts.contexts_of(self._rules.helper).get(self._names)
            self._contexts.put(context, context)
            with contexts.entered(context, self._uses):
                outputs = self._outputs(key, layout, flat_args, inside.constraints if inside else {})
            if inside is None:
                return outputs
            if inside.outputs is None:
                inside.outputs = self._rules.outputs(outputs, layout, flat_args, inside.arguments)
            # The out_shardings of a jit say nothing about types, and nothing at all where it is traced.
            return as_typed(outputs, inside.outputs) if self._rules.any_explicit else outputs

    def _outputs(
        self, key: CallKey, layout: CallLayout, flat_args: Sequence[Any], constraints: Mapping[int, Shardings]
    ) -> Any:
        leaves, _ = dynamic_leaves(layout, flat_args)
        kinds = placement_kinds(leaves)
        recording = self.recordings.find(key, kinds)
        # Values instead of tracers come with jax.disable_jit, and from JAX looking for a nan: then
        # the user's lines should run.
        if recording is not None and all(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            return recording.replay(leaves)
        constrained = list(flat_args)
        for slot, shardings in constraints.items():
            constrained[slot] = apply_shardings(flat_args[slot], shardings)
        args, keywords = self._signature.restore(constrained)
        self.recordings.user_code_ran(key, kinds)
        fun = self._fun()
        assert fun is not None  # whoever calls holds it
        updates = Updates((args, keywords))
        outputs = fun(*args, **keywords)
        updates.warn_lost(self._signature.name, outputs)
        return outputs

    def _mesh_entered(self, layout: CallLayout, flat_args: Sequence[Any]) -> Any:
        """Enters the helper's mesh, for what asks for the mesh in force in the user's code."""
        ambient, mesh = jax.sharding.get_abstract_mesh(), self._mesh
        if jax.config.jax_disable_jit:  # arrays with shardings of their own, and nothing traced
            return contextlib.nullcontext()
        if not ambient.empty and ambient.size != mesh.size:
            raise MeshError(
                f'{self._signature.name} is compiled for a mesh of {mesh.size} devices, and is called '
                f'under jax.set_mesh of one of {ambient.size}: leave that mesh for the call'
            )
        reject_foreign_types(self._signature, layout, flat_args, mesh)
        return jax.sharding.use_abstract_mesh(mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh)

    def warn_unused(self, layout: CallLayout) -> None:
        """Warns, once, about bound names that nothing used."""
        if self._warned or not self._names:
            return
        self._warned = True
        seen = sorted(self._uses.asked - self._uses.names)
        unused = self._uses.unused()
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
                f'{self._signature.name}: annotation_shardings binds names that no '
                f'with_sharding_annotation in it used: {asked}',
                UnusedAnnotationWarning,
            )


def _weakly(fun: Callable[..., Any]) -> Callable[[], Callable[..., Any] | None]:
    try:
        return weakref.ref(fun)
    except TypeError:  # of some types of other libraries
        return lambda: fun


def reject_other_devices(name: str, mesh: Any) -> None:
    """Raises MeshError under a ``jax.set_mesh`` of other devices or another order."""
    try:
        ambient = jax.sharding.get_mesh()
    except ValueError:  # inside of jax.jit
        return
    if ambient.empty or [*ambient.devices.flat] == [*mesh.devices.flat]:
        return
    own, theirs = ([device.id for device in each.devices.flat] for each in (mesh, ambient))
    raise MeshError(
        f'{name} is compiled for the devices {own}, and is called under jax.set_mesh of the devices '
        f'{theirs}: leave that mesh for the call'
    ) from None

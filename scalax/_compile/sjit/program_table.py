"""A program: the ``jax.jit`` of one set of shardings, and the calls that it serves.

A call is served by the program of its `CallKey`. Calls whose rules resolve to the same shardings share a
program, so that a batch of another length costs no more than it does
under ``jax.jit``. While JAX traces a program, its function checks that the key is one of the program's own,
and raises `WrongProgram` if not; what JAX has cached was checked when it was traced. So a call may try any
program first, and the last one used is nearly always right.

A new key does not raise where the program turns out to be right for it: JAX's C++ dispatch never takes the
fast path again for a call whose first trace raised.
"""

from __future__ import annotations

import dataclasses
import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from scalax._compile.call.call_key import Call, CallKey, Shardings
from scalax._compile.call.placement import ReshardPolicy, move_leaves, target_shardings
from scalax._compile.call.placement_errors import reject_deleted, reject_donated_twice
from scalax._compile.call.signature import CallLayout, CallSignature
from scalax._core.util import lru_cache
from scalax._jax.shardings import DELETED_ARGUMENTS_CRASH
from scalax._spmd.batch.batch_arguments import BatchArguments
from scalax._spmd.pipelines.summary import PipelinedLoops
from scalax._spmd.step import PartitionedStep


class WrongProgram(Exception):
    """A program was tried for a call of its *owner* that needs another one."""

    def __init__(self, owner: Any) -> None:
        super().__init__(owner)
        self.owner = owner


def compress(treedef: Any, shardings: Shardings) -> Any:
    """A tree of shardings in the least specific form: None or one sharding where all agree.

    The fewer structures a program names, the more signatures can share it.
    """
    distinct = set(shardings)
    if distinct <= {None}:
        return None
    if len(distinct) == 1:
        return shardings[0]
    return treedef, tuple(shardings)


def expand(form: Any) -> Any:
    """The tree of shardings for jax.jit, from the result of `compress`."""
    if not isinstance(form, tuple):
        return form
    treedef, shardings = form
    return treedef.unflatten(shardings)


class Program:
    """A jitted function, and what a call does before it.

    Args:
        signature: the parameters of the user's function.
        layout: the slots of the calls.
        flat_function: the function that is jitted; takes the arguments slot by slot. Its ``token`` is an
            object by which it knows its program.
        arguments: its ``in_shardings``: for each dynamic slot a result of `compress`.
        options: other options of ``jax.jit``.
        guards: whether it runs on several devices, where some versions of JAX need a look at arguments.

    Attributes:
        options: as given.
        jitted: the ``jax.jit``; XLA compiles it when it first runs.
        call: what a call runs: `jitted`, behind the checks that JAX needs.
    """

    def __init__(
        self,
        signature: CallSignature,
        layout: CallLayout,
        flat_function: Callable[..., Any],
        arguments: Sequence[Any],
        options: Mapping[str, Any],
        guards: bool,
    ) -> None:
        self.layout, self.flat_function = layout, flat_function
        self._signature, self.options = signature, options
        # The shardings to which calls place host data, by slot, in the form of `compress`. They may be None
        # among *arguments*: what is placed already has a type, which then holds its sharding.
        self._host_data: dict[int, Any] = {}
        if arguments.count(None) < len(arguments):
            options = {**options, 'in_shardings': tuple(map(expand, arguments))}
        self.jitted: Any = jax.jit(
            flat_function, static_argnums=layout.static, donate_argnums=layout.donated, **options
        )
        self.call: Callable[..., Any] = self._guarded() if DELETED_ARGUMENTS_CRASH and guards else self.jitted
        self._call_placed = self.call  # without the placing of host data

    def place_host_data(self, shardings: Mapping[int, Any], policy: ReshardPolicy) -> None:
        """Makes calls place host data in these slots before JAX sees it, by *shardings* (`compress`).

        Where types hold shardings, host data would be typed as unsharded: each call would be traced, refused
        and dispatched. For calls of another key the shardings may be wrong, which the check inside the trace
        finds.
        """
        if shardings.items() <= self._host_data.items():
            return
        call_placed = self._call_placed
        self._host_data = forms = {**self._host_data, **shardings}

        def placed(*flat_args: Any) -> Any:
            found = list(flat_args)
            for slot, form in forms.items():
                leaves = jax.tree.leaves(flat_args[slot])
                wanted = form[1] if isinstance(form, tuple) else [form] * len(leaves)
                if moving := target_shardings(leaves, wanted, policy):
                    found[slot] = move_leaves(flat_args[slot], moving)
            return call_placed(*found)

        self.call = placed

    def _guarded(self) -> Callable[..., Any]:
        """The ``jax.jit`` behind a look at deleted arguments and those that are donated twice."""
        jitted, layout, signature, leaves_of = self.jitted, self.layout, self._signature, jax.tree.leaves
        is_deleted = operator.methodcaller('is_deleted')

        def call(*flat_args: Any) -> Any:
            leaves = leaves_of(flat_args)
            try:
                gone = any(map(is_deleted, leaves))
            except (AttributeError, TypeError):  # numpy data, numbers or tracers among the leaves
                gone = True
            if gone:
                reject_deleted(Call(signature, flat_args))
            if layout.donated and len(set(map(id, leaves))) < len(leaves):
                reject_donated_twice(Call(signature, flat_args))
            return jitted(*flat_args)

        return call


class Pipelines(NamedTuple):
    """The pipelines of a function.

    Attributes:
        loops: the pipelined scans over layers.
        original_jaxpr: the jaxpr of the function before the rewrite.
    """

    loops: PipelinedLoops
    original_jaxpr: Any


@dataclasses.dataclass(eq=False)
class Entry:
    """What is known of the calls of one key, filled in in this order.

    The thread that traces the key holds the lock. It is re-entrant, so that a function that calls itself gets
    an error. Two threads wait for each other for ever only if two functions call each other with the same
    keys, which no single thread could trace either.

    Attributes:
        key: the key.
        arguments: the shardings of the arguments; None until the rules were asked. In the key of placed
            arrays they may be None: their types hold the sharding. Host data has a separate key, whose
            shardings are the target.
        batch: which arguments are the batch; None if none is.
        pipelines: its pipelines; None without stages.
        partitioned: the step on the blocks of each device, or why it is not partitioned; None if nothing of
            it is known to be a batch.
        gradient_outside: whether JAX has differentiated the function from outside.
        outputs: the shardings of the outputs; None until the function was traced.
        out_tree: the structure of the outputs.
        jaxpr: the jaxpr of the function, which later traces replay; None if it cannot be kept.
        kinds: the kinds of values that it was traced with.
        on_devices: whether the outputs are constrained to the devices of the mesh, which JAX does not know
            otherwise.
        program: the program that serves the key; None until the function was traced.
        outputs_checked: whether a call has looked at where the outputs are.
        tracing: whether it is traced now.
        lock: held meanwhile.
    """

    key: CallKey
    arguments: Any = None
    batch: BatchArguments | None = None
    pipelines: Pipelines | None = None
    partitioned: PartitionedStep | str | None = None
    gradient_outside: bool = False
    outputs: Shardings | None = None
    out_tree: Any = None
    jaxpr: Any = None
    kinds: Any = None
    on_devices: bool = False
    program: Program | None = None
    outputs_checked: bool = False
    tracing: bool = False
    lock: Any = dataclasses.field(default_factory=threading.RLock)

    def note_gradient(self) -> None:
        """Takes note that JAX differentiates the function from outside."""
        self.gradient_outside = True


class ProgramTable:
    """The programs of calls by partial key, for functions of several programs.

    A partial key is the tree structure of the arguments, the shape and dtype of each leaf, and the static
    values. It costs a fraction of a `CallKey`, which is computed where a partial key is new, or where calls
    of several programs have the same one (they differ in the trace context).

    Args:
        find_by_key: finds the program of a call by its `CallKey`, or None.
        wrong_program: makes the exception to raise for a call whose program is not known.
    """

    def __init__(
        self, find_by_key: Callable[[Sequence[Any]], Program | None], wrong_program: Callable[[], Exception]
    ) -> None:
        self._find_by_key, self._wrong_program = find_by_key, wrong_program
        self._layouts: dict[int, CallLayout] = {}
        self._programs: dict[Any, Program | None] = {}  # None: of several programs

    def add(self, flat_args: Sequence[Any], program: Program) -> None:
        """Notes the program of a call."""
        if len(self._programs) >= lru_cache.SIZE:
            self._programs.clear()
        self._layouts[len(flat_args)] = program.layout
        key = _partial_key(program.layout, flat_args)
        if self._programs.setdefault(key, program) is not program:  # None marks it as ambiguous for ever
            self._programs[key] = None

    def find(self, flat_args: Sequence[Any]) -> Program | None:
        """The program for a call, or None."""
        try:
            program = self._programs.get(_partial_key(self._layouts[len(flat_args)], flat_args))
            if program is None:
                program = self._find_by_key(flat_args)
                if program is not None:
                    self.add(flat_args, program)
            return program
        except Exception:  # noqa: BLE001 - of calls that nothing serves, which `dispatch` explains
            return None

    def __call__(self, *flat_args: Any) -> Any:
        """Runs the program of a call."""
        program = self.find(flat_args)
        if program is None:
            raise self._wrong_program()
        return program.call(*flat_args)


def _partial_key(layout: CallLayout, flat_args: Sequence[Any]) -> Any:
    leaves, treedef = jax.tree.flatten([flat_args[slot] for slot in layout.dynamic])
    try:
        types = [(leaf.shape, leaf.dtype) for leaf in leaves]
    except AttributeError:  # numbers among the leaves
        types = [(getattr(leaf, 'shape', None), getattr(leaf, 'dtype', type(leaf))) for leaf in leaves]
    static = [(type(flat_args[slot]), flat_args[slot]) for slot in layout.static]
    return treedef, tuple(types), tuple(static)

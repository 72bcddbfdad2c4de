"""Programs, each the ``jax.jit`` of one set of shardings, and the tables that find the program of a call.

A call is served by the program of its `CallKey`. Calls whose rules resolve to the same shardings share a
program, so that a batch of another length costs no more than under ``jax.jit``. While JAX traces a program,
the traced function checks that the key belongs to the program, and raises `WrongProgram` otherwise. JAX's
cache holds only traces that passed this check. So a call may try any program first, and the last used program
is nearly always the right one.

If the program turns out to be right for a new key, the trace must not raise: JAX's C++ dispatch never uses
its fast path again for a call whose first trace raised.
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
    """Returns a tree of shardings in its most general form: one sharding, or None, if all leaves agree.

    A program whose shardings do not name a tree structure can serve calls of several structures.
    """
    distinct = set(shardings)
    if distinct <= {None}:
        return None
    if len(distinct) == 1:
        return shardings[0]
    return treedef, tuple(shardings)


def expand(form: Any) -> Any:
    """Returns the tree of shardings for ``jax.jit`` from the result of `compress`."""
    if not isinstance(form, tuple):
        return form
    treedef, shardings = form
    return treedef.unflatten(shardings)


class Program:
    """A jitted function, with the checks and transfers before each call.

    Args:
        signature: the parameters of the user's function.
        layout: the slots of the calls.
        flat_function: the function to jit. It takes the arguments slot by slot. Its ``token`` is an object
            that identifies its program.
        in_shardings: for each dynamic slot a result of `compress`.
        options: other options of ``jax.jit``.
        on_several_devices: whether the program runs on several devices. Some versions of JAX then crash on
            deleted arguments, so that each call has to check them.

    Attributes:
        options: the other options of ``jax.jit``.
        jitted: the ``jax.jit``. XLA compiles it at the first run.
        call: runs `jitted` after the necessary checks and transfers.
    """

    def __init__(
        self,
        signature: CallSignature,
        layout: CallLayout,
        flat_function: Callable[..., Any],
        in_shardings: Sequence[Any],
        options: Mapping[str, Any],
        on_several_devices: bool,
    ) -> None:
        self.layout, self.flat_function = layout, flat_function
        self._signature, self.options = signature, options
        # By slot, the shardings to which calls place host data, in the form of `compress`. The same slot may
        # have no sharding in *in_shardings*, because the type of placed arrays may hold their sharding.
        self._host_data_shardings: dict[int, Any] = {}
        if in_shardings.count(None) < len(in_shardings):
            options = {**options, 'in_shardings': tuple(map(expand, in_shardings))}
        self.jitted: Any = jax.jit(
            flat_function, static_argnums=layout.static, donate_argnums=layout.donated, **options
        )
        needs_checks = DELETED_ARGUMENTS_CRASH and on_several_devices
        self.call: Callable[..., Any] = self._with_checks() if needs_checks else self.jitted
        self._call_placed = self.call  # for arguments without host data

    def place_host_data(self, shardings: Mapping[int, Any], policy: ReshardPolicy) -> None:
        """Makes calls place host data in some slots before they run the program.

        Where types hold shardings, host data would have an unsharded type: JAX would trace and reject each
        call. For calls with another key these shardings may be wrong, which the check inside the trace finds.

        Args:
            shardings: the shardings of the data by slot, in the form of `compress`.
            policy: which leaves are moved.
        """
        if shardings.items() <= self._host_data_shardings.items():
            return
        call_placed = self._call_placed
        self._host_data_shardings = by_slot = {**self._host_data_shardings, **shardings}

        def place_and_call(*flat_args: Any) -> Any:
            placed_args = list(flat_args)
            for slot, form in by_slot.items():
                leaves = jax.tree.leaves(flat_args[slot])
                slot_shardings = form[1] if isinstance(form, tuple) else [form] * len(leaves)
                if targets := target_shardings(leaves, slot_shardings, policy):
                    placed_args[slot] = move_leaves(flat_args[slot], targets)
            return call_placed(*placed_args)

        self.call = place_and_call

    def _with_checks(self) -> Callable[..., Any]:
        """Returns the jitted function preceded by checks for deleted arguments and double donation."""
        jitted, layout, signature, leaves_of = self.jitted, self.layout, self._signature, jax.tree.leaves
        is_deleted = operator.methodcaller('is_deleted')

        def call(*flat_args: Any) -> Any:
            leaves = leaves_of(flat_args)
            try:
                may_be_deleted = any(map(is_deleted, leaves))
            except (AttributeError, TypeError):  # numpy data, numbers or tracers among the leaves
                may_be_deleted = True
            if may_be_deleted:
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
class TraceCacheEntry:
    """The shardings, trace and program of all calls with one key, filled in in this order.

    The thread that traces the function for the key holds the lock. The lock is re-entrant, so that a function
    that calls itself gets an error. Two threads can deadlock only if two functions call each other with the
    same keys, which a single thread could not trace either.

    Attributes:
        key: the key.
        argument_shardings: the shardings of the arguments, or None before the rules are resolved. For the key
            of placed arrays a sharding may be None, if the array's type holds it. Host data has another key,
            whose shardings are the ones to place it with.
        batch: the batch among the arguments, or None.
        pipelines: the pipelines of the function, or None.
        partitioned: the partitioned step, or the reason why the step is not partitioned. None without a
            batch.
        gradient_outside: whether JAX has differentiated the function from outside.
        output_shardings: the shardings of the outputs, or None before the trace.
        out_tree: the tree structure of the outputs.
        jaxpr: the jaxpr of the function, which later traces replay, or None if it cannot be replayed.
        value_kinds: the kinds of argument values for which the jaxpr is valid.
        constrains_outputs: whether the outputs are constrained to the devices of the mesh, because JAX could
            not determine the devices otherwise.
        program: the program that serves the key, or None before the trace.
        outputs_checked: whether the devices of a call's outputs have been checked.
        tracing: whether the function is being traced for this key.
        lock: held during the trace.
    """

    key: CallKey
    argument_shardings: Any = None
    batch: BatchArguments | None = None
    pipelines: Pipelines | None = None
    partitioned: PartitionedStep | str | None = None
    gradient_outside: bool = False
    output_shardings: Shardings | None = None
    out_tree: Any = None
    jaxpr: Any = None
    value_kinds: Any = None
    constrains_outputs: bool = False
    program: Program | None = None
    outputs_checked: bool = False
    tracing: bool = False
    lock: Any = dataclasses.field(default_factory=threading.RLock)

    def record_gradient(self) -> None:
        """Records that JAX differentiates the function from outside."""
        self.gradient_outside = True


class ProgramTable:
    """Finds the program of a call by a partial key, for functions with several programs.

    A partial key is the tree structure of the arguments, the shape and dtype of each leaf, and the static
    values. It costs a fraction of a `CallKey`. The `CallKey` is computed only if the partial key is new, or
    ambiguous: calls that differ in the trace context have equal partial keys.

    Args:
        find_by_key: returns the program of a call by its `CallKey`, or None if there is none yet.
        wrong_program: returns the exception to raise for a call without a program.
    """

    def __init__(
        self, find_by_key: Callable[[Sequence[Any]], Program | None], wrong_program: Callable[[], Exception]
    ) -> None:
        self._find_by_key, self._wrong_program = find_by_key, wrong_program
        self._layouts: dict[int, CallLayout] = {}
        self._programs: dict[Any, Program | None] = {}  # None for an ambiguous key

    def add(self, flat_args: Sequence[Any], program: Program) -> None:
        """Records the program of a call."""
        if len(self._programs) >= lru_cache.SIZE:
            self._programs.clear()
        self._layouts[len(flat_args)] = program.layout
        key = _partial_key(program.layout, flat_args)
        if self._programs.setdefault(key, program) is not program:
            self._programs[key] = None

    def find(self, flat_args: Sequence[Any]) -> Program | None:
        """Returns the program of a call, or None if there is none yet."""
        try:
            program = self._programs.get(_partial_key(self._layouts[len(flat_args)], flat_args))
            if program is None:
                program = self._find_by_key(flat_args)
                if program is not None:
                    self.add(flat_args, program)
            return program
        except Exception:  # noqa: BLE001 - the call is invalid, and `dispatch` raises about it
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

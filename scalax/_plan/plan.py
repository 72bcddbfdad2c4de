"""What does a compiled step hold, move and take? A plan: the answers as one value."""

from __future__ import annotations

import collections
import dataclasses
import numbers
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scalax._plan import plan_json
from scalax._plan.collectives import KINDS, Collective
from scalax._plan.device_coords import NETWORKS, Network, Place, places_on_torus
from scalax._plan.diff import PlanDiff
from scalax._plan.hardware import Hardware, find_hardware, hardware_of
from scalax._plan.hlo_cost import Work
from scalax._plan.hlo_loops import Counted
from scalax._plan.memory import Buffer, Memory
from scalax._plan.page import render_fragment, render_page
from scalax._plan.png import save_png
from scalax._plan.roofline import Roofline, Seconds, make_roofline
from scalax._plan.text import render
from scalax.errors import ArgumentError, PlanError, did_you_mean
from scalax.explain import ShardingReport

_NO_WORK = Work()


@dataclasses.dataclass(frozen=True)
class Plan:
    """What `MeshShardingHelper.plan` returns; ``str()`` of it is a page of text.

    Attributes:
        name: the name of the function.
        mesh: mesh axis name -> size.
        devices: on how many devices it runs: on one, if nothing says where arguments or outputs lie.
        platform: the hardware that it was compiled for, such as ``'cpu'``.
        memory: bytes on each device.
        inputs: the arguments with their shardings.
        outputs: the outputs with theirs.
        collectives: what the devices send one another in one call, the largest first.
        flops: the floating-point operations of one call, on all devices together, as the function is written:
            those of its matrix products, convolutions and FFTs; forward, backward, and computed again.
        flops_counted: how well that is known.
        work: what each device computes and moves, as the compiler has divided it; also what several do alike.
        model_flops: the operations that the model needs in one call, where the caller has said so.
        device_kind: what JAX calls the devices.
        places: where the devices of the mesh lie, in the order of the mesh.
        quick: whether the compiler laid the program out but made no code of it. Memory is then what it laid
            out, which is near what it counts in the end, and shardings are those that were asked for.
        refusal: what the compiler says of a program that does not fit into the memory of a device; empty
            for one that it made, and for quick plans.
        buffers: what takes most of the memory when most is taken, the largest first; of TPUs only.
    """

    name: str
    mesh: Mapping[str, int]
    devices: int
    platform: str
    memory: Memory
    inputs: ShardingReport
    outputs: ShardingReport
    collectives: tuple[Collective, ...]
    flops: int = 0
    flops_counted: Counted = Counted.EXACTLY
    work: Work = _NO_WORK
    model_flops: int | None = None
    device_kind: str = ''
    places: tuple[Place, ...] = ()
    quick: bool = False
    refusal: str = ''
    buffers: tuple[Buffer, ...] = ()

    @property
    def fits(self) -> bool | None:
        """Whether it fits into the memory of each device; None where nobody knows how much there is.

        Compilers for accelerators refuse what does not fit, and so they have the last word; of a quick plan
        it is the memory that is compared.
        """
        if self.refusal:
            return False
        if not self.memory.estimated and not self.quick:
            return True
        return None if self.memory.limit is None else self.memory.peak <= self.memory.limit

    @property
    def known_roofline(self) -> Roofline | None:
        """`roofline` of the devices that the plan is for; None where numbers are missing for it."""
        try:
            return self.roofline() if hardware_of(self.device_kind) else None
        except PlanError:
            return None

    @property
    def totals(self) -> dict[tuple[str, ...], dict[str, int]]:
        """Along which mesh axes how much is moved: axes -> kind -> bytes of all executions.

        Bytes are those of whole arrays, as in `Collective.bytes`.
        """
        totals: dict[tuple[str, ...], collections.Counter[str]] = {}
        for row in self.collectives:
            totals.setdefault(row.axes, collections.Counter())[row.kind] += row.count * row.bytes
        return {axes: dict(kinds) for axes, kinds in totals.items()}

    @property
    def networks(self) -> dict[tuple[str, ...], tuple[Network, ...]]:
        """What carries that: axes as in `totals` -> the `Collective.networks` of all that run along them."""
        used: dict[tuple[str, ...], set[Network]] = {}
        for row in self.collectives:
            used.setdefault(row.axes, set()).update(row.networks)
        return {axes: tuple(name for name in NETWORKS if name in those) for axes, those in used.items()}

    def count(self, kind: str, axes: str | tuple[str, ...] | None = None) -> int:
        """How often collectives of a kind are executed in one call.

        Args:
            kind: such as ``'all-gather'``.
            axes: count only those along these mesh axes (or this one).

        Raises:
            ArgumentError: an unknown kind, or an axis that the mesh does not have.
        """
        axes = (axes,) if isinstance(axes, str) else axes
        if kind not in KINDS:
            raise ArgumentError(f'there is no collective {kind!r} ({did_you_mean(kind, KINDS)})')
        for axis in axes or ():
            if axis not in self.mesh:
                raise ArgumentError(f'the mesh has no axis {axis!r} ({did_you_mean(str(axis), self.mesh)})')
        return sum(
            row.count
            for row in self.collectives
            if row.kind == kind and (axes is None or set(row.axes) == set(axes))
        )

    def with_model_flops(self, model_flops: float) -> Plan:
        """The same plan, knowing how many operations the model needs: what `Roofline.mfu` is measured by.

        Args:
            model_flops: operations of one call, such as 6 x parameters x tokens for training a dense decoder
                (https://jax-ml.github.io/scaling-book/transformers). What is computed again does not count.

        Raises:
            PlanError: it is not positive.
        """
        if not isinstance(model_flops, numbers.Real) or not 0 < model_flops < float('inf'):
            raise PlanError(f'model_flops has to be a positive number, got {model_flops!r}')
        return dataclasses.replace(self, model_flops=round(model_flops))

    def roofline(
        self,
        hardware: Hardware | str | None = None,
        *,
        torus: Mapping[str, int | Sequence[int]] | None = None,
    ) -> Roofline:
        """How long one call takes at least, and what bounds it.

        Args:
            hardware: whose numbers to use: a `Hardware`, or the name of one in `HARDWARE`. By default those
                of the devices that the plan is for.
            torus: for devices that do not lie in a torus, such as simulated ones: along which of its axes
                each mesh axis is to lie, ``{'fsdp': (4, 4), 'tp': 4}``. Each device then stands for a chip.
                Mesh axes that are not named lie across slices.

        Raises:
            PlanError: a number that is needed is not known, or devices lie in a way that is not understood.

        Example:
            >>> import jax
            >>> from scalax.sharding import MeshShardingHelper, PartitionSpec
            >>> helper = MeshShardingHelper([4, 2], ['fsdp', 'tp'])
            >>> step = helper.sjit(lambda x: x @ x.T, in_shardings=PartitionSpec('fsdp', 'tp'))
            >>> plan = helper.plan(step, jax.ShapeDtypeStruct((4096, 4096), 'bfloat16'))
            >>> plan.flops == 2 * 4096**3
            True
            >>> plan.roofline('v5p', torus={'fsdp': 4, 'tp': 2}).bound
            'ici:fsdp'
        """
        found = find_hardware(hardware, self.device_kind)
        if torus is None:
            return make_roofline(self, found, self.places)
        places = places_on_torus(torus, self.mesh, found)
        return make_roofline(self, found, places)

    @property
    def step_seconds(self) -> Seconds:
        """`Roofline.step_seconds` of the devices that the plan is for; raises as `roofline` does."""
        return self.roofline().step_seconds

    @property
    def bound(self) -> str:
        """`Roofline.bound` of the devices that the plan is for; raises as `roofline` does."""
        return self.roofline().bound

    @property
    def mfu(self) -> float | None:
        """`Roofline.mfu` of the devices that the plan is for; raises as `roofline` does."""
        return self.roofline().mfu

    def __str__(self) -> str:
        return self.to_text()

    def to_text(self, width: int | None = None) -> str:
        """The plan as text.

        Args:
            width: the columns that it may take; those of the terminal by default.
        """
        return render(self, width)

    def _repr_html_(self) -> str:
        return render_fragment(self)

    def to_html(self, path: str | os.PathLike[str], title: str | None = None) -> None:
        """Writes the plan as a page of its own, which loads nothing and runs no script.

        Args:
            path: the file to write.
            title: the title of the page; `name` by default.
        """
        Path(path).write_bytes(render_page(self, f'Plan of {self.name}' if title is None else title).encode())

    def save_png(self, path: str | os.PathLike[str]) -> None:
        """Draws the plan: memory, seconds, and where mesh axes lie.

        Args:
            path: the file to write.

        Raises:
            MissingDependencyError: matplotlib is not installed.
        """
        save_png(self, path)

    def to_dict(self) -> dict[str, Any]:
        """The plan in plain Python values, ready for ``json.dumps``."""
        return {
            'name': self.name,
            'mesh': dict(self.mesh),
            'devices': self.devices,
            'platform': self.platform,
            'memory': {**dataclasses.asdict(self.memory), 'total': self.memory.total},
            'fits': self.fits,
            'quick': self.quick,
            'refusal': self.refusal,
            'buffers': [{**row._asdict(), 'source': row.source._asdict()} for row in self.buffers],
            'flops': self.flops,
            'flops_counted': self.flops_counted.value,
            'model_flops': self.model_flops,
            'work': {**dataclasses.asdict(self.work), 'counted': self.work.counted.value},
            'device_kind': self.device_kind,
            'places': [place._asdict() for place in self.places],
            'inputs': self.inputs.to_dict(),
            'outputs': self.outputs.to_dict(),
            'collectives': [
                {
                    'kind': row.kind,
                    'axes': list(row.axes),
                    'group': row.group,
                    'count': row.count,
                    'counted': row.counted.value,
                    'bytes': row.bytes,
                    'source': row.source._asdict(),
                    'networks': list(row.networks),
                    **({'part': list(row.part)} if row.part else {}),
                    **({'scattered': True} if row.scattered else {}),
                }
                for row in self.collectives
            ],
        }

    def to_json(self) -> str:
        """The plan as JSON: `to_dict` and a version; to keep beside a test, and compare."""
        return plan_json.write(self)

    @classmethod
    def load(cls, text_or_path: str | os.PathLike[str]) -> Plan:
        """Reads what `to_json` wrote.

        Args:
            text_or_path: the JSON itself, or the path of a file of it.

        Raises:
            DataError: this is no plan, or one of another version, or the file cannot be read.
            FileNotFoundError: there is no such file.
            ArgumentError: it is neither text nor a path.
            OSError: there is no such file, or it cannot be read.
        """
        return plan_json.read(cls, text_or_path)

    def diff(self, other: Plan) -> PlanDiff:
        """What is not the same in *other*, a later plan; false when nothing changed.

        Args:
            other: the plan to compare with.

        Raises:
            ArgumentError: it is no plan.
        """
        if not isinstance(other, Plan):
            raise ArgumentError(f'diff takes another plan, got {type(other).__name__}: Plan.load reads one')
        return PlanDiff(self, other)

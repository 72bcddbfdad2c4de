"""Plans: memory, communication and time of a compiled step."""

from __future__ import annotations

import dataclasses
import difflib
import os
from typing import Any

from scalax._core.render import serialization
from scalax._core.render.blocks import Block
from scalax._core.render.renderable import Renderable
from scalax._planning.report.plan_data import PlanData
from scalax._planning.report.plan_page import plan_blocks
from scalax.errors import ArgumentError

_WIDTH = 110  # of the text that `diff` compares


@dataclasses.dataclass(frozen=True)
class Plan(PlanData, Renderable):
    """Memory, communication and time of a compiled step; ``str()`` of it is a page of text.

    `MeshShardingHelper.plan` makes one.

    Attributes:
        name: the name of the function.
        mesh: mesh axis name -> size.
        devices: the number of devices that it runs on: one, if neither arguments nor outputs have shardings.
        platform: the hardware that it was compiled for, such as ``'cpu'``.
        memory: bytes on each device.
        inputs: the arguments with their shardings.
        outputs: the outputs with theirs.
        collectives: the collectives of one call, the largest first.
        flops: the floating-point operations of one call, on all devices together, as the function is written:
            those of its matrix products, convolutions and FFTs; forward, backward, and recomputed. What idle
            stages of pipelines compute is not among them (`idle_flops`).
        flops_exactness: how well that is known.
        device_cost: what each device computes and moves, as the compiler has partitioned the step; work that
            several devices repeat counts for each.
        model_flops: the operations that the model needs in one call: those of the forward and the backward
            pass (`count_model_flops`), without what is recomputed, unless `with_model_flops` has given
            others. None if not all of them can be counted.
        device_kind: what JAX calls the devices.
        device_positions: the positions of the devices of the mesh, in the order of the mesh.
        quick: whether the compiler only laid the program out, without making code. Memory is then that of the
            layout, which is close to the final one, and shardings are the requested ones.
        refusal: the error of the compiler for a program that does not fit into the memory of a device; empty
            if it fits, and for quick plans.
        buffers: the arrays that are held at the peak of memory, the largest first: at least 99 % of it; for
            TPUs and GPUs only.
        host_transfers: what each device exchanges with its host; for TPUs and GPUs only.
        propagation: how the step is partitioned along its batch, as `SjitFunction.explain_propagation`
            reports; None for functions that ``sjit`` did not make.
        flags: for GPUs, the options of their compiler that are not its defaults: those in ``XLA_FLAGS``,
            those of the function (``compiler_options``), and, unless one of these has them or the GPUs are
            here, those with which products are cuBLAS's.
        schedule: for GPUs whose numbers are known, the seconds along the compiler's schedule.
        pipelines: the loops over layers that run as pipelines, as *stages* of ``sjit`` requests.
        hardware_override: the hardware that the caller passed in place of the known specification of
            the devices.
    """

    def _title(self) -> str:
        return f'Plan of {self.name}'

    def _blocks(self, title: str) -> list[Block]:
        return plan_blocks(self, title)

    def to_dict(self) -> dict[str, Any]:
        """The plan in plain Python values, ready for ``json.dumps``."""
        values = {
            field.name: serialization.to_plain(getattr(self, field.name))
            for field in dataclasses.fields(self)
        }
        memory = {**values['memory'], 'total': self.memory.total}
        return {**values, 'memory': memory, 'fits': self.fits}

    def to_json(self) -> str:
        """The plan as JSON: `to_dict` and a version; keep it beside a test, and compare."""
        return serialization.write(self.to_dict())

    @classmethod
    def load(cls, text_or_path: str | os.PathLike[str]) -> Plan:
        """Reads what `to_json` wrote.

        Args:
            text_or_path: the JSON itself, or the path of a file of it.

        Raises:
            DataError: this is not a plan, or one of another version, or the file cannot be read.
            FileNotFoundError: there is no such file.
            ArgumentError: it is neither text nor a path.
        """
        return serialization.read(cls, text_or_path, 'plan')

    def diff(self, other: Plan) -> str:
        """The lines of text in which *other*, a later plan, differs: - before, + after; empty if none do.

        The shardings of arguments are compared by ``plan.inputs.diff(other.inputs)``.

        Args:
            other: the plan to compare with.

        Raises:
            ArgumentError: it is not a plan.
        """
        if not isinstance(other, Plan):
            raise ArgumentError(f'diff takes another plan, got {type(other).__name__}: Plan.load reads one')
        before, after = (plan.to_text(_WIDTH).splitlines() for plan in (self, other))
        return '\n'.join(difflib.unified_diff(before, after, lineterm='', n=0))

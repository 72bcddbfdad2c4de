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
    """The memory, communication and time of a compiled step; ``str()`` renders it as text.

    `MeshShardingHelper.plan` makes one.

    Attributes:
        name: the name of the function.
        mesh: mesh axis name -> size.
        devices: the number of devices that it runs on. It is one if neither arguments nor outputs have
            shardings.
        platform: the platform that it was compiled for, such as ``'cpu'``.
        memory: the memory on each device.
        inputs: the shardings of the arguments.
        outputs: the shardings of the outputs.
        collectives: the collectives of one call, the largest first.
        flops: the FLOPs of one call, on all devices together, of the function as written: matmuls,
            convolutions and FFTs; forward, backward, and recomputed. The FLOPs of idle pipeline stages are
            not included (`idle_flops`).
        flops_exactness: the exactness of `flops`.
        device_cost: the FLOPs and bytes of each device, in the partitioned program, including redundant
            computation.
        model_flops: the FLOPs that the model needs in one call: those of the forward and the backward pass
            (`count_model_flops`), without recomputation, or those of `with_model_flops`. None if not all of
            them can be counted.
        device_kind: JAX's name of the devices.
        device_positions: the positions of the devices of the mesh, in the order of the mesh.
        quick: whether the compiler only assigned memory, without generating code. Then the memory is close to
            that of the final program, and shardings are the requested ones.
        refusal: the error of the compiler for a program that does not fit into the memory of a device; empty
            if it fits, and for quick plans.
        buffers: the arrays that are live at the peak of memory, the largest first, at least 99 % of the peak;
            for TPUs and GPUs only.
        host_transfers: the bytes transferred between each device and its host; for TPUs and GPUs only.
        propagation: how the step is partitioned along its batch, as `SjitFunction.explain_propagation`
            reports; None for functions that ``sjit`` did not compile.
        flags: for GPUs, the compiler options that differ from the defaults: those in ``XLA_FLAGS``, those of
            the function (``compiler_options``), and, for GPUs that are not attached, the options that select
            the matmuls of cuBLAS, if not set otherwise. For TPUs, the flags in ``LIBTPU_INIT_ARGS``.
        schedule: for GPUs with known specs, the time along the compiler's schedule.
        pipelines: the loops over layers that run as pipelines, as *pipeline* of ``sjit`` requests.
        hardware_override: the hardware that the caller passed in place of that of the devices.
    """

    def _title(self) -> str:
        return f'Plan of {self.name}'

    def _blocks(self, title: str) -> list[Block]:
        return plan_blocks(self, title)

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan as plain Python values, ready for ``json.dumps``."""
        values = {
            field.name: serialization.to_plain(getattr(self, field.name))
            for field in dataclasses.fields(self)
        }
        memory = {**values['memory'], 'total': self.memory.total}
        return {**values, 'memory': memory, 'fits': self.fits}

    def to_json(self) -> str:
        """Returns the plan as JSON: `to_dict` with a version. Store it beside a test, and compare."""
        return serialization.write(self.to_dict())

    @classmethod
    def load(cls, text_or_path: str | os.PathLike[str]) -> Plan:
        """Reads a plan that `to_json` wrote.

        Args:
            text_or_path: the JSON, or the path of a file that contains it.

        Raises:
            DataError: the text is not a plan, or a plan of another version, or the file cannot be read.
            FileNotFoundError: there is no such file.
            ArgumentError: the argument is neither text nor a path.
        """
        return serialization.read(cls, text_or_path, 'plan')

    def diff(self, other: Plan) -> str:
        """Returns the lines of text that differ in *other*, a later plan, as a diff; empty if none do.

        The shardings of arguments are compared by ``plan.inputs.diff(other.inputs)``.

        Args:
            other: the later plan.

        Raises:
            ArgumentError: *other* is not a plan.
        """
        if not isinstance(other, Plan):
            raise ArgumentError(f'diff takes another plan, got {type(other).__name__}: Plan.load reads one')
        before, after = (plan.to_text(_WIDTH).splitlines() for plan in (self, other))
        return '\n'.join(difflib.unified_diff(before, after, lineterm='', n=0))

"""Operations that the compiler cannot partition along the Auto axes: each runs in a `shard_map` over them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scalax._jax.primitives import KERNEL, primitive_name
from scalax._spmd.editor import EditorBase
from scalax._spmd.operations.cudnn_attention import ATTENTION, attention_along_auto_axes
from scalax._spmd.operations.merged_heads import write_kernel

OPAQUE = ATTENTION | {KERNEL}
"""The names of their primitives."""


def write_opaque(editor: EditorBase, equation: Any, operands: Sequence[Any], results: Sequence[Any]) -> None:
    """Writes an opaque operation on local shards.

    Args:
        editor: the editor of the jaxpr.
        equation: the operation.
        operands: the variables of its operands, of local shapes.
        results: the variables of its results, of local shapes.
    """
    if primitive_name(equation) == KERNEL:
        write_kernel(editor, equation, operands, results)
        return
    auto = editor.context.auto
    editor.eqns.append(attention_along_auto_axes(editor.code, auto, equation, operands, results))

"""The partitioning of a call of ``jax.experimental.custom_partitioning``.

No page of JAX lists the parameters of the primitive. All functions rely on these: *partition*,
*infer_sharding_from_operands*, *sharding_rule*, *static_args*, *in_tree* and *out_tree*.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from scalax._jax.equations import shape_of
from scalax._jax.rewriting import trace_added_equation, with_results

Specs = list[PartitionSpec]


def as_shard_map(equation: Any, specs: Sequence[PartitionSpec], mesh: AbstractMesh) -> Any:
    """Returns a `shard_map` to replace a `custom_partitioning`, which runs its function of local shards.

    Returns None if the shardings of the results do not follow from those of the operands, if the function
    closes over arrays, or if the user's code needs something else. Relies on *partition* taking
    *static_args*, the mesh, and the types of operands and results with their shardings; and on what
    `rewriting.trace_added_equation` relies on.

    Args:
        equation: the call.
        specs: the specs of its operands.
        mesh: the ambient mesh.
    """
    try:
        call = _shard_map(equation, specs, mesh)
    except Exception:  # noqa: BLE001 - raised by user code
        return None
    if call is None or [*map(id, call.invars)] != [*map(id, equation.invars)]:
        return None
    return with_results(call, equation.outvars)


def _shard_map(equation: Any, specs: Sequence[PartitionSpec], mesh: AbstractMesh) -> Any:
    params = equation.params
    operands = _structs(equation.invars, specs, mesh)
    arguments = jax.tree.unflatten(params['in_tree'], operands)
    results = _result_specs(equation, specs, arguments, mesh)
    if results is None:
        return None
    expected = jax.tree.unflatten(params['out_tree'], _structs(equation.outvars, results, mesh))
    _, function, outputs, inputs = params['partition'](*params['static_args'], mesh, arguments, expected)

    def local_function(*local_shards: Any) -> Any:
        return jax.tree.leaves(function(*jax.tree.unflatten(params['in_tree'], local_shards)))

    in_specs, out_specs = (
        [sharding.spec for sharding in jax.tree.leaves(shardings)] for shardings in (inputs, outputs)
    )
    mapped = jax.shard_map(
        local_function, mesh=mesh, in_specs=tuple(in_specs), out_specs=out_specs, check_vma=False
    )
    return trace_added_equation(mapped, equation, equation.invars)


def _structs(atoms: Sequence[Any], specs: Sequence[PartitionSpec], mesh: AbstractMesh) -> list[Any]:
    """Returns the types of values, with their shardings."""
    return [
        jax.ShapeDtypeStruct(shape_of(atom), atom.aval.dtype, sharding=NamedSharding(mesh, spec))
        for atom, spec in zip(atoms, specs, strict=True)
    ]


def _result_specs(
    equation: Any, specs: Sequence[PartitionSpec], arguments: Any, mesh: AbstractMesh
) -> Specs | None:
    """Returns the specs of the results, from a sharding rule or from the user's function.

    Relies on a rule having *operand_mappings* and *result_mappings*, with a name for each dimension. Other
    mappings, for several dimensions at once, are not supported.
    """
    params, atoms = equation.params, (*equation.invars, *equation.outvars)
    rule = params.get('sharding_rule')
    factors = [*getattr(rule, 'operand_mappings', ()), *getattr(rule, 'result_mappings', ())]
    if len(factors) == len(atoms) and all(
        len(names) == len(shape_of(atom)) and all(isinstance(name, str) for name in names)
        for names, atom in zip(factors, atoms, strict=True)
    ):
        entries: dict[str, Any] = {}
        for names, spec in zip(factors, specs, strict=False):
            entries.update({name: entry for name, entry in zip(names, spec, strict=False) if entry})
        return [PartitionSpec(*map(entries.get, names)) for names in factors[len(specs) :]]
    infer = params.get('infer_sharding_from_operands')
    if infer is None:
        return None
    replicated = [PartitionSpec()] * len(equation.outvars)
    expected = jax.tree.unflatten(params['out_tree'], _structs(equation.outvars, replicated, mesh))
    shardings = infer(*params['static_args'], mesh, arguments, expected)
    return [sharding.spec for sharding in jax.tree.leaves(shardings)]

"""What a call of ``jax.experimental.custom_partitioning`` says of its partitioning.

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
    """Returns a `shard_map` in place of a `custom_partitioning`, which runs its function of blocks.

    It is None if the shardings of results do not follow from those of operands, if the function closes over
    arrays, or if the code of users for a compiler asks for more than is known here. Relies on *partition*
    taking *static_args*, the mesh, and the types of operands and results with their shardings; and on what
    `trace_added_equation` of `rewriting` relies on.

    Args:
        equation: the call.
        specs: where its operands are.
        mesh: the mesh, in force.
    """
    try:
        call = _mapped(equation, specs, mesh)
    except Exception:  # noqa: BLE001 - of users
        return None
    if call is None or [*map(id, call.invars)] != [*map(id, equation.invars)]:
        return None
    return with_results(call, equation.outvars)


def _mapped(equation: Any, specs: Sequence[PartitionSpec], mesh: AbstractMesh) -> Any:
    params = equation.params
    operands = _typed(equation.invars, specs, mesh)
    arguments = jax.tree.unflatten(params['in_tree'], operands)
    results = _result_specs(equation, specs, arguments, mesh)
    if results is None:
        return None
    expected = jax.tree.unflatten(params['out_tree'], _typed(equation.outvars, results, mesh))
    _, function, outputs, inputs = params['partition'](*params['static_args'], mesh, arguments, expected)

    def of_blocks(*blocks: Any) -> Any:
        return jax.tree.leaves(function(*jax.tree.unflatten(params['in_tree'], blocks)))

    in_specs, out_specs = (
        [sharding.spec for sharding in jax.tree.leaves(each)] for each in (inputs, outputs)
    )
    mapped = jax.shard_map(
        of_blocks, mesh=mesh, in_specs=tuple(in_specs), out_specs=out_specs, check_vma=False
    )
    return trace_added_equation(mapped, equation, equation.invars)


def _typed(atoms: Sequence[Any], specs: Sequence[PartitionSpec], mesh: AbstractMesh) -> list[Any]:
    """The types of values, with their shardings."""
    return [
        jax.ShapeDtypeStruct(shape_of(atom), atom.aval.dtype, sharding=NamedSharding(mesh, spec))
        for atom, spec in zip(atoms, specs, strict=True)
    ]


def _result_specs(
    equation: Any, specs: Sequence[PartitionSpec], arguments: Any, mesh: AbstractMesh
) -> Specs | None:
    """The specs of the results: by the factors of a sharding rule, or as a function infers them.

    Relies on a rule having *operand_mappings* and *result_mappings*, with a name for each dimension. Others
    stand for several dimensions, or are functions.
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
    nothing = [PartitionSpec()] * len(equation.outvars)
    expected = jax.tree.unflatten(params['out_tree'], _typed(equation.outvars, nothing, mesh))
    found = infer(*params['static_args'], mesh, arguments, expected)
    return [sharding.spec for sharding in jax.tree.leaves(found)]

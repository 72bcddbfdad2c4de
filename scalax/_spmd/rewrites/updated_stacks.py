"""Stacks that a loop updates, such as a KV cache: sharded inside the loop as they are before and behind it.

Left to the compiler, the dimensions of such a stack that are not the batch's would be sharded as the rounds
use them, and moved back at the end of each round: the entire stack is sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from scalax._core.pytree.partition_specs import canonical, entries, entry_axes
from scalax._jax.equations import CALLS, call_jaxpr, loop_of, open_jaxpr, shape_of
from scalax._jax.primitives import primitive_name
from scalax._jax.rewriting import make_constraint, replace_jaxpr, with_jaxprs, with_operands
from scalax._jax.tracing import trace_context

# With `reshard`, which JAX puts into jnp.where under a mesh, and which moves nothing along Auto axes.
_UPDATES = frozenset(
    ('copy', 'dynamic_update_slice', 'name', 'reshard', 'scatter', 'scatter-add', 'select_n')
)

Shardings = Sequence[NamedSharding | None]


def constrain_updated_stacks(
    jaxpr: Any, given: Shardings, returned: Shardings, mesh: Mesh | AbstractMesh
) -> Any:
    """Constrains the elements of stacks that a loop takes and returns updated, where both ends agree.

    Args:
        jaxpr: the jaxpr.
        given: the shardings of its arguments, None for those that the compiler places.
        returned: the shardings of its results, likewise.
        mesh: the mesh of the constraints. It is in force.

    Returns:
        The jaxpr; the same object if nothing is constrained.
    """
    inner = open_jaxpr(jaxpr)
    before = _specs(inner.invars, given)
    behind = _specs(inner.outvars, returned)
    if not before or not behind:
        return jaxpr
    new = [_placed(equation, before, behind, mesh) for equation in inner.eqns]
    if all(one is other for one, other in zip(new, inner.eqns, strict=True)):
        return jaxpr
    return replace_jaxpr(jaxpr, eqns=new)


def _specs(atoms: Sequence[Any], shardings: Shardings) -> dict[int, PartitionSpec]:
    """The specs of variables, by their ids."""
    pairs = zip(atoms, shardings, strict=True)
    return {id(atom): canonical(sharding.spec) for atom, sharding in pairs if sharding is not None}


def _placed(
    equation: Any,
    before: Mapping[int, PartitionSpec],
    behind: Mapping[int, PartitionSpec],
    mesh: Mesh | AbstractMesh,
) -> Any:
    """An equation with constraints in its jaxpr, if it is a loop over stacks, or a call that holds one."""
    name = primitive_name(equation)
    if name in CALLS:
        given = [_sharding(before.get(id(atom)), mesh) for atom in equation.invars]
        returned = [_sharding(behind.get(id(var)), mesh) for var in equation.outvars]
        return with_jaxprs(equation, constrain_updated_stacks(call_jaxpr(equation), given, returned, mesh))
    if name != 'scan':
        return equation
    loop = loop_of(equation)
    body = open_jaxpr(loop.body)
    stacks = dict(zip(map(id, loop.split(body.invars)[2]), loop.split(equation.invars)[2], strict=True))
    made = {id(var) for inside in body.eqns for var in inside.outvars}
    wanted: dict[int, NamedSharding] = {}
    for var, element in zip(equation.outvars[loop.num_carry :], body.outvars[loop.num_carry :], strict=True):
        spec = behind.get(id(var))
        if spec is None or id(element) not in made:
            continue
        updated = [stacks[id(argument)] for argument in _updated(body, element) if id(argument) in stacks]
        padded = (*entries(spec), *[None] * (len(shape_of(var)) - len(entries(spec))))
        if not entry_axes(padded[0]) and any(before.get(id(stack)) == spec for stack in updated):
            wanted[id(element)] = NamedSharding(mesh, PartitionSpec(*padded[1:]))
    return with_jaxprs(equation, _with_constraints(loop.body, wanted)) if wanted else equation


def _sharding(spec: PartitionSpec | None, mesh: Mesh | AbstractMesh) -> NamedSharding | None:
    return None if spec is None else NamedSharding(mesh, spec)


def _updated(jaxpr: Any, element: Any) -> Iterator[Any]:
    """The arguments of a jaxpr of which one of its values is an update."""
    arguments = {*map(id, jaxpr.invars)}
    makers = {id(var): equation for equation in jaxpr.eqns for var in equation.outvars}
    atoms = [element]
    while atoms:
        atom = atoms.pop()
        maker = makers.get(id(atom))
        if id(atom) in arguments:
            yield atom
        elif maker is not None and primitive_name(maker) in CALLS:  # such as jnp.where
            inner = open_jaxpr(call_jaxpr(maker))
            result = inner.outvars[[*map(id, maker.outvars)].index(id(atom))]
            operands = dict(zip(map(id, inner.invars), maker.invars, strict=True))
            atoms += [operands[id(argument)] for argument in _updated(inner, result)]
        elif maker is not None and primitive_name(maker) in _UPDATES:
            atoms += [operand for operand in maker.invars if shape_of(operand) == shape_of(element)]


def _with_constraints(jaxpr: Any, wanted: Mapping[int, NamedSharding]) -> Any:
    """The jaxpr of a round in which some variables are constrained where they are made."""
    names: dict[int, Any] = {}
    new: list[Any] = []
    context = trace_context()
    for equation in open_jaxpr(jaxpr).eqns:
        if not names.keys().isdisjoint(map(id, equation.invars)):
            equation = with_operands(equation, [names.get(id(atom), atom) for atom in equation.invars])
        new.append(equation)
        for var in equation.outvars:
            if id(var) in wanted:
                new.append(make_constraint(var, wanted[id(var)], equation, context))
                names[id(var)] = new[-1].outvars[0]
    results = [names.get(id(atom), atom) for atom in open_jaxpr(jaxpr).outvars]
    return replace_jaxpr(jaxpr, eqns=new, outvars=results)

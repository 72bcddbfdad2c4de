"""Sharding constraints for stacks that a loop updates, such as a KV cache, along the Auto axes.

Without them, the compiler may reshard the dimensions of such a stack for the body of the loop, and back at
the end of each iteration, which sends the entire stack.
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

# jnp.where contains a `reshard` under a mesh, which does nothing along Auto axes.
_UPDATES = frozenset(
    ('copy', 'dynamic_update_slice', 'name', 'reshard', 'scatter', 'scatter-add', 'select_n')
)

Shardings = Sequence[NamedSharding | None]


def constrain_updated_stacks(
    jaxpr: Any, in_shardings: Shardings, out_shardings: Shardings, mesh: Mesh | AbstractMesh
) -> Any:
    """Constrains the elements of stacks that a loop updates, if input and output have the same sharding.

    Args:
        jaxpr: the jaxpr.
        in_shardings: the shardings of its arguments; None for those that the compiler decides.
        out_shardings: the shardings of its results; None for those that the compiler decides.
        mesh: the mesh of the constraints, which is active.

    Returns:
        The jaxpr; the same object if nothing is constrained.
    """
    inner = open_jaxpr(jaxpr)
    in_specs = _specs(inner.invars, in_shardings)
    out_specs = _specs(inner.outvars, out_shardings)
    if not in_specs or not out_specs:
        return jaxpr
    new = [_with_inner_constraints(equation, in_specs, out_specs, mesh) for equation in inner.eqns]
    if all(new_equation is other for new_equation, other in zip(new, inner.eqns, strict=True)):
        return jaxpr
    return replace_jaxpr(jaxpr, eqns=new)


def _specs(atoms: Sequence[Any], shardings: Shardings) -> dict[int, PartitionSpec]:
    """Returns the specs of variables, by variable id."""
    pairs = zip(atoms, shardings, strict=True)
    return {id(atom): canonical(sharding.spec) for atom, sharding in pairs if sharding is not None}


def _with_inner_constraints(
    equation: Any,
    in_specs: Mapping[int, PartitionSpec],
    out_specs: Mapping[int, PartitionSpec],
    mesh: Mesh | AbstractMesh,
) -> Any:
    """Adds constraints inside an equation if it is a loop over stacks, or a call that contains one."""
    name = primitive_name(equation)
    if name in CALLS:
        in_shardings = [_sharding(in_specs.get(id(atom)), mesh) for atom in equation.invars]
        out_shardings = [_sharding(out_specs.get(id(var)), mesh) for var in equation.outvars]
        return with_jaxprs(
            equation, constrain_updated_stacks(call_jaxpr(equation), in_shardings, out_shardings, mesh)
        )
    if name != 'scan':
        return equation
    loop = loop_of(equation)
    body = open_jaxpr(loop.body)
    stacks = dict(zip(map(id, loop.split(body.invars)[2]), loop.split(equation.invars)[2], strict=True))
    computed = {id(var) for inside in body.eqns for var in inside.outvars}
    element_shardings: dict[int, NamedSharding] = {}
    for var, element in zip(equation.outvars[loop.num_carry :], body.outvars[loop.num_carry :], strict=True):
        spec = out_specs.get(id(var))
        if spec is None or id(element) not in computed:
            continue
        updated_stacks = [
            stacks[id(argument)] for argument in _updated_arguments(body, element) if id(argument) in stacks
        ]
        padded = (*entries(spec), *[None] * (len(shape_of(var)) - len(entries(spec))))
        if not entry_axes(padded[0]) and any(in_specs.get(id(stack)) == spec for stack in updated_stacks):
            element_shardings[id(element)] = NamedSharding(mesh, PartitionSpec(*padded[1:]))
    return (
        with_jaxprs(equation, _with_constraints(loop.body, element_shardings))
        if element_shardings
        else equation
    )


def _sharding(spec: PartitionSpec | None, mesh: Mesh | AbstractMesh) -> NamedSharding | None:
    return None if spec is None else NamedSharding(mesh, spec)


def _updated_arguments(jaxpr: Any, element: Any) -> Iterator[Any]:
    """Yields the arguments of a jaxpr that a value is an update of."""
    arguments = {*map(id, jaxpr.invars)}
    producers = {id(var): equation for equation in jaxpr.eqns for var in equation.outvars}
    atoms = [element]
    while atoms:
        atom = atoms.pop()
        producer = producers.get(id(atom))
        if id(atom) in arguments:
            yield atom
        elif producer is not None and primitive_name(producer) in CALLS:  # such as jnp.where
            inner = open_jaxpr(call_jaxpr(producer))
            result = inner.outvars[[*map(id, producer.outvars)].index(id(atom))]
            operands = dict(zip(map(id, inner.invars), producer.invars, strict=True))
            atoms += [operands[id(argument)] for argument in _updated_arguments(inner, result)]
        elif producer is not None and primitive_name(producer) in _UPDATES:
            atoms += [operand for operand in producer.invars if shape_of(operand) == shape_of(element)]


def _with_constraints(jaxpr: Any, shardings: Mapping[int, NamedSharding]) -> Any:
    """Returns the body of a loop with constraints after the equations that compute some variables."""
    renamed: dict[int, Any] = {}
    new: list[Any] = []
    context = trace_context()
    for equation in open_jaxpr(jaxpr).eqns:
        if not renamed.keys().isdisjoint(map(id, equation.invars)):
            equation = with_operands(equation, [renamed.get(id(atom), atom) for atom in equation.invars])
        new.append(equation)
        for var in equation.outvars:
            if id(var) in shardings:
                new.append(make_constraint(var, shardings[id(var)], equation, context))
                renamed[id(var)] = new[-1].outvars[0]
    results = [renamed.get(id(atom), atom) for atom in open_jaxpr(jaxpr).outvars]
    return replace_jaxpr(jaxpr, eqns=new, outvars=results)

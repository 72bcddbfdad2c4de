"""Executables: steps that a plan has saved, loaded and called without compiling."""

from __future__ import annotations

import hashlib
import io
import math
import os
import pickle
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.sharding import Mesh, Sharding

from scalax._mesh.meshes import require_devices
from scalax._plan.plan import Plan
from scalax._plan.saved_program import Head, read, versions_for
from scalax._plan.torus import places_of
from scalax._trace.contexts import MeshOwner
from scalax._tree.paths import dtype_on_devices, join, leaf_shape, leaf_text, optional_path, type_text
from scalax._tree.specs import axis_sizes_text
from scalax._util.strict_json import brief
from scalax.errors import ArgumentError, DataError, PlacementError, PlanError, shown, shown_leaves


class Executable:
    """A compiled step that was loaded from a file: call it as the step, and nothing is compiled.

    `load_executable` makes one.

    Attributes:
        plan: the plan that was saved with it.
        compiled: the ``jax.stages.Compiled``.
    """

    def __init__(self, plan: Plan, compiled: Any) -> None:
        self.plan = plan
        self.compiled = compiled

    def __repr__(self) -> str:
        plan = self.plan
        on = f'{math.prod(plan.mesh.values())} {plan.device_kind!r} devices'
        return f'<Executable of {plan.name} on {on} ({axis_sizes_text(plan.mesh)})>'

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Runs the step.

        Args:
            *args: its arguments, without static ones, which are part of the program. Host arrays are placed.
            **kwargs: those that were given by keyword when it was planned.

        Raises:
            ArgumentError: arguments have another structure, shape or dtype than the program.
            PlacementError: arguments are placed in another way.
        """
        try:
            return self.compiled(*args, **kwargs)
        except (TypeError, ValueError) as error:
            explained = self._explained(args, kwargs)
            if explained is None:
                raise
            raise explained from error

    def _explained(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Exception | None:
        """What is wrong with arguments that the program does not take; None if nothing is."""
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((args, kwargs))):
            return None  # a transformation such as grad, of which JAX says that it cannot be applied
        rows = self.plan.inputs.rows
        given, tree = jax.tree_util.tree_flatten_with_path((args, kwargs))
        if tree != self.compiled.in_tree:
            names = self._names()
            return self._structure_error([_path(path, names) for path, _ in given], tree)
        shardings = jax.tree.leaves(self.compiled.input_shardings, is_leaf=lambda leaf: leaf is None)
        wrong, elsewhere = [], []
        for row, (_, leaf), sharding in zip(rows, given, shardings, strict=True):
            own = leaf.sharding if isinstance(leaf, jax.Array) and leaf.committed else None
            if leaf_shape(leaf) != row.shape or str(dtype_on_devices(leaf)) != row.dtype:
                wrong.append(f'{row.path}: {type_text(row.dtype, row.shape)}, given {leaf_text(leaf)}')
            elif own and sharding and not own.is_equivalent_to(sharding, len(row.shape)):
                elsewhere.append(f'{row.path}: {_where(sharding)}, given {_where(own)}')
        if wrong:
            return ArgumentError(
                f'{self.plan.name!r} was compiled for other arguments:\n{shown_leaves(wrong)}\n'
                'What to do: give it these, or plan and save a program for yours'
            )
        if elsewhere:
            return PlacementError(
                f'{self.plan.name!r} was compiled for arguments that are placed otherwise:\n'
                f'{shown_leaves(elsewhere)}\nWhat to do: helper.shard(tree, rules) places them'
            )
        return None

    def _structure_error(self, given: Sequence[str], tree: Any) -> ArgumentError:
        wanted = dict.fromkeys(row.path for row in self.plan.inputs.rows)
        own = {*given}
        less = [f'{path}: not given' for path in wanted if path not in own]
        more = [f'{path}: given, and not an argument of the program' for path in given if path not in wanted]
        listed = shown_leaves(less + more) or f'  it takes {self.compiled.in_tree}, given {tree}'
        return ArgumentError(
            f'{self.plan.name!r} was compiled for arguments of another structure:\n{listed}\n'
            'What to do: give the arguments that it was planned with; static ones are part of the program, '
            'and are left out'
        )

    def _names(self) -> list[str]:
        """The names of the positional arguments, as the rows of the plan have them."""
        positional, _ = jax.tree_util.treedef_children(self.compiled.in_tree)
        arguments: Sequence[Any] = jax.tree_util.treedef_children(positional)
        names, first = [], 0
        for index, argument in enumerate(arguments):
            row = self.plan.inputs.rows[first] if argument.num_leaves else None
            names.append(row.path.partition('/')[0] if row else f'args[{index}]')
            first += argument.num_leaves
        return names


def _path(path: tuple[Any, ...], names: Sequence[str]) -> str:
    """The path of a given argument, with the names of the positional ones."""
    of_kwargs, argument, *below = path
    if of_kwargs.idx:
        name = str(argument.key)
    else:
        name = names[argument.idx] if argument.idx < len(names) else f'args[{argument.idx}]'
    return join(name, optional_path(below)) or name


def _where(sharding: Sharding) -> str:
    spec = getattr(sharding, 'spec', None)
    return str(sharding) if spec is None else f'{spec} on {len(sharding.device_set)} devices'


def load_executable(path: str | os.PathLike[str], helper: MeshOwner) -> Executable:
    """Loads a step that `Plan.save_executable` has written, for the devices of a helper.

    The file has to be trusted as a program is: it holds pickled Python and machine code, and loading it runs
    what it says. Classes of the trees of arguments and outputs are imported by their names.

    Args:
        path: the file.
        helper: a helper over the same mesh: as many devices of the same kind, in the same order, with the
            same axes.

    Raises:
        PlanError: the program does not fit what is here (JAX, the devices, the mesh), or JAX cannot load it;
            the message names each difference.
        DataError: the file is not a program, or is damaged.
        FileNotFoundError: there is no such file.
        MeshError: the devices of the helper are not here.
        ArgumentError: *helper* is none.

    Example:
        >>> import os, tempfile
        >>> import jax, jax.numpy as jnp
        >>> from scalax.plan import load_executable
        >>> from scalax.sharding import MeshShardingHelper, PartitionSpec
        >>> helper = MeshShardingHelper([4, 2], ['fsdp', 'tp'])
        >>> double = helper.sjit(lambda x: 2 * x, in_shardings=PartitionSpec('fsdp'))
        >>> path = os.path.join(tempfile.mkdtemp(), 'double.bin')
        >>> helper.plan(double, jax.ShapeDtypeStruct((8,), 'float32')).save_executable(path)
        >>> load_executable(path, helper)(jnp.arange(8.0)).tolist()
        [0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0]
    """
    mesh = getattr(helper, 'mesh', None)
    if mesh is None:
        raise ArgumentError(
            f'load_executable takes the path and a MeshShardingHelper, got {type(helper).__name__}; '
            'MeshShardingHelper.from_mesh makes one of a mesh'
        )
    require_devices(mesh, 'load_executable')
    name = repr(os.fspath(path))
    head, data = read(path, name)
    plan = Plan.load(head.plan)
    if different := [*_differences(head, plan, mesh)]:
        raise PlanError(
            f'{name}, the program of {plan.name!r}, was compiled for something else:\n{shown(different)}\n'
            'What to do: plan and save it again for what is here, or load it where all of this is the same'
        )
    if hashlib.sha256(data).hexdigest() != head.sha256:
        raise DataError(f'{name} is damaged: it does not hold what was written')
    devices = [*mesh.devices.flat]
    trees = _Unpickler(io.BytesIO(data[: head.tree_bytes]))
    try:
        in_tree, out_tree = trees.load()
        compiled = serialize_executable.deserialize_and_load(
            data[head.tree_bytes :], in_tree, out_tree, devices[0].platform, devices
        )
    except (AttributeError, ImportError) as error:
        raise PlanError(
            f'{name} needs a class that is not here: {error}\n'
            'What to do: make the module that defines it importable, as where the program was saved'
        ) from error
    except Exception as error:  # pickle and plugins raise errors of many kinds
        raise PlanError(f'JAX cannot load the program in {name}: {error}') from error
    return Executable(plan, compiled)


class _Unpickler(pickle.Unpickler):
    """Finds the classes of a script in the running one, whichever of both was imported."""

    def find_class(self, module: str, name: str) -> Any:
        main = sys.modules['__main__']
        if module == Path(getattr(main, '__file__', None) or '').stem and hasattr(main, name):
            module = '__main__'
        return super().find_class(module, name)


def _differences(head: Head, plan: Plan, mesh: Mesh) -> Iterable[str]:
    """How what is here differs from what a program was compiled for."""
    devices = [*mesh.devices.flat]
    here = versions_for(plan.platform)
    for package, version in head.versions.items():
        if package != 'scalax' and here.get(package) != version:
            yield f'{package}: {version}, and here {here.get(package, "it is not installed")}'
    size = math.prod(plan.mesh.values())
    pairs = {
        'platform': (plan.platform, devices[0].platform),
        'kind of device': (plan.device_kind, devices[0].device_kind),
        'devices': (size, mesh.size),
        'mesh': (axis_sizes_text(plan.mesh), axis_sizes_text(mesh.shape)),
        'types of mesh axes': (', '.join(head.axis_types), ', '.join(kind.name for kind in mesh.axis_types)),
    }
    different = {what: pair for what, pair in pairs.items() if pair[0] != pair[1]}
    yield from (f'{what}: {there}, and here {own}' for what, (there, own) in different.items())
    if different:
        return  # what follows says nothing more then
    ids = tuple(device.id for device in devices)
    if head.device_ids != ids:
        yield f'order of devices: {brief(head.device_ids)}, and here {brief(ids)}'
    places = zip(ids, plan.places, places_of(devices), strict=False)
    moved = [f'{number}: {there}, and here {own}' for number, there, own in places if there != own]
    yield from (f'place of device {each}' for each in moved[:1])

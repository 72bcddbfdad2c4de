"""The two sides of a comparison: a call of the step on its mesh, and its reference on one device."""

from __future__ import annotations

import collections
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from scalax._compile.call.signature import name_of
from scalax._compile.sjit.function import SjitFunction, argument_shardings, call_of, helper_of, with_options
from scalax._core.context.active_helper import MeshOwner, tracing_for_single_device
from scalax._core.pytree.partition_specs import axis_sizes_text
from scalax._core.pytree.paths import NamedTree, dtype_on_devices, is_prng_key, tree_type
from scalax._jax import equations
from scalax._jaxpr.source_lines import line_of
from scalax._planning.compiler.lowered_step import pure_call
from scalax._verification.rounding import EquationPath, PerturbedEvaluator, RoundingAnalysis
from scalax.errors import ArgumentError, shown

_SHARDING_OPTIONS = 'in_shardings', 'out_shardings', 'args_sharding_constraint', 'annotation_shardings'


def helper_on_mesh(helper: Any, sizes: Mapping[str, int], devices: Any = None, **options: Any) -> Any:
    """Returns a helper with the options of another one, for a mesh of other sizes.

    Args:
        helper: the other helper.
        sizes: mesh axis -> size.
        devices: an array of the devices. Without it, the mesh is abstract, and the helper can only trace.
        options: options in place of those of *helper*.
    """
    shape, names, types = tuple(sizes.values()), tuple(sizes), helper.mesh.axis_types
    mesh = (
        AbstractMesh(shape, names, types) if devices is None else Mesh(devices.reshape(shape), names, types)
    )
    names = 'on_indivisible', 'partition_batch', 'partitioning'
    return type(helper).from_mesh(mesh, **{**{name: getattr(helper, name) for name in names}, **options})


def single_device_helper(helper: Any) -> Any:
    """Returns a helper for a mesh of one device, with all axes of the mesh of *helper*."""
    sizes = dict.fromkeys(helper.mesh.axis_names, 1)
    return helper_on_mesh(helper, sizes, helper.mesh.devices.flat[:1], partition_batch=False)


class StepCall:
    """A step with the arguments of its user.

    Args:
        helper: the helper of the mesh.
        function: a function that `sjit` or ``jax.jit`` made, or an uncompiled one.
        args: the positional arguments: trees of arrays or ShapeDtypeStructs.
        kwargs: the keyword arguments.

    Attributes:
        helper: the helper of the mesh.
        name: the name of the user's function.
        function: the function.
        leaves: the leaves of the arguments that are not static.
        paths: the paths of these leaves.
    """

    def __init__(
        self, helper: MeshOwner, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        self.helper, self.name = helper, name_of(function)
        function, args, kwargs = pure_call(function, args, kwargs)
        self.function: Any = function
        self._donated: set[int] = set()
        owner = helper_of(function)
        if owner is not None and owner.mesh != helper.mesh:
            raise ArgumentError(
                f'{self.name} is compiled for the mesh ({axis_sizes_text(owner.mesh.shape)}) of another '
                f'helper, not for ({axis_sizes_text(helper.mesh.shape)}): call verify on that helper'
            )
        if isinstance(self.function, SjitFunction):
            call = call_of(self.function, args, kwargs)
            # JAX arrays of Python scalars carry the weak type, which the scalars have implicitly.
            self.leaves = [leaf if is_array(leaf) else jax.numpy.asarray(leaf) for leaf in call.leaves]
            self.paths = [call.path(i) for i in range(len(call.leaves))]
            slots = call.by_slot(range(len(call.leaves)))
            self._donated = {i for slot in call.layout.donated for i in slots.get(slot, ())}
            self._arguments: Callable[[Sequence[Any]], Any] = lambda leaves: call.signature.restore(
                call.with_leaves(leaves)
            )
        else:
            tree = NamedTree.of(_named(self.function, args, kwargs))
            # jax.jit does not reveal its static arguments: leaves that are not arrays count as static.
            arrays = [i for i, leaf in enumerate(tree.leaves) if is_array(leaf)]
            self.leaves, self.paths = [tree.leaves[i] for i in arrays], [tree.paths[i] for i in arrays]
            self._arguments = functools.partial(_with_leaves, (tuple(args), dict(kwargs)), arrays)

    def arguments(self, leaves: Sequence[Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        """Returns the positional and keyword arguments of a call with other leaves."""
        return self._arguments(leaves)

    def abstract_arguments(self) -> tuple[Sequence[Any], dict[str, Any]]:
        """Returns the arguments with the ShapeDtypeStructs of the leaves."""
        return self.arguments([*map(abstract_leaf, self.leaves)])

    def call(self, leaves: Sequence[Any], function: Any = None) -> Any:
        """Returns the results of the step on its mesh, or of another function with the same parameters."""
        args, kwargs = self.arguments(leaves)
        return (self.function if function is None else function)(*args, **kwargs)

    def shardings(self, function: Any = None) -> list[NamedSharding | None]:
        """Returns the shardings of the leaves; None for a leaf that the compiler places."""
        leaf_shardings = [getattr(leaf, 'sharding', None) for leaf in self.leaves]
        shardings: list[Any] = [
            sharding if isinstance(sharding, NamedSharding) else None for sharding in leaf_shardings
        ]
        function = self.function if function is None else function
        if isinstance(function, SjitFunction):
            by_rules = argument_shardings(function, *self.abstract_arguments())
            shardings = [a if b is None else b for a, b in zip(shardings, by_rules, strict=True)]
        return shardings

    def results_fed_back(self, out: Any) -> dict[int, int]:
        """Returns which results are arguments of the next step: leaf index of the argument -> of the result.

        A result, or an element of a tuple of results, with the structure, the shapes and the dtypes of an
        argument is the value of this argument in the next step. A single array, which may match by chance,
        has to match a donated argument.
        """
        shapes = [*map(abstract_leaf, self.leaves)]
        index_of, (args, kwargs) = {id(shape): i for i, shape in enumerate(shapes)}, self.arguments(shapes)
        indices_by_type: dict[Any, list[int]] = {}
        for tree in (*args, *kwargs.values()):
            indices = [index_of[id(leaf)] for leaf in jax.tree.leaves(tree) if id(leaf) in index_of]
            if len(indices) > 1 or not self._donated.isdisjoint(indices):
                indices_by_type.setdefault(tree_type(tree), indices)
        fed_back: dict[int, int] = {}

        def match(tree: Any, first: int) -> bool:
            indices = indices_by_type.pop(tree_type(tree), None)
            fed_back.update((argument, first + i) for i, argument in enumerate(indices or ()))
            return indices is not None

        if not match(out, 0):
            first = 0
            for element in jax.tree.leaves(out, is_leaf=lambda tree: tree is not out):
                match(element, first)
                first += len(jax.tree.leaves(element))
        return fed_back

    def variant(self, change: Callable[..., Any] | None = None, **options: Any) -> Any:
        """Returns the step compiled with a change.

        The options of ``jax.jit`` are not known: a changed function gets its arguments where the compiled
        step has them.

        Args:
            change: from the user's function to another one with the same parameters.
            options: options of `sjit` in place of the user's.

        Raises:
            ArgumentError: there are options, but the step was made by ``jax.jit``.
        """
        if isinstance(self.function, SjitFunction):
            return with_options(self.function, self.helper, change, **options)
        if change is None:
            raise ArgumentError(f'{self.name} was made by jax.jit, whose options are unknown')
        args, kwargs = self.abstract_arguments()
        if not hasattr(self.function, 'lower'):
            raise ArgumentError(f'{self.name} is not compiled')
        compiled = self.function.lower(*args, **kwargs).compile()
        changed = change(self.function.__wrapped__)

        def flat(*leaves: Any) -> Any:
            args, kwargs = self.arguments(leaves)
            return changed(*args, **kwargs)

        jitted = jax.jit(flat, in_shardings=tuple(jax.tree.leaves(compiled.input_shardings)))
        return lambda *args, **kwargs: jitted(*filter(is_array, jax.tree.leaves((args, kwargs))))


def is_array(leaf: Any) -> bool:
    """Whether a leaf of the arguments is an array; other leaves are static."""
    return hasattr(leaf, 'dtype')


def _named(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Returns argument name -> argument, in the order of the leaves of ``(args, kwargs)``."""
    try:
        names = [*inspect.signature(function).parameters]
    except (TypeError, ValueError):  # some built-ins have no signature
        names = []
    names += [f'args[{i}]' for i in range(len(names), len(args))]
    by_position = zip(names, args, strict=False)
    return collections.OrderedDict([*by_position, *sorted(kwargs.items())])


def _with_leaves(arguments: Any, indices: Sequence[int], leaves: Sequence[Any]) -> Any:
    all_leaves, structure = jax.tree.flatten(arguments)
    for i, leaf in zip(indices, leaves, strict=True):
        all_leaves[i] = leaf
    return jax.tree.unflatten(structure, all_leaves)


class SingleDeviceReference:
    """A step on one device: a program that evaluates its jaxpr equation by equation.

    Args:
        step: the step.
        single_device_step: the same step, made for `single_device_helper`. By default the function of *step*
            is traced for one device.

    Attributes:
        jaxpr: the jaxpr of the step.
        out: the results, as ShapeDtypeStructs.
        rounded_results: for each leaf of the results, whether rounding may change it.

    Raises:
        ArgumentError: the step cannot be traced for one device, or has effects that must not be repeated.
    """

    def __init__(self, step: StepCall, single_device_step: StepCall | None = None) -> None:
        self._mesh = single_device_helper(step.helper).mesh
        # On Explicit axes, the types of intermediate values follow from these specs. Arguments on another
        # mesh are moved.
        names = self._mesh.axis_names
        specs = [
            sharding.spec if sharding and sharding.mesh.axis_names == names else None
            for sharding in step.shardings()
        ]
        self._shardings = [NamedSharding(self._mesh, spec or PartitionSpec()) for spec in specs]
        self.jaxpr, self.out = _trace(step, single_device_step, self._shardings)
        _require_comparable(step, self.jaxpr)
        self._rounding = RoundingAnalysis(self.jaxpr)
        self.rounded_results = self._rounding.rounded_results
        self._jitted_evaluate = jax.jit(self._evaluate, static_argnums=0)

    def _evaluate(self, watched: tuple[EquationPath, ...], leaves: Any, scale: Any, seed: Any) -> Any:
        evaluator = PerturbedEvaluator(self._rounding, scale, seed, watched)
        with jax.sharding.use_abstract_mesh(self._mesh.abstract_mesh):
            results = evaluator.run(self.jaxpr, leaves)
        return [evaluator.recorded[path] for path in watched] if watched else results

    def run(self, leaves: Sequence[Any], scale: float = 0.0, seed: int = 0) -> list[np.ndarray]:
        """Returns the results, on the host.

        Args:
            leaves: the leaves of the arguments.
            scale: the size of the random rounding errors, in units in the last place.
            seed: selects the rounding errors.
        """
        return [*map(to_host, self._run((), leaves, scale, seed))]

    def intermediates(
        self, watched: tuple[EquationPath, ...], leaves: Sequence[Any], scale: float = 0.0, seed: int = 0
    ) -> list[list[np.ndarray]]:
        """Returns the results of the equations at some paths, evaluated as by `run`."""
        return [[*map(to_host, results)] for results in self._run(watched, leaves, scale, seed)]

    def is_rounded(self, equation: Any) -> bool:
        """Whether rounding may change the results of an equation."""
        return equation.outvars[0] in self._rounding

    def _run(self, watched: tuple[EquationPath, ...], leaves: Sequence[Any], scale: float, seed: int) -> Any:
        placed = jax.device_put([*leaves], self._shardings)
        return self._jitted_evaluate(watched, placed, np.float32(scale), np.uint32(seed))


def _trace(
    step: StepCall, single_device_step: StepCall | None, shardings: Sequence[NamedSharding]
) -> tuple[Any, Any]:
    """Returns the jaxpr of a step on one device, and its results."""
    helper = single_device_helper(step.helper)
    unset = dict.fromkeys(
        (*_SHARDING_OPTIONS, 'donate_argnums', 'donate_argnames', 'batch_argnames', 'pipeline')
    )

    def flat(*leaves: Any) -> Any:
        call = single_device_step or step
        function = call.function
        if isinstance(function, SjitFunction):
            function = with_options(function, helper, **unset, batch_argnums=())
        elif single_device_step is None:
            function = getattr(function, '__wrapped__', function)
        return call.call(leaves, function)

    try:
        with (
            jax.sharding.use_abstract_mesh(helper.mesh.abstract_mesh),
            # The code may use the helper, as in helper.shard_map, or another one over the same devices.
            tracing_for_single_device(step.helper.mesh),
        ):
            abstract_leaves = [
                abstract_leaf(leaf).update(sharding=sharding)
                for leaf, sharding in zip(step.leaves, shardings, strict=True)
            ]
            return jax.make_jaxpr(flat, return_shape=True)(*abstract_leaves)
    except Exception as error:
        if single_device_step is None:
            error.add_note(
                f'This is {step.name} on one device, where all mesh axes have size 1.\nWhat to do: if its '
                'code holds a mesh of several devices, as jax.shard_map(..., mesh=mesh) does, call '
                'helper.verify(make_step), where make_step(helper) returns the step for any helper, and the '
                'tuple of its arguments.'
            )
        raise


def _require_comparable(step: StepCall, jaxpr: Any) -> None:
    """Raises ArgumentError if a step has operations that cannot be compared."""
    problems = []
    for equation in equations.all_equations(jaxpr):
        name = equation.primitive.name
        if name == 'shard_map' and equations.count_shard_map_devices(equation) > 1:
            problems.append(
                f'shard_map at {line_of(equation)} uses a mesh of several devices: pass a function that '
                'makes the step for any helper: helper.verify(make_step)'
            )
        if name == 'io_callback':
            problems.append(
                f'io_callback at {line_of(equation)} would be called for each step that is compared: '
                'verify the step without it'
            )
    if problems:
        raise ArgumentError(f'{step.name} cannot be verified as it is:\n{shown(dict.fromkeys(problems))}')


def abstract_leaf(leaf: Any) -> jax.ShapeDtypeStruct:
    """Returns the ShapeDtypeStruct of a leaf, without its sharding."""
    weak = getattr(leaf, 'weak_type', False)
    return jax.ShapeDtypeStruct(leaf.shape, dtype_on_devices(leaf), weak_type=weak)


def to_host(value: Any) -> np.ndarray:
    """Returns an array on the host; of PRNG keys, their data."""
    return np.asarray(jax.random.key_data(value) if is_prng_key(value) else value)


def wrap_keys_like(value: np.ndarray, like: Any) -> Any:
    """Returns an array on the host as it is, or as PRNG keys if *like* is an array of keys."""
    if not is_prng_key(like):
        return value
    return jax.random.wrap_key_data(jax.numpy.asarray(value), impl=jax.random.key_impl(like))


def uncommitted(value: Any) -> Any:
    """Returns an array that is not committed to a device; a weakly typed scalar as a Python scalar."""
    if getattr(value, 'weak_type', False) and not value.shape:
        return value.item()
    return wrap_keys_like(to_host(value), value)


def local_shards(value: Any) -> Iterator[tuple[Any, np.ndarray]]:
    """Yields the index and the data of each shard of an array on the devices of this process."""
    data = jax.random.key_data(value) if is_prng_key(value) else value
    # The result of a host computation is on the first device, although its sharding lists all of them.
    is_named = isinstance(value.sharding, NamedSharding)
    for shard in data.addressable_shards if is_named else data.addressable_shards[:1]:
        yield shard.index, np.asarray(shard.data)

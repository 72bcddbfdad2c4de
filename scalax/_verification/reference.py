"""The two sides of a comparison: a step on one device, and the same step on a mesh."""

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
from scalax._planning.compiler.lowered_step import without_changes
from scalax._verification.rounding import OnOneDevice, Place, Rounded
from scalax.errors import ArgumentError, shown

# What a function says about shardings, which mean nothing on one device.
_UNSAID = dict.fromkeys(('in_shardings', 'out_shardings', 'args_sharding_constraint', 'annotation_shardings'))


def helper_over(helper: Any, sizes: Mapping[str, int], devices: Any = None, **options: Any) -> Any:
    """A helper with the options of another one, over a mesh of its axes; without devices it only traces.

    Args:
        helper: the other one.
        sizes: mesh axis -> size.
        devices: an array of so many devices.
        options: other options.
    """
    shape, names, types = tuple(sizes.values()), tuple(sizes), helper.mesh.axis_types
    mesh = (
        AbstractMesh(shape, names, types) if devices is None else Mesh(devices.reshape(shape), names, types)
    )
    names = 'on_indivisible', 'partition_batch', 'partitioning'
    own = {name: getattr(helper, name) for name in names}
    return type(helper).from_mesh(mesh, **{**own, **options})


def on_one_device(helper: Any) -> Any:
    """The helper of a mesh with one device: all of its axes have one element."""
    sizes = dict.fromkeys(helper.mesh.axis_names, 1)
    return helper_over(helper, sizes, helper.mesh.devices.flat[:1], partition_batch=False)


class Step:
    """A step as its user calls it.

    Args:
        helper: the helper of the mesh.
        function: a function that `sjit` or ``jax.jit`` made, or one that is called as it is.
        args: its arguments, arrays or ShapeDtypeStructs.
        kwargs: its keyword arguments.

    Attributes:
        name: the name of the user's function.
        function: the function.
        leaves: the leaves of the arguments that are not static.
        paths: their paths.
    """

    def __init__(
        self, helper: MeshOwner, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        self.helper, self.name = helper, name_of(function)
        function, args, kwargs = without_changes(function, args, kwargs)
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
            # Numbers of Python as arrays of JAX, which know that their type is a weak one.
            self.leaves = [leaf if is_array(leaf) else jax.numpy.asarray(leaf) for leaf in call.leaves]
            self.paths = [call.path(i) for i in range(len(call.leaves))]
            slots = call.by_slot(range(len(call.leaves)))
            self._donated = {i for slot in call.layout.donated for i in slots.get(slot, ())}
            self._arguments: Callable[[Sequence[Any]], Any] = lambda leaves: call.signature.restore(
                call.with_leaves(leaves)
            )
        else:
            tree = NamedTree.of(_named(self.function, args, kwargs))
            # Of a function of jax.jit nobody knows which arguments are static: what is no array.
            arrays = [i for i, leaf in enumerate(tree.leaves) if is_array(leaf)]
            self.leaves, self.paths = [tree.leaves[i] for i in arrays], [tree.paths[i] for i in arrays]
            self._arguments = functools.partial(_with_leaves, (tuple(args), dict(kwargs)), arrays)

    def arguments(self, leaves: Sequence[Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        """The arguments and the keywords of a call with other leaves."""
        return self._arguments(leaves)

    def abstract(self) -> tuple[Sequence[Any], dict[str, Any]]:
        """The same with the shapes of the leaves."""
        return self.arguments([*map(shape_of, self.leaves)])

    def call(self, leaves: Sequence[Any], function: Any = None) -> Any:
        """What the step returns on its mesh; *function* is another one of the same parameters."""
        args, kwargs = self.arguments(leaves)
        return (self.function if function is None else function)(*args, **kwargs)

    def shardings(self, function: Any = None) -> list[NamedSharding | None]:
        """Where the leaves are on the mesh; None for those that the compiler places."""
        own = [getattr(leaf, 'sharding', None) for leaf in self.leaves]
        given: list[Any] = [each if isinstance(each, NamedSharding) else None for each in own]
        function = self.function if function is None else function
        if isinstance(function, SjitFunction):
            known = argument_shardings(function, *self.abstract())
            given = [a if b is None else b for a, b in zip(given, known, strict=True)]
        return given

    def next_arguments(self, out: Any) -> dict[int, int]:
        """Which results are arguments of the next step: the numbers of both leaves.

        A result, or one of several, that is a tree of the structure, the shapes and the dtypes of an argument
        takes its place; a single array, which may look alike by chance, only that of a donated argument.
        """
        shapes = [*map(shape_of, self.leaves)]
        known, (args, kwargs) = {id(shape): i for i, shape in enumerate(shapes)}, self.arguments(shapes)
        given: dict[Any, list[int]] = {}
        for tree in (*args, *kwargs.values()):
            numbers = [known[id(leaf)] for leaf in jax.tree.leaves(tree) if id(leaf) in known]
            if len(numbers) > 1 or not self._donated.isdisjoint(numbers):
                given.setdefault(tree_type(tree), numbers)
        found: dict[int, int] = {}

        def match(tree: Any, first: int) -> bool:
            numbers = given.pop(tree_type(tree), None)
            found.update((to, first + i) for i, to in enumerate(numbers or ()))
            return numbers is not None

        if not match(out, 0):
            first = 0
            for part in jax.tree.leaves(out, is_leaf=lambda each: each is not out):
                match(part, first)
                first += len(jax.tree.leaves(part))
        return found

    def variant(self, change: Callable[..., Any] | None = None, **options: Any) -> Any:
        """The compiled function made anew, of another function or with some other options of `sjit`.

        Of a function of ``jax.jit`` nobody knows the options: another one in its place has its arguments
        where the compiled function has them.

        Raises:
            ArgumentError: there are options for a function of ``jax.jit``.
        """
        if isinstance(self.function, SjitFunction):
            return with_options(self.function, self.helper, change, **options)
        if change is None:
            raise ArgumentError(f'{self.name} was made by jax.jit, whose options are unknown')
        args, kwargs = self.abstract()
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
    """Whether a leaf of arguments is an array; others are static."""
    return hasattr(leaf, 'dtype')


def _named(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The arguments under their names, in the order of ``(args, kwargs)``."""
    try:
        names = [*inspect.signature(function).parameters]
    except (TypeError, ValueError):  # some built-ins have no signature
        names = []
    names += [f'args[{i}]' for i in range(len(names), len(args))]
    by_position = zip(names, args, strict=False)
    return collections.OrderedDict([*by_position, *sorted(kwargs.items())])


def _with_leaves(call: Any, numbers: Sequence[int], leaves: Sequence[Any]) -> Any:
    given, structure = jax.tree.flatten(call)
    for i, leaf in zip(numbers, leaves, strict=True):
        given[i] = leaf
    return jax.tree.unflatten(structure, given)


class OneDevice:
    """A step on one device, evaluated equation by equation in one program.

    Args:
        step: the step.
        alone: the same step for `on_one_device`; by default the user's function is traced for that.

    Attributes:
        jaxpr: what it computes.
        out: its results, as ShapeDtypeStructs.
        rounded: for each leaf of the results, whether rounding may change it.

    Raises:
        ArgumentError: it cannot be traced for one device, or has effects that may not be repeated.
    """

    def __init__(self, step: Step, alone: Step | None = None) -> None:
        self._mesh = on_one_device(step.helper).mesh
        # Where axes are Explicit, types of values inside follow from these. Those on other meshes are moved.
        names = self._mesh.axis_names
        own = [each.spec if each and each.mesh.axis_names == names else None for each in step.shardings()]
        self._shardings = [NamedSharding(self._mesh, spec or PartitionSpec()) for spec in own]
        self.jaxpr, self.out = _traced(step, alone, self._shardings)
        _refuse(step, self.jaxpr)
        self._facts = Rounded(self.jaxpr)
        self.rounded = self._facts.of_results
        self._evaluate = jax.jit(self._evaluated, static_argnums=0)

    def _evaluated(self, watched: tuple[Place, ...], leaves: Any, scale: Any, seed: Any) -> Any:
        evaluation = OnOneDevice(self._facts, scale, seed, watched)
        with jax.sharding.use_abstract_mesh(self._mesh.abstract_mesh):
            results = evaluation.run(self.jaxpr, leaves)
        return [evaluation.kept[place] for place in watched] if watched else results

    def run(self, leaves: Sequence[Any], scale: float = 0.0, seed: int = 0) -> list[np.ndarray]:
        """The results, on the host, with errors of so many units of rounding."""
        return [*map(on_host, self._run((), leaves, scale, seed))]

    def kept(
        self, watched: tuple[Place, ...], leaves: Sequence[Any], scale: float = 0.0, seed: int = 0
    ) -> list[list[np.ndarray]]:
        """The same for the results of the equations at some places."""
        return [[*map(on_host, results)] for results in self._run(watched, leaves, scale, seed)]

    def is_rounded(self, equation: Any) -> bool:
        """Whether rounding may change the results of an equation."""
        return equation.outvars[0] in self._facts

    def _run(self, watched: tuple[Place, ...], leaves: Sequence[Any], scale: float, seed: int) -> Any:
        placed = jax.device_put([*leaves], self._shardings)
        return self._evaluate(watched, placed, np.float32(scale), np.uint32(seed))


def _traced(step: Step, alone: Step | None, shardings: Sequence[NamedSharding]) -> tuple[Any, Any]:
    """The jaxpr of a step on one device, and its results."""
    helper = on_one_device(step.helper)
    nothing = dict.fromkeys(('donate_argnums', 'donate_argnames', 'batch_argnames'))

    def flat(*leaves: Any) -> Any:
        own = step if alone is None else alone
        function = own.function
        if isinstance(function, SjitFunction):
            function = with_options(function, helper, **_UNSAID, **nothing, batch_argnums=(), pipeline=None)
        elif alone is None:
            function = getattr(function, '__wrapped__', function)
        return own.call(leaves, function)

    try:
        with (
            jax.sharding.use_abstract_mesh(helper.mesh.abstract_mesh),
            # The code may use the helper, as in helper.shard_map, or another one over the same devices.
            tracing_for_single_device(step.helper.mesh),
        ):
            given = [
                shape_of(leaf).update(sharding=sharding)
                for leaf, sharding in zip(step.leaves, shardings, strict=True)
            ]
            return jax.make_jaxpr(flat, return_shape=True)(*given)
    except Exception as error:
        if alone is None:
            error.add_note(
                f'This is {step.name} on one device, where all mesh axes have size 1. If its code uses a '
                'mesh of several devices, pass a function that makes the step for any helper, as for scalax '
                'plan: helper.verify(make_step)'
            )
        raise


def _refuse(step: Step, jaxpr: Any) -> None:
    """Raises about what cannot be compared."""
    wrong = []
    for equation in equations.all_equations(jaxpr):
        name = equation.primitive.name
        if name == 'shard_map' and equations.count_shard_map_devices(equation) > 1:
            wrong.append(
                f'shard_map at {line_of(equation)} uses a mesh of several devices: pass a function that '
                'makes the step for any helper: helper.verify(make_step)'
            )
        if name == 'io_callback':
            wrong.append(
                f'io_callback at {line_of(equation)} would be called for each step that is compared: '
                'verify the step without it'
            )
    if wrong:
        raise ArgumentError(f'{step.name} cannot be verified as it is:\n{shown(dict.fromkeys(wrong))}')


def shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
    """The shape and dtype of a leaf, without its sharding."""
    weak = getattr(leaf, 'weak_type', False)
    return jax.ShapeDtypeStruct(leaf.shape, dtype_on_devices(leaf), weak_type=weak)


def on_host(value: Any) -> np.ndarray:
    """An array on the host; of keys, their data."""
    return np.asarray(jax.random.key_data(value) if is_prng_key(value) else value)


def with_keys(value: np.ndarray, like: Any) -> Any:
    """An array on the host, or keys where it is the data of such."""
    if not is_prng_key(like):
        return value
    return jax.random.wrap_key_data(jax.numpy.asarray(value), impl=jax.random.key_impl(like))


def unplaced(value: Any) -> Any:
    """An array that is committed to no device; of a weak type a number of Python, as only these have one."""
    if getattr(value, 'weak_type', False) and not value.shape:
        return value.item()
    return with_keys(on_host(value), value)


def blocks_of(value: Any) -> Iterator[tuple[Any, np.ndarray]]:
    """The blocks of an array on all devices of this process, each with its place in the array."""
    data = jax.random.key_data(value) if is_prng_key(value) else value
    # What a host computes is on the first device, and JAX gives it a sharding over all that says so.
    named = isinstance(value.sharding, NamedSharding)
    for shard in data.addressable_shards if named else data.addressable_shards[:1]:
        yield shard.index, np.asarray(shard.data)

"""The front of scalax: a mesh, and everything that can be done with rules on it.

Each method is one call into a layer below: what it does is written there, what it means is written here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from scalax import _constrain, _context, _data, _mesh, _sjit, _transfer
from scalax._paths import canonical_dtype
from scalax._prefix import RuleLike
from scalax._resolve import ResolutionCache, Use, resolve
from scalax._spec import MeshAxes, OnIndivisible, checked_policy
from scalax.explain import ShardingReport, make_report


class MeshShardingHelper:
    """A mesh of devices, and what can be done with sharding rules on it.

    Args:
        axis_dims: the size of each mesh axis; one may be -1, which stands for what is left.
        axis_names: the name of each mesh axis.
        mesh_axis_splitting: allow one physical axis of a TPU slice to serve several mesh axes, as for
            8x8 on a 4x4x4 slice. It may cost bandwidth.
        dcn_axis_dims: for several slices: how many of them lie along each axis. Each entry of
            `axis_dims` is then a total, and a multiple of its own entry here.
        devices: the devices to use; all by default.
        axis_types: one ``jax.sharding.AxisType`` for all axes or one for each; Auto by default.
        on_indivisible: the policy for bare PartitionSpecs where a dimension does not divide:
            ``'error'``, ``'replicate'`` or ``'warn'``. Rules carry their own.

    Raises:
        MeshError: dimensions, names, types and devices do not fit together; says what would.

    Example:
        >>> import numpy as np
        >>> from jax.sharding import PartitionSpec
        >>> helper = MeshShardingHelper([-1, 2], ['fsdp', 'tp'])
        >>> helper
        MeshShardingHelper(fsdp=4, tp=2)
        >>> helper.shard(np.zeros((8, 8)), PartitionSpec('fsdp', 'tp')).sharding.spec
        P('fsdp', 'tp')
    """

    def __init__(
        self,
        axis_dims: Sequence[int],
        axis_names: Sequence[str],
        mesh_axis_splitting: bool = False,
        *,
        dcn_axis_dims: Sequence[int] | None = None,
        devices: Sequence[Any] | None = None,
        axis_types: AxisType | Sequence[AxisType] | None = None,
        on_indivisible: OnIndivisible = 'error',
    ) -> None:
        mesh = _mesh.build_mesh(
            axis_dims,
            axis_names,
            split_physical_axes=mesh_axis_splitting,
            dcn_axis_dims=dcn_axis_dims,
            devices=devices,
            axis_types=axis_types,
        )
        self._set_up(mesh, on_indivisible)

    def _set_up(self, mesh: Mesh | AbstractMesh, on_indivisible: OnIndivisible) -> None:
        self._mesh = mesh
        self._on_indivisible = checked_policy(on_indivisible)
        self._contexts = _context.ContextCache(self)
        self._resolutions = ResolutionCache()

    @classmethod
    def from_mesh(
        cls, mesh: Mesh | AbstractMesh, *, on_indivisible: OnIndivisible = 'error'
    ) -> MeshShardingHelper:
        """A helper over a mesh that exists; an AbstractMesh serves for all that needs no devices.

        Args:
            mesh: any ``jax.sharding.Mesh``, with its axis types as they are, or an ``AbstractMesh``.
            on_indivisible: as in the constructor.

        Raises:
            MeshError: *mesh* is neither.
        """
        helper = cls.__new__(cls)
        helper._set_up(_mesh.checked_mesh(mesh), on_indivisible)
        return helper

    @classmethod
    def from_topology(
        cls,
        topology: str,
        axis_dims: Sequence[int],
        axis_names: Sequence[str],
        mesh_axis_splitting: bool = False,
        *,
        num_slices: int = 1,
        dcn_axis_dims: Sequence[int] | None = None,
        axis_types: AxisType | Sequence[AxisType] | None = None,
        on_indivisible: OnIndivisible = 'error',
    ) -> MeshShardingHelper:
        """A helper over TPU hardware that is not here, for compiling and planning.

        Args:
            topology: the slice, such as ``'v5p:4x4x4'``.
            num_slices: the number of slices, joined by the data-center network.
            axis_dims: over all slices together; this and the others as in the constructor.
            axis_names: see above.
            mesh_axis_splitting: see above.
            dcn_axis_dims: see above; needed with several slices.
            axis_types: see above.
            on_indivisible: see above.

        Raises:
            MissingDependencyError: libtpu, the TPU compiler, is not installed.
            MeshError: the topology is unknown, or cannot hold the mesh.
        """
        return cls(
            axis_dims,
            axis_names,
            mesh_axis_splitting,
            dcn_axis_dims=dcn_axis_dims,
            devices=_mesh.topology_devices(topology, num_slices),
            axis_types=axis_types,
            on_indivisible=on_indivisible,
        )

    @property
    def mesh(self) -> Mesh:
        """The ``jax.sharding.Mesh`` (an ``AbstractMesh`` if the helper was made from one)."""
        return cast(Mesh, self._mesh)  # for the common case: users would have to narrow it at every use

    @property
    def axis_names(self) -> tuple[str, ...]:
        """The names of the mesh axes."""
        return tuple(self._mesh.axis_names)

    @property
    def axis_dims(self) -> tuple[int, ...]:
        """The sizes of the mesh axes, with -1 resolved."""
        return tuple(self._mesh.shape.values())

    @property
    def axis_types(self) -> tuple[AxisType, ...]:
        """The types of the mesh axes."""
        return tuple(self._mesh.axis_types)

    @property
    def on_indivisible(self) -> OnIndivisible:
        """The policy for bare PartitionSpecs where a dimension does not divide."""
        return self._on_indivisible

    def __repr__(self) -> str:
        auto = set(self.axis_types) <= {AxisType.Auto}
        types = '' if auto else '; ' + ', '.join(kind.name for kind in self.axis_types)
        return f'MeshShardingHelper({MeshAxes.of(self._mesh)}{types})'

    # What: rules and trees ---------------------------------------------------------------------------

    def match_sharding_rule(self, sharding_rules: RuleLike, pytree: Any) -> Any:
        """The sharding that rules give each leaf of a tree on this mesh.

        Args:
            sharding_rules: a rule, a PartitionSpec, a NamedSharding of this mesh, or a pytree prefix of
                these.
            pytree: leaves may be arrays, ``jax.ShapeDtypeStruct``, numpy arrays, Python scalars or
                typed PRNG keys.

        Returns:
            A pytree of NamedSharding with the structure of *pytree*.

        Raises:
            ShardingError: some leaves cannot be sharded as asked; all of them are named.
            StructureError: the rules are not a prefix of the tree.
        """
        shardings, treedef = self._shardings(sharding_rules, pytree)
        return jax.tree.unflatten(treedef, shardings)

    def _shardings(self, rules: RuleLike, pytree: Any) -> tuple[list[Any], Any]:
        return self._resolutions.shardings(rules, pytree, self._mesh, self._on_indivisible)

    def abstract(self, pytree: Any, rules: RuleLike) -> Any:
        """The tree as ``jax.ShapeDtypeStruct`` with shardings: a restore target, or input to a plan.

        Args:
            pytree: as for `match_sharding_rule`.
            rules: as for `match_sharding_rule`.
        """

        def struct(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
            kind = leaf if hasattr(leaf, 'dtype') else jax.typeof(leaf)
            return jax.ShapeDtypeStruct(kind.shape, canonical_dtype(kind.dtype), sharding=sharding)

        return jax.tree.map(struct, pytree, self.match_sharding_rule(rules, pytree))

    def explain(self, pytree: Any, rules: RuleLike) -> ShardingReport:
        """What each leaf gets, which rule says so, and what it costs; prints as a table.

        Args:
            pytree: as for `match_sharding_rule`.
            rules: as for `match_sharding_rule`; None (leave it to the compiler) is shown as such.
        """
        resolution = resolve(rules, pytree, self._mesh, use=Use.BOUNDARY, on_indivisible=self._on_indivisible)
        return make_report(rules, resolution, dict(self._mesh.shape))

    def shard(self, pytree: Any, rules: RuleLike) -> Any:
        """Places a tree of arrays on the mesh, in one transfer.

        Args:
            pytree: arrays of any kind.
            rules: as for `match_sharding_rule`.

        Returns:
            The tree as jax.Arrays, sharded as the rules say.

        Raises:
            ShardingError: as for `match_sharding_rule`; nothing is moved then.
        """
        _mesh.require_devices(self._mesh, 'shard')
        return _transfer.put(pytree, self._shardings(rules, pytree)[0])

    def gather(self, pytree: Any) -> Any:
        """Fetches a tree of arrays to the host as numpy arrays, whole, on every process.

        Leaves of other kinds are returned as they are.
        """
        return _transfer.to_host(pytree)

    def make_shard_and_gather_fns(self, pytree: Any, sharding_rule: RuleLike) -> tuple[Any, Any]:
        """Two trees of functions, for placing and for fetching each leaf.

        `shard` and `gather` do the same for a whole tree at once, and need no such trees.
        """
        _mesh.require_devices(self._mesh, 'make_shard_and_gather_fns')
        shardings = self.match_sharding_rule(sharding_rule, pytree)
        return _transfer.shard_functions(shardings), _transfer.gather_functions(shardings)

    @classmethod
    def apply_shard_and_gather_fns(cls, fns: Any, pytree: Any) -> Any:
        """Applies functions from `make_shard_and_gather_fns` to a tree of the same structure."""
        return _transfer.apply_functions(fns, pytree)

    # When: compiled functions ------------------------------------------------------------------------

    def sjit(
        self,
        fun: Callable[..., Any] | None = None,
        in_shardings: RuleLike = None,
        out_shardings: RuleLike = None,
        static_argnums: int | Iterable[int] | None = None,
        args_sharding_constraint: RuleLike = None,
        annotation_shardings: Mapping[str, RuleLike] | None = None,
        *,
        static_argnames: str | Iterable[str] | None = None,
        donate_argnums: int | Iterable[int] | None = None,
        donate_argnames: str | Iterable[str] | None = None,
        on_mismatch: Any = 'error',
        **jit_kwargs: Any,
    ) -> Any:
        """Compiles a function like ``jax.jit``, with shardings given by rules.

        ``helper.sjit(fun, ...)``, ``@helper.sjit`` and ``@helper.sjit(...)`` all work, on functions,
        methods (``self`` is argument 0, usually static) and callable objects.

        Args:
            fun: the function.
            in_shardings: the shardings of the arguments: a tuple or list by position (static arguments
                not counted), a dict by argument name, or one rule for every argument; leaf paths start
                inside each argument. None leaves arguments as they come.
            out_shardings: the shardings of the output: a rule or a pytree prefix of rules. An output, or
                top-level element of it, that nothing is said about and that has exactly the structure,
                shapes and dtypes of a donated argument takes that argument's shardings.
            static_argnums: positions of arguments that are part of the program; may be negative.
            args_sharding_constraint: like `in_shardings`, but reshards inside the function.
            annotation_shardings: annotation name -> rule, for `with_sharding_annotation`.
            static_argnames: names of arguments that are part of the program.
            donate_argnums: positions of arguments whose buffers may be reused.
            donate_argnames: names of arguments whose buffers may be reused.
            on_mismatch: an argument that is committed to another sharding is an ``'error'``, or is
                moved at every such call (``'reshard'``).
            **jit_kwargs: further options of ``jax.jit``, such as ``compiler_options``.

        Returns:
            An `SjitFunction`: called like *fun*, with ``lower``, ``trace``, ``eval_shape``,
            ``shardings_for``, ``get_jitted_function_by_args`` and ``clear_cache``.

        Raises:
            ArgumentError: options that *fun* does not fit; at a call, arguments that are not arrays,
                static ones that cannot be hashed, arrays that were donated before.
            StructureError: rules whose structure does not fit the arguments or the output.
            ShardingError: leaves that cannot be sharded as asked; all of them are named.
            PlacementError: arguments that are committed to another sharding.

        Example:
            >>> import jax.numpy as jnp
            >>> from jax.sharding import PartitionSpec
            >>> helper = MeshShardingHelper([-1], ['data'])
            >>> @helper.sjit(in_shardings={'x': PartitionSpec('data')}, static_argnames='power')
            ... def raised(x, power=2):
            ...     return x**power
            >>> raised(jnp.arange(8.0), power=3).sharding.spec
            P('data',)
        """
        options: dict[str, Any] = {
            'in_shardings': in_shardings,
            'out_shardings': out_shardings,
            'static_argnums': static_argnums,
            'args_sharding_constraint': args_sharding_constraint,
            'annotation_shardings': annotation_shardings,
            'static_argnames': static_argnames,
            'donate_argnums': donate_argnums,
            'donate_argnames': donate_argnames,
            'on_mismatch': on_mismatch,
        }
        if fun is None:
            return functools.partial(self.sjit, **options, **jit_kwargs)
        return _sjit.sjit(self, fun, **options, jit_kwargs=jit_kwargs)

    def get_context(
        self, annotation_shardings: Mapping[str, RuleLike] | None = None
    ) -> _context.ActiveHelper:
        """A context manager in which this helper is active, as it is inside `sjit`; on Explicit axes a
        plain ``jax.jit`` in it also needs ``jax.set_mesh(helper.mesh)``.

        Args:
            annotation_shardings: annotation name -> rule; bindings outside are inherited.
        """
        return _context.ActiveHelper(self, self._contexts, annotation_shardings)

    @classmethod
    def get_global_mesh_helper(cls) -> MeshShardingHelper | None:
        """The helper that is active in this thread, or None."""
        context = _context.current()
        return cast(MeshShardingHelper, context.helper) if context else None

    @classmethod
    def get_global_mesh(cls) -> Mesh | None:
        """The mesh of the active helper, or None."""
        context = _context.current()
        return context.helper.mesh if context else None

    @classmethod
    def get_global_annotation_shardings(cls) -> dict[str, RuleLike] | None:
        """The annotation bindings in force, inherited ones included; None without an active helper."""
        context = _context.current()
        return context.all_bindings() if context else None

    with_sharding_constraint = staticmethod(_constrain.with_sharding_constraint)
    with_sharding_annotation = staticmethod(_constrain.with_sharding_annotation)

    # Data --------------------------------------------------------------------------------------------

    def local_data_to_global_array(
        self,
        pytree: Any,
        batch_axis: int = 0,
        mesh_axis_subset: Sequence[str] | str | None = None,
    ) -> Any:
        """Makes global arrays of the data that each process holds.

        Args:
            pytree: this process's part. Scalars are replicated, and must agree on all processes.
            batch_axis: the axis along which the parts of all processes are joined, in process order;
                may be negative.
            mesh_axis_subset: the mesh axes over which the batch is sharded; all of them by default, in
                mesh order. Over the other axes it is replicated.

        Returns:
            The tree as global jax.Arrays.

        Raises:
            DataError: the global batch does not divide by the mesh axes; all such leaves are named.
            MeshError: an axis that the mesh does not have.

        Example:
            >>> import numpy as np
            >>> helper = MeshShardingHelper([4, 2], ['data', 'tp'])
            >>> batch = helper.local_data_to_global_array({'x': np.zeros((8, 3))}, mesh_axis_subset='data')
            >>> batch['x'].sharding.spec
            P('data',)
        """
        _mesh.require_devices(self._mesh, 'local_data_to_global_array')
        return _data.local_data_to_global_array(self.mesh, pytree, batch_axis, mesh_axis_subset)

    def global_array_to_local_data(self, pytree: Any, batch_axis: int = 0) -> Any:
        """The rows of global arrays that this process's devices hold, as numpy arrays (keys: as keys).

        Args:
            pytree: global jax.Arrays. One process alone holds every row; of several, none may be sharded
                along another axis (DataError).
            batch_axis: the axis of the rows; may be negative.
        """
        return _data.global_array_to_local_data(pytree, batch_axis)

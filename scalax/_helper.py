"""`MeshShardingHelper`: a mesh, and everything that can be done with sharding rules on it.

Each method is one call into a package below and holds the documentation for users. Reports, pictures and
plans are imported by the methods that make them: most programs need none of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, Self, TypeVar, cast, overload

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from scalax._compile import shard_map
from scalax._compile.shard_map import REQUIRED
from scalax._compile.sjit.function import reject_unknown_options, sjit
from scalax._core.context import active_helper, constraints
from scalax._core.mesh import meshes, topologies
from scalax._core.pytree.partition_specs import MeshAxes
from scalax._core.pytree.paths import dtype_on_devices, is_weakly_typed
from scalax._core.util.lru_cache import LRUCache
from scalax._core.util.renamed_keywords import renamed
from scalax._data.host import batch_layout, broadcast, transfer
from scalax._data.host.global_batch import BatchOptions, local_data_to_global_array
from scalax._data.host.local_batch import global_array_to_local_data
from scalax._data.host.prefetch import Prefetch
from scalax._spmd.options import BatchPartitioning, checked_partitioning
from scalax._spmd.pipelines.config import Pipeline
from scalax.errors import checked_flag
from scalax.rules import RuleLike
from scalax.rules._indivisible import OnIndivisible, checked_policy
from scalax.rules._resolve import Resolution, ResolveMode, resolve
from scalax.rules._unused_rules import shardings_with_warnings

if TYPE_CHECKING:
    from typing import Unpack

    from scalax._compile.call.resolve_arguments import OnMismatch
    from scalax._compile.sjit.function import SjitFunction, SjitOptions
    from scalax._data.reshard.leaf_mapping import NameMapping
    from scalax._planning.report.plan import Plan
    from scalax._verification.report import VerificationReport
    from scalax.explain import ShardingReport
    from scalax.visualize import Visualization

Given = ParamSpec('Given')
Result = TypeVar('Result')
Tree = TypeVar('Tree')


class MeshShardingHelper:
    """A mesh of devices, and what can be done with sharding rules on it.

    Where a method takes *rules*, one rule is a `ShardingRule`, a ``PartitionSpec``, a ``NamedSharding`` of
    this mesh, or None, which leaves a leaf to the compiler (`sjit`, `explain`). A pytree prefix of the tree
    may hold rules: a rule at a node is for the entire subtree. `scalax.sharding` has the classes of
    rules; ``a | b`` and ``a & b`` combine them.

    ============================  =================================================================
    to                            use
    ============================  =================================================================
    make a helper                 the constructor, `from_mesh`, `from_topology`
    place a tree, and fetch it    `shard`, `gather`; leaf by leaf `make_shard_and_gather_fns`
    move a tree between meshes    `reshard`
    compile a function            `sjit`, `shard_map`
    constrain values inside it    `with_sharding_constraint`, `with_sharding_annotation`
    look at shardings             `explain`, `visualize`, `match_sharding_rule`, `abstract`
    know the cost beforehand      `plan`
    check the values              `verify`
    load batches                  `local_data_to_global_array`, `prefetch`, `process_examples`
    bring host data back          `global_array_to_local_data`, `broadcast_from`
    be active outside of `sjit`   `get_context`; `get_global_mesh_helper` and others find it
    ============================  =================================================================

    Args:
        axis_dims: the size of each mesh axis; one may be -1, for all remaining devices.
        axis_names: the name of each mesh axis.
        mesh_axis_splitting: allow one physical axis of a TPU slice to serve several mesh axes, as for
            8x8 on a 4x4x4 slice. It may cost bandwidth.
        dcn_axis_dims: for several slices: the number of slices along each axis. Each entry of `axis_dims` is
            then a total, and a multiple of the entry here.
        devices: the devices to use; all by default.
        axis_types: one ``jax.sharding.AxisType`` for all axes or one for each; Auto by default.
        on_indivisible: the policy for bare PartitionSpecs where a dimension does not divide:
            ``'error'``, ``'replicate'`` or ``'warn'``. Rules carry their own.
        partition_batch: whether `sjit` finds the batch among a function's arguments and partitions the
            function along it (docs/partitioning.md). If False, only functions with
            ``sjit(..., batch_argnums=...)`` are partitioned.
        partitioning: the dtypes in which compiled functions gather weights and reduce gradients, and when,
            unless ``sjit(..., partitioning=...)`` says so; None is ``BatchPartitioning()``.

    Raises:
        MeshError: dimensions, names, types and devices do not fit together.

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
        partition_batch: bool = True,
        partitioning: BatchPartitioning | None = None,
    ) -> None:
        mesh = meshes.build_mesh(
            axis_dims,
            axis_names,
            split_physical_axes=checked_flag('mesh_axis_splitting', mesh_axis_splitting),
            dcn_axis_dims=dcn_axis_dims,
            devices=devices,
            axis_types=axis_types,
        )
        self._set_up(mesh, on_indivisible, partition_batch, partitioning)

    def _set_up(
        self,
        mesh: Mesh | AbstractMesh,
        on_indivisible: str,
        partition_batch: bool,
        partitioning: BatchPartitioning | None,
    ) -> None:
        self._mesh = mesh
        self._on_indivisible = checked_policy(on_indivisible)
        self._partition_batch = checked_flag('partition_batch', partition_batch)
        self._partitioning = checked_partitioning(partitioning)
        self._contexts: LRUCache[active_helper.Context, active_helper.Context] = LRUCache()

    @classmethod
    def from_mesh(
        cls,
        mesh: Mesh | AbstractMesh,
        *,
        on_indivisible: OnIndivisible = 'error',
        partition_batch: bool = True,
        partitioning: BatchPartitioning | None = None,
    ) -> Self:
        """A helper over an existing mesh; an AbstractMesh is enough for everything that needs no devices.

        Args:
            mesh: any ``jax.sharding.Mesh``, with its axis types as they are, or an ``AbstractMesh``.
            on_indivisible: as in the constructor.
            partition_batch: as in the constructor.
            partitioning: as in the constructor.

        Raises:
            MeshError: *mesh* is neither.
        """
        helper = cls.__new__(cls)
        helper._set_up(meshes.checked_mesh(mesh), on_indivisible, partition_batch, partitioning)
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
        partition_batch: bool = True,
        partitioning: BatchPartitioning | None = None,
    ) -> Self:
        """A helper over TPUs or GPUs that are not attached, to compile and to plan for.

        GPUs are named by the number of their hosts and of the GPUs of each: ``'h100:8'``, ``'h100:4x8'``; or,
        where NVLink joins several hosts, by domains, hosts and GPUs: ``'gb200:4x18x4'``. What NVLink joins is
        a slice. GPUs of a host, and of a domain, are adjacent: the last mesh axes are inside.

        Args:
            topology: the slice, such as ``'v5p:4x4x4'``, or the GPUs, such as ``'h100:4x8'``; with a target
                config of your own ``'gpu.txtpb:4x1x8'``.
            num_slices: the number of slices, joined by the data-center network; of GPUs that of NVLink
                domains, if *topology* does not have it.
            axis_dims: over all slices together; this and the others as in the constructor.
            axis_names: as in the constructor.
            mesh_axis_splitting: as in the constructor.
            dcn_axis_dims: as in the constructor; needed with several slices of TPUs. Of GPUs, mesh axes are
                over domains in the order of the mesh by default.
            axis_types: as in the constructor.
            on_indivisible: as in the constructor.
            partition_batch: as in the constructor.
            partitioning: as in the constructor.

        Raises:
            MissingDependencyError: the compiler for TPUs or for GPUs is not installed, or does not fit JAX.
            MeshError: the topology is unknown, or cannot hold the mesh.
        """
        return cls(
            axis_dims,
            axis_names,
            mesh_axis_splitting,
            dcn_axis_dims=dcn_axis_dims,
            devices=topologies.topology_devices(topology, num_slices),
            axis_types=axis_types,
            on_indivisible=on_indivisible,
            partition_batch=partition_batch,
            partitioning=partitioning,
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

    @property
    def partition_batch(self) -> bool:
        """Whether `sjit` finds the batch among the arguments and partitions functions along it."""
        return self._partition_batch

    @property
    def partitioning(self) -> BatchPartitioning | None:
        """How compiled functions gather weights and reduce gradients; None is ``BatchPartitioning()``."""
        return self._partitioning

    def __reduce__(self) -> Any:
        options = {
            'on_indivisible': self._on_indivisible,
            'partition_batch': self._partition_batch,
            'partitioning': self._partitioning,
        }
        return _unpickled, (type(self), meshes.pickled(self._mesh), options)

    def __repr__(self) -> str:
        auto = set(self.axis_types) <= {AxisType.Auto}
        types = '' if auto else '; ' + ', '.join(kind.name for kind in self.axis_types)
        return f'MeshShardingHelper({MeshAxes.of(self._mesh)}{types})'

    # --- Placing trees ---------------------------------------------------------------------------

    @overload
    def shard(self, tree: np.ndarray, rules: RuleLike) -> jax.Array: ...
    @overload
    def shard(self, tree: Tree, rules: RuleLike) -> Tree: ...
    @renamed(pytree='tree')
    def shard(self, tree: Any, rules: RuleLike) -> Any:
        """Places a tree of arrays on the mesh, in one transfer.

        Args:
            tree: leaves may be arrays of JAX and numpy, Python numbers, and typed PRNG keys.
            rules: a rule, a PartitionSpec, a NamedSharding of this mesh, or a pytree prefix of these.

        Returns:
            The tree as jax.Arrays, sharded by the rules.

        Raises:
            ShardingError: some leaves cannot be sharded as asked; all are named, and nothing is moved.
            StructureError: the rules are not a prefix of the tree.
            DataError: the processes of the mesh place different trees; raised on all of them.
        """
        meshes.require_devices(self._mesh, 'shard')
        return transfer.put_on_mesh(
            self.mesh, tree, lambda: shardings_with_warnings(self._resolved(rules, tree), self._mesh)
        )

    def reshard(
        self,
        tree: Any,
        rules: RuleLike,
        *,
        mapping: NameMapping = None,
        dtype: Any = None,
        donate: bool = False,
        memory: int | str | None = None,
    ) -> Any:
        """Moves a tree of arrays from any mesh to this one: to fewer devices, more, others, in another order.

        Each device sends parts of its own blocks straight to the devices that need them; what is on its
        device already stays. Values are equal bit by bit, and weak types stay: a step that was compiled for
        *tree* on this mesh is not compiled again. Every process of the program calls it.

        Args:
            tree: arrays in the memory of devices. Where a process holds nothing of an array, a
                ``jax.ShapeDtypeStruct`` with its sharding stands for it.
            rules: as for `shard`, for the tree that results.
            mapping: the names of leaves in the result, in the forms of `load_safetensors`: from leaf paths to
                leaf paths. ``'w[2]'`` is layer 2 of the array ``'w'``, which is stacked; ``'layers/*/w'``
                are the layers of an array, each one leaf. The result is then a tree of nested dicts.
            dtype: what floating-point leaves are cast to, on the way; float8 leaves are not. A cast leaf has
                no weak type.
            donate: delete each leaf as soon as it has been moved. Without it, the result shares no memory
                with *tree*.
            memory: a bound, such as ``'2GiB'``, on what is alive on each device beside its blocks of *tree*
                and of the result: arrays move in parts. By default each block moves in one piece.

        Returns:
            The tree as jax.Arrays on this mesh, sharded by the rules.

        Raises:
            ArgumentError: the mapping does not fit the tree; leaves were deleted, or are host data; an
                option is invalid.
            ShardingError: some leaves cannot be sharded as asked; all are named, and nothing is moved.
            DataError: the processes of the program move different trees; raised on all of them.

        Example:
            >>> import jax, numpy as np
            >>> from scalax.sharding import MeshShardingHelper, PartitionSpec
            >>> trainer = MeshShardingHelper([4], ['fsdp'], devices=jax.devices()[:4])
            >>> sampler = MeshShardingHelper([2], ['tp'], devices=jax.devices()[4:6])
            >>> state = trainer.shard({'w': np.ones((8, 8), np.float32)}, PartitionSpec('fsdp'))
            >>> moved = sampler.reshard(state, PartitionSpec(None, 'tp'), dtype='bfloat16', memory='1MiB')
            >>> moved['w'].dtype.name, moved['w'].sharding.spec
            ('bfloat16', P(None, 'tp'))
        """
        from scalax._data.reshard.run import reshard

        return reshard(self, tree, rules, mapping, dtype, donate, memory)

    @overload
    def gather(self, tree: jax.Array) -> np.ndarray: ...
    @overload
    def gather(self, tree: Tree) -> Tree: ...
    @renamed(pytree='tree')
    def gather(self, tree: Any) -> Any:
        """Fetches a tree of arrays to the host, on every process: as numpy arrays of the global shapes.

        Leaves of other kinds are returned as they are. NumPy has no weak types: a state that is fetched and
        placed again is compiled for once more, if it has some. `reshard` and checkpoints keep weak types.

        Raises:
            DataError: processes fetch different leaves from one another; raised on all of them.
        """
        return transfer.to_host(tree)

    @renamed(pytree='tree', sharding_rule='rules')
    def make_shard_and_gather_fns(self, tree: Any, rules: RuleLike) -> tuple[Any, Any]:
        """Two trees of functions, for placing and for fetching each leaf.

        `shard` and `gather` do the same for an entire tree at once, and need no such trees.
        """
        meshes.require_devices(self._mesh, 'make_shard_and_gather_fns')
        return transfer.shard_and_gather_functions(self.match_sharding_rule(rules, tree))

    @classmethod
    @renamed(pytree='tree')
    def apply_shard_and_gather_fns(cls, fns: Any, tree: Tree) -> Tree:
        """Applies functions from `make_shard_and_gather_fns` to a tree of the same structure."""
        return transfer.apply_functions(fns, tree)

    # --- Functions -------------------------------------------------------------------------------

    @overload
    def sjit(
        self,
        fun: Callable[Given, Result],
        in_shardings: RuleLike = None,
        out_shardings: RuleLike = None,
        static_argnums: int | Iterable[int] | None = None,
        args_sharding_constraint: RuleLike = None,
        annotation_shardings: Mapping[str, RuleLike] | None = None,
        **options: Unpack[SjitOptions],
    ) -> SjitFunction[Given, Result]: ...
    @overload
    def sjit(
        self,
        fun: None = None,
        in_shardings: RuleLike = None,
        out_shardings: RuleLike = None,
        static_argnums: int | Iterable[int] | None = None,
        args_sharding_constraint: RuleLike = None,
        annotation_shardings: Mapping[str, RuleLike] | None = None,
        **options: Unpack[SjitOptions],
    ) -> Callable[[Callable[Given, Result]], SjitFunction[Given, Result]]: ...
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
        batch_argnums: int | Iterable[int] | None = None,
        batch_argnames: str | Iterable[str] | None = None,
        on_mismatch: OnMismatch = 'error',
        pipeline: Pipeline | None = None,
        partitioning: BatchPartitioning | None = None,
        **jit_kwargs: Any,
    ) -> SjitFunction[..., Any] | Callable[[Callable[..., Any]], SjitFunction[..., Any]]:
        """Compiles a function like ``jax.jit``, with shardings given by rules.

        ``helper.sjit(fun, ...)``, ``@helper.sjit`` and ``@helper.sjit(...)`` all work, on functions,
        methods (``self`` is argument 0, usually static) and callable objects.

        Args:
            fun: the function.
            in_shardings: the shardings of the arguments: a tuple or list by position (static arguments
                not counted), a dict by argument name, or one rule for every argument; leaf paths start
                inside each argument. None leaves arguments as they are.
            out_shardings: the shardings of the output: a rule or a pytree prefix of rules. An output, or
                top-level element of it, without a rule takes the shardings of a donated argument with
                exactly its structure, shapes and dtypes.
            static_argnums: positions of arguments that are part of the program; may be negative.
            args_sharding_constraint: like `in_shardings`, but reshards inside the function.
            annotation_shardings: annotation name -> rule, for `with_sharding_annotation`.
            static_argnames: names of arguments that are part of the program.
            donate_argnums: positions of arguments whose buffers may be reused.
            donate_argnames: names of arguments whose buffers may be reused.
            batch_argnums: positions of arguments that are a batch, along which the function is partitioned
                (docs/partitioning.md). By default those that are placed by specs alone and are not donated,
                if other arguments are placed by rules. ``()`` turns partitioning off.
            batch_argnames: names of arguments that are a batch.
            on_mismatch: an argument that is committed to another sharding is an ``'error'``, or is
                moved at every such call (``'reshard'``).
            pipeline: the mesh axis that holds layers in stages, and the number of microbatches: loops over
                layers that are sharded over this axis run as pipelines (docs/pipeline_parallelism.md).
            partitioning: the dtypes in which weights are gathered and gradients reduced, and when
                (docs/partitioning.md); None takes that of the helper.
            **jit_kwargs: further options of ``jax.jit``, such as ``compiler_options``.

        Returns:
            An `SjitFunction`: called like *fun*, with ``lower``, ``trace``, ``eval_shape``,
            ``shardings_for``, ``get_jitted_function_by_args`` and ``clear_cache``. On a terminal and in a
            notebook a line on stderr shows how long a first call compiles (``compiling step ... 41 s``);
            the environment variable ``SCALAX_PROGRESS=0`` turns it off.

        Raises:
            ArgumentError: options that *fun* does not fit; at a call, arguments that are not arrays,
                static ones that cannot be hashed, arrays that were donated before.
            StructureError: rules whose structure does not fit the arguments or the output.
            ShardingError: leaves that cannot be sharded as asked; all of them are named.
            PlacementError: arguments that are committed to another sharding.
            StagesError: a step that cannot run as a pipeline.

        Example:
            >>> import jax.numpy as jnp
            >>> from scalax.sharding import MeshShardingHelper, PartitionSpec
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
            'batch_argnums': batch_argnums,
            'batch_argnames': batch_argnames,
            'on_mismatch': on_mismatch,
            'pipeline': pipeline,
            'partitioning': partitioning,
        }
        reject_unknown_options('sjit', jit_kwargs, options)
        if fun is None:
            return functools.partial(self.sjit, **options, **jit_kwargs)
        return sjit(self, fun, **options, jit_kwargs=jit_kwargs)

    @overload
    def shard_map(
        self,
        fun: Callable[Given, Result],
        in_specs: RuleLike,
        out_specs: RuleLike,
        *,
        axis_names: str | Iterable[str] | None = None,
        check_vma: bool = True,
    ) -> Callable[Given, Result]: ...
    @overload
    def shard_map(
        self,
        fun: None = None,
        *,
        in_specs: RuleLike,
        out_specs: RuleLike,
        axis_names: str | Iterable[str] | None = None,
        check_vma: bool = True,
    ) -> Callable[[Callable[Given, Result]], Callable[Given, Result]]: ...
    def shard_map(
        self,
        fun: Callable[..., Any] | None = None,
        in_specs: RuleLike = REQUIRED,
        out_specs: RuleLike = REQUIRED,
        *,
        axis_names: str | Iterable[str] | None = None,
        check_vma: bool = True,
    ) -> Callable[..., Any]:
        """Maps a function over blocks of its arguments like ``jax.shard_map``, with rules in place of specs.

        Arguments with other shardings than `in_specs` gives are resharded, also where JAX would refuse them
        (Explicit axes; other devices, outside of a compiled function).

        Args:
            fun: the function of one device's blocks; it may use collectives (``jax.lax.psum`` ...). Without
                it the result is a decorator.
            in_specs: how the arguments are cut: rules in all the forms that `sjit` takes for
                ``in_shardings``. None takes the blocks that an argument has, on Explicit axes only. A size
                that does not divide is an error whatever the policy. A rule with a choice, such as FSDP, may
                replicate small arrays: *fun* has to handle that.
            out_specs: how the outputs are put together: a spec, or a pytree prefix of specs, or of rules
                that look at paths only (the shape of an output depends on its spec).
            axis_names: the mesh axes along which *fun* sees blocks; all by default. Axes that are left
                out stay with the compiler; specs may name them, after the manual ones of a dimension, to
                shard the arguments and outputs further.
            check_vma: as in ``jax.shard_map``: whether JAX checks that outputs are replicated where
                `out_specs` claims it.

        Returns:
            A function with the parameters of *fun*. Inside, this helper is active.

        Raises:
            MeshError: `axis_names` names an axis that the mesh lacks, or one that is manual already.
            RuleError: rules in `out_specs` that look at more than paths.
            ShardingError: leaves that cannot be cut as asked; all of them are named.
            StructureError: rules whose structure does not fit the arguments or the outputs.

        Example:
            >>> import jax, numpy as np
            >>> from scalax.sharding import MeshShardingHelper, PartitionSpec
            >>> helper = MeshShardingHelper([-1], ['data'])
            >>> def normalized(x):
            ...     return x / jax.lax.psum(x.sum(), 'data')
            >>> mapped = helper.shard_map(normalized, PartitionSpec('data'), PartitionSpec('data'))
            >>> float(mapped(np.ones(16, np.float32)).sum())
            1.0
        """
        checked_flag('check_vma', check_vma)
        shard_map.reject_missing(in_specs=in_specs, out_specs=out_specs)
        if fun is None:
            options: dict[str, Any] = {'axis_names': axis_names, 'check_vma': check_vma}
            return functools.partial(self.shard_map, in_specs=in_specs, out_specs=out_specs, **options)
        return shard_map.shard_map(self.get_context(), fun, in_specs, out_specs, axis_names, check_vma)

    with_sharding_constraint = staticmethod(constraints.with_sharding_constraint)
    with_sharding_annotation = staticmethod(constraints.with_sharding_annotation)

    # --- Looking at shardings, and planning ------------------------------------------------------

    @renamed(sharding_rules='rules', pytree='tree')
    def match_sharding_rule(self, rules: RuleLike, tree: Any) -> Any:
        """The sharding that rules give each leaf of a tree on this mesh.

        Args:
            rules: as for `shard`.
            tree: as for `shard`; leaves may also be ``jax.ShapeDtypeStruct`` or types (``jax.typeof``).

        Returns:
            A pytree of NamedSharding with the structure of *tree*.

        Raises:
            ShardingError: some leaves cannot be sharded as asked; all of them are named.
            StructureError: the rules are not a prefix of the tree.
        """
        found = self._resolved(rules, tree)
        return jax.tree.unflatten(found.treedef, found.shardings)

    def _resolved(self, rules: RuleLike, tree: Any, mode: ResolveMode = ResolveMode.CONCRETE) -> Resolution:
        return resolve(rules, tree, self._mesh, mode=mode, on_indivisible=self._on_indivisible)

    @renamed(pytree='tree')
    def abstract(self, tree: Any, rules: RuleLike) -> Any:
        """The tree as ``jax.ShapeDtypeStruct`` with shardings: a restore target, or input to a plan.

        Weak types stay: a Python number is the struct of the array that `shard` makes of it.

        Args:
            tree: as for `match_sharding_rule`.
            rules: as for `match_sharding_rule`.
        """

        def struct(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
            shape, dtype = np.shape(leaf), dtype_on_devices(leaf)
            return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding, weak_type=is_weakly_typed(leaf))

        shardings = self.match_sharding_rule(rules, tree)
        with transfer.name_large_integers(tree):
            return jax.tree.map(struct, tree, shardings)

    @renamed(pytree='tree')
    def explain(self, tree: Any, rules: RuleLike) -> ShardingReport:
        """Reports the sharding of each leaf, the rule that chose it, and its size; prints as a table.

        Args:
            tree: as for `match_sharding_rule`.
            rules: as for `match_sharding_rule`; None (leave it to the compiler) is shown as such.
        """
        from scalax.explain import make_report

        return make_report(rules, self._resolved(rules, tree, ResolveMode.BOUNDARY), dict(self._mesh.shape))

    @renamed(tree_or_array='tree')
    def visualize(self, tree: Any, rules: RuleLike = None) -> Visualization:
        """Which device holds which block: a picture for terminals and notebooks.

        Args:
            tree: with rules, as for `match_sharding_rule`. Without, every leaf has a sharding, of
                any mesh: jax.Arrays, and the ``jax.ShapeDtypeStruct`` that `abstract` makes.
            rules: shows where these would place each leaf; None shows the leaves as they are placed.

        Returns:
            A `Visualization`: ``print`` it, end a notebook cell with it, or write it with ``to_html(path)``.

        Raises:
            ShardingError: leaves that the rules cannot place, or that have no sharding where there are no
                rules.

        Example:
            >>> from scalax.sharding import MeshShardingHelper, PartitionSpec
            >>> helper = MeshShardingHelper([4, 2], ['fsdp', 'tp'])
            >>> print(helper.visualize(jax.ShapeDtypeStruct((8, 4), 'float32'), PartitionSpec('tp')))
            float32[8,4]
            P('tp',): 2 blocks of [4,4], each on 4 devices
            dim 0 → 8 over tp=2; dim 1: 4, unsharded
                0:4       4:8
            ┌─────────┬─────────┐
            │ 0,2,4,6 │ 1,3,5,7 │
            └─────────┴─────────┘
            <BLANKLINE>
            Numbers are ids of CPU devices, in the mesh (fsdp=4, tp=2).
        """
        from scalax.visualize import visualize

        return visualize(tree if rules is None else self.abstract(tree, rules))

    def plan(self, fun: Callable[..., Any], /, *args: Any, quick: bool | None = None, **kwargs: Any) -> Plan:
        """The memory and the communication of a function, which is compiled and not run.

        Args:
            fun: a function that `sjit` made, or one of ``jax.jit`` over this mesh. Any other is compiled with
                its arguments as they are placed.
            *args: its arguments; ``jax.ShapeDtypeStruct`` and ``jax.typeof`` will do.
            quick: have the TPU compiler generate no code, which takes most of its time: seconds instead of
                minutes. Memory is then what it plans: within 1 % of that of a full plan on decoders of
                1B to 70B, but a guide only below 2 GiB (16 % less for a lone product).
                `scalax.plan.Plan.quick` is then True, and shardings are those that were asked for. Other
                compilers are quick anyway.
            **kwargs: its keyword arguments.

        Returns:
            A `scalax.plan.Plan`: memory, and whether it fits; shardings, collectives, and what bounds the
            step. It prints as a page of text. On a mesh of `from_topology` it is the plan of that hardware,
            by its own compiler; a step that does not fit has a plan too (``plan.fits`` is False).

        Raises:
            PlanError: the compiler failed, or the compiled program cannot be read.
            MeshError: the helper was made from an AbstractMesh.
            ArgumentError: *fun* is not a function, or has an argument of its own that is called ``quick``; or
                nothing places it on a mesh whose devices are not attached.

        Example:
            >>> import jax, jax.numpy as jnp
            >>> from scalax.sharding import MeshShardingHelper, PartitionSpec
            >>> helper = MeshShardingHelper([4, 2], ['fsdp', 'tp'])
            >>> @helper.sjit(in_shardings=PartitionSpec('fsdp'))
            ... def step(w, x):
            ...     return x @ w
            >>> w, x = jax.ShapeDtypeStruct((64, 32), 'float32'), jax.ShapeDtypeStruct((16, 64), 'float32')
            >>> [(row.kind, row.axes, row.count, row.bytes) for row in helper.plan(step, w, x).collectives]
            [('all-gather', ('fsdp',), 1, 8192)]
        """
        from scalax._planning.report.make_plan import make_plan, reject_misspelt, reject_own_argument

        reject_misspelt(fun, kwargs, ['quick'], 'plan')
        if quick is not None:
            otherwise = 'call scalax.plan.make_plan(helper, fun, args, kwargs, quick=...)'
            reject_own_argument(fun, 'quick', 'plan', otherwise)
            checked_flag('quick', quick)
        return make_plan(self, fun, args, kwargs, quick=bool(quick))

    def verify(
        self,
        fun: Callable[..., Any],
        /,
        *args: Any,
        seeds: int | None = None,
        steps: int | None = None,
        config: Any = None,
        inside: bool | None = None,
        **kwargs: Any,
    ) -> VerificationReport:
        """Whether a step computes on this mesh what it computes on one device.

        The step runs on both, with several sets of arguments and several steps in a row, each of which takes
        what the one before returned. All results are compared, on all devices. What rounding explains is
        sampled by running it on one device with random rounding errors; integers, booleans and keys that do
        not depend on rounded values have to be equal (docs/verify.md).

        Args:
            fun: a function that `sjit` or ``jax.jit`` made. Without arguments: a function that takes a helper
                and returns one with the tuple of its arguments, as for ``scalax plan``; needed where the code
                of the step holds the mesh, as a `shard_map` may.
            *args: its arguments. Values of a ``jax.ShapeDtypeStruct`` are drawn by what the step does with
                them. Arrays are taken as they are once, and then with other values like them.
            seeds: with how many sets of arguments it runs (3).
            steps: how many steps run in a row (2).
            config: what the function that makes the step takes besides the helper, such as a dataclass or a
                dict: its numbers are made smaller if the devices of this mesh are not here, as of
                `from_topology`, or the arguments are large. Without it, the shapes of the arguments are.
            inside: compare all intermediate values as well, if the results are equal (False).
            **kwargs: its keyword arguments.

        Returns:
            A `scalax.testing.VerificationReport`: ``.ok``,
            ``.differences`` with paths, errors and tolerances,
            and ``.first_difference`` with the line of the first operation that differs. ``str()`` of it is a
            page of text.

        Raises:
            ArgumentError: *fun* is not a function, or one that cannot run on one device; or an option has the
                name of one of its arguments.
            MeshError: there are too few devices for a small mesh with all axes.

        Example:
            >>> import jax, jax.numpy as jnp
            >>> from scalax.sharding import MeshShardingHelper, PartitionSpec
            >>> helper = MeshShardingHelper([4, 2], ['fsdp', 'tp'])
            >>> @helper.sjit(in_shardings=PartitionSpec('fsdp'))
            ... def mean(x):
            ...     return jax.shard_map(
            ...         jnp.mean, in_specs=PartitionSpec('fsdp'), out_specs=PartitionSpec(), check_vma=False
            ...     )(x)
            >>> report = helper.verify(mean, jax.ShapeDtypeStruct((32, 8), 'float32'))
            >>> report.ok, report.first_difference.primitive
            (False, 'shard_map')
        """
        from scalax._planning.report.make_plan import reject_misspelt, reject_own_argument
        from scalax._verification.verify import verify

        given = {'seeds': seeds, 'steps': steps, 'config': config, 'inside': inside}
        reject_misspelt(fun, kwargs, given, 'verify')
        options = {name: value for name, value in given.items() if value is not None}
        for name in options if args or kwargs else ():
            reject_own_argument(fun, name, 'verify', 'bind it with functools.partial')
        return verify(self, fun, args, kwargs, **options)

    # --- Batches and other host data -------------------------------------------------------------

    @renamed(pytree='tree')
    def local_data_to_global_array(
        self,
        tree: Any,
        batch_axis: int = 0,
        mesh_axis_subset: Sequence[str] | str | None = None,
        *,
        check: bool = True,
        local_batch: Literal['equal_share', 'addressable'] = 'equal_share',
        check_replicas: bool = False,
    ) -> Any:
        """Makes global arrays of the data that each process holds.

        Args:
            tree: this process's data. Scalars are replicated, and must agree on all processes. NumPy
                arrays must not change while the result is in use: on CPU it may share their memory.
            batch_axis: the batch dimension, along which the data of all processes are joined, in process
                order; may be negative.
            mesh_axis_subset: the mesh axes over which the batch is sharded; all of them by default, in
                mesh order. Over the other axes it is replicated.
            check: make sure that the data of all processes have the same structure, shapes and dtypes, and
                equal scalars: one all-gather of 20 bytes a process, which waits for the programs that are
                queued on the devices. Without it, processes that disagree may wait for one another for ever.
                On a single process there is nothing to check.
            local_batch: which examples *tree* holds. ``'equal_share'``: an equal share of the batch; only
                examples that the devices of another process need are sent there. ``'addressable'``: the
                examples that this process's devices hold, as `process_examples` lists them; nothing is sent.
            check_replicas: with ``local_batch='addressable'``, compare checksums of the examples that
                several processes hold.

        Returns:
            The tree as global jax.Arrays.

        Raises:
            DataError: the global batch does not divide by the mesh axes, or processes disagree; all such
                leaves are named, on every process.
            MeshError: an axis that the mesh does not have.

        Example:
            >>> import numpy as np
            >>> from scalax.sharding import MeshShardingHelper
            >>> helper = MeshShardingHelper([4, 2], ['data', 'tp'])
            >>> batch = helper.local_data_to_global_array({'x': np.zeros((8, 3))}, mesh_axis_subset='data')
            >>> batch['x'].sharding.spec
            P('data',)
        """
        meshes.require_devices(self._mesh, 'local_data_to_global_array')
        checked_flag('check', check)
        checked_flag('check_replicas', check_replicas)
        options = BatchOptions(self.mesh, batch_axis, mesh_axis_subset, local_batch)
        return local_data_to_global_array(options, tree, check, check_replicas)

    def prefetch(
        self,
        iterable: Iterable[Tree],
        batch_axis: int = 0,
        mesh_axis_subset: Sequence[str] | str | None = None,
        size: int = 2,
        *,
        check: bool = True,
        local_batch: Literal['equal_share', 'addressable'] = 'equal_share',
    ) -> Prefetch[Tree]:
        """Iterates over global arrays that a background thread loads ahead.

        The thread asks the iterable for batches and copies them to this process's devices. Processes
        communicate in ``next``. An error of the loader is raised there as it is; with ``check`` the other
        processes get a DataError about it, and a process whose data ends early is noticed.

        Args:
            iterable: of trees, as for `local_data_to_global_array`. A loader may fill the same memory again
                for each batch.
            batch_axis: as for `local_data_to_global_array`.
            mesh_axis_subset: as for `local_data_to_global_array`.
            size: the most batches in memory, not counting those that the loop holds.
            check: as for `local_data_to_global_array`, at each batch.
            local_batch: as for `local_data_to_global_array`.

        Returns:
            An iterator, also a context manager; it stops loading when it is closed or dropped. Type checkers
            take its batches for those of *iterable*.

        Example:
            >>> import numpy as np
            >>> from scalax.sharding import MeshShardingHelper
            >>> helper = MeshShardingHelper([8], ['data'])
            >>> with helper.prefetch(np.full(8, i) for i in range(3)) as batches:
            ...     [int(batch.sum()) for batch in batches]
            [0, 8, 16]
        """
        meshes.require_devices(self._mesh, 'prefetch')
        checked_flag('check', check)
        options = BatchOptions(self.mesh, batch_axis, mesh_axis_subset, local_batch)
        return Prefetch(iterable, options, size, check)

    def process_examples(
        self,
        global_batch: int,
        batch_axis: int = 0,
        mesh_axis_subset: Sequence[str] | str | None = None,
    ) -> slice | np.ndarray:
        """Returns the indices of the examples to load for ``local_batch='addressable'``.

        They are the examples of a global batch that this process's devices hold.

        Args:
            global_batch: the number of examples of the global batch.
            batch_axis: as for `local_data_to_global_array`; which examples are needed does not depend on it.
            mesh_axis_subset: as for `local_data_to_global_array`.

        Returns:
            A slice if the examples are consecutive, else their indices in ascending order. A NumPy array
            takes either: ``batch[helper.process_examples(len(batch))]``.

        Raises:
            DataError: the batch does not divide by the mesh axes.
            MeshError: an axis that the mesh does not have.

        Example:
            >>> from scalax.sharding import MeshShardingHelper
            >>> MeshShardingHelper([4, 2], ['data', 'tp']).process_examples(16)
            slice(0, 16, None)
        """
        meshes.require_devices(self._mesh, 'process_examples')
        batch_layout.checked_axis(batch_axis)
        return batch_layout.process_examples(
            self.mesh, global_batch, batch_layout.layout_of(self.mesh, mesh_axis_subset)
        )

    @renamed(pytree='tree')
    def global_array_to_local_data(
        self,
        tree: Any,
        batch_axis: int = 0,
        *,
        local_batch: Literal['equal_share', 'addressable'] = 'equal_share',
    ) -> Any:
        """The inverse of `local_data_to_global_array`: this process's data, as numpy arrays (keys: as keys).

        Args:
            tree: global jax.Arrays; what this process holds entirely is returned entirely.
            batch_axis: the batch dimension; may be negative.
            local_batch: ``'equal_share'``: this process's equal share, in process order; if it is on the
                devices of other processes, all processes fetch the leaf together. ``'addressable'``: the
                examples that this process's devices hold.

        Raises:
            DataError: leaves without such a share; all of them are named, on every process.
        """
        return global_array_to_local_data(tree, batch_axis, local_batch)

    def broadcast_from(self, process: int, tree: Tree) -> Tree:
        """Gives every process the values that one of them has.

        Args:
            process: the index of that process.
            tree: a tree of the same structure, shapes and dtypes on every process; the values of the
                others do not matter, and may be ``jax.ShapeDtypeStruct`` there.

        Returns:
            The tree in host memory, equal bit by bit: numpy arrays, Python numbers, typed PRNG keys. A
            jax.Array of a weak type becomes a numpy array, which has none.

        Raises:
            DataError: the trees differ, or cannot be sent; processes and leaves are named, on every process.

        Example:
            >>> from scalax.sharding import MeshShardingHelper
            >>> helper = MeshShardingHelper([8], ['data'])
            >>> helper.broadcast_from(0, {'seed': 17})
            {'seed': 17}
        """
        meshes.require_devices(self._mesh, 'broadcast_from')
        return broadcast.broadcast_from(self.mesh, process, tree)

    # --- The active helper -----------------------------------------------------------------------

    def get_context(
        self, annotation_shardings: Mapping[str, RuleLike] | None = None
    ) -> active_helper.ActiveHelper:
        """A context manager in which this helper is active, as it is inside `sjit`; on Explicit axes a
        plain ``jax.jit`` in it also needs ``jax.set_mesh(helper.mesh)``.

        Args:
            annotation_shardings: annotation name -> rule; bindings outside are inherited.
        """
        return active_helper.ActiveHelper(self, self._contexts, annotation_shardings)

    @classmethod
    def get_global_mesh_helper(cls) -> MeshShardingHelper | None:
        """The helper that is active in this thread, or None."""
        context = active_helper.current()
        return cast('MeshShardingHelper', context.helper) if context else None

    @classmethod
    def get_global_mesh(cls) -> Mesh | None:
        """The mesh of the active helper, or None."""
        context = active_helper.current()
        return context.helper.mesh if context else None

    @classmethod
    def get_global_annotation_shardings(cls) -> dict[str, RuleLike] | None:
        """The annotation bindings in force, inherited ones included; None without an active helper."""
        context = active_helper.current()
        return context.rules() if context else None

    # `help` orders what is in a class by `_fields`, and by name without it.
    _fields = ('__init__', *(name for name in vars() if not name.startswith('_')))


def _unpickled(cls: type[MeshShardingHelper], parts: Any, options: Mapping[str, Any]) -> MeshShardingHelper:
    return cls.from_mesh(meshes.unpickled(parts), **options)

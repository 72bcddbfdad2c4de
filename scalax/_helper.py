"""`MeshShardingHelper`: a mesh, with methods that apply sharding rules on it.

Each method holds the documentation for users, and calls a function of one of the packages. Methods import
reports, pictures and plans themselves, because most programs do not need them.
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

Params = ParamSpec('Params')
Result = TypeVar('Result')
Tree = TypeVar('Tree')


class MeshShardingHelper:
    """A mesh of devices, with methods that apply sharding rules on it.

    *rules* are one rule or a pytree of rules. A rule is a `ShardingRule`, a ``PartitionSpec``, a
    ``NamedSharding`` on this mesh, or None, which leaves the sharding to the compiler (in `sjit` and
    `explain`). A pytree of rules is a prefix of the tree: the rule at a node applies to the entire subtree.
    `scalax.sharding` has the classes of rules, and ``a | b`` and ``a & b`` combine rules.

    ===============================  ================================================================
    to                               use
    ===============================  ================================================================
    create a helper                  the constructor, `from_mesh`, `from_topology`
    shard and fetch a tree           `shard`, `gather`; by leaf, `make_shard_and_gather_fns`
    move a tree to another mesh      `reshard`
    compile a function               `sjit`, `shard_map`
    constrain values in a function   `with_sharding_constraint`, `with_sharding_annotation`
    inspect shardings                `explain`, `visualize`, `match_sharding_rule`, `abstract`
    estimate memory and time         `plan`
    check numerical correctness      `verify`
    load batches                     `local_data_to_global_array`, `prefetch`, `process_examples`
    copy results to the hosts        `global_array_to_local_data`, `broadcast_from`
    activate it outside of `sjit`    `get_context`; `get_global_mesh_helper` returns the active helper
    ===============================  ================================================================

    Args:
        axis_dims: the size of each mesh axis. One size may be -1, for all remaining devices.
        axis_names: the name of each mesh axis.
        mesh_axis_splitting: allow one physical axis of a TPU slice to be split over several mesh axes, as for
            an 8x8 mesh on a 4x4x4 slice. This may reduce bandwidth.
        dcn_axis_dims: for meshes over several slices, the number of slices along each axis. Each size in
            `axis_dims` then counts the devices of all slices, and is a multiple of the number of slices.
        devices: the devices of the mesh. By default, all devices.
        axis_types: a ``jax.sharding.AxisType`` for all axes, or a sequence with one for each axis. The
            default is Auto.
        on_indivisible: the policy for PartitionSpecs if a dimension is not divisible by its mesh axes:
            ``'error'``, ``'replicate'`` or ``'warn'``. A `ShardingRule` has its own policy.
        partition_batch: whether `sjit` finds the batch among a function's arguments and partitions the
            function along it (docs/partitioning.md). If False, only functions with
            ``sjit(..., batch_argnums=...)`` are partitioned.
        partitioning: the default of ``sjit(..., partitioning=...)``: how functions gather weights and reduce
            gradients. None means ``BatchPartitioning()``.

    Raises:
        MeshError: the sizes, names, types and devices do not match.

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
        """Creates a helper for an existing mesh.

        Args:
            mesh: a ``jax.sharding.Mesh``, whose axis types are kept, or an ``AbstractMesh``, for methods that
                need no devices.
            on_indivisible: as in the constructor.
            partition_batch: as in the constructor.
            partitioning: as in the constructor.

        Raises:
            MeshError: *mesh* is neither a Mesh nor an AbstractMesh.
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
        """Creates a helper for TPUs or GPUs that are not attached, to compile and plan for them.

        A TPU slice is named by its type and shape, such as ``'v5p:4x4x4'``. GPUs are named by the numbers of
        hosts and of GPUs per host, such as ``'h100:4x8'`` (or ``'h100:8'`` for one host). If NVLink connects
        several hosts, they are named by the numbers of NVLink domains, of hosts per domain, and of GPUs per
        host, such as ``'gb200:4x18x4'``. An NVLink domain counts as a slice. GPUs of a host, and of a domain,
        are adjacent in the mesh: the last mesh axes are the innermost.

        Args:
            topology: the TPU slice or the GPUs. With a GPU target config in a file, ``'gpu.txtpb:4x1x8'``.
            num_slices: the number of TPU slices, connected by the data-center network; or the number of
                NVLink domains, if *topology* does not contain it.
            axis_dims: as in the constructor, over all slices together.
            axis_names: as in the constructor.
            mesh_axis_splitting: as in the constructor.
            dcn_axis_dims: as in the constructor. Required for several TPU slices. For GPUs, the first mesh
                axes extend over domains by default.
            axis_types: as in the constructor.
            on_indivisible: as in the constructor.
            partition_batch: as in the constructor.
            partitioning: as in the constructor.

        Raises:
            MissingDependencyError: the compiler for TPUs or GPUs is not installed, or its version does not
                match JAX.
            MeshError: the topology is unknown, or its size does not match the mesh.
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
        """The ``jax.sharding.Mesh``, or ``AbstractMesh`` if the helper was created from one."""
        return cast(
            Mesh, self._mesh
        )  # typed as Mesh, because users would have to narrow a union at every use

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
        """The policy for PartitionSpecs if a dimension is not divisible by its mesh axes."""
        return self._on_indivisible

    @property
    def partition_batch(self) -> bool:
        """Whether `sjit` finds the batch among the arguments and partitions functions along it."""
        return self._partition_batch

    @property
    def partitioning(self) -> BatchPartitioning | None:
        """How functions gather weights and reduce gradients, or None for ``BatchPartitioning()``."""
        return self._partitioning

    def __reduce__(self) -> Any:
        options = {
            'on_indivisible': self._on_indivisible,
            'partition_batch': self._partition_batch,
            'partitioning': self._partitioning,
        }
        return _unpickle, (type(self), meshes.pickled(self._mesh), options)

    def __repr__(self) -> str:
        all_auto = set(self.axis_types) <= {AxisType.Auto}
        types = '' if all_auto else '; ' + ', '.join(axis_type.name for axis_type in self.axis_types)
        return f'MeshShardingHelper({MeshAxes.of(self._mesh)}{types})'

    # --- Placing trees ---------------------------------------------------------------------------

    @overload
    def shard(self, tree: np.ndarray, rules: RuleLike) -> jax.Array: ...
    @overload
    def shard(self, tree: Tree, rules: RuleLike) -> Tree: ...
    @renamed(pytree='tree')
    def shard(self, tree: Any, rules: RuleLike) -> Any:
        """Shards a tree of arrays over the mesh, in one transfer.

        Args:
            tree: the tree. Leaves may be JAX and NumPy arrays, Python numbers, and typed PRNG keys.
            rules: a rule, a PartitionSpec, a NamedSharding on this mesh, or a pytree prefix of these.

        Returns:
            The tree with jax.Arrays, sharded by the rules.

        Raises:
            ShardingError: some leaves cannot be sharded as the rules specify. The error lists all of them,
                and nothing is moved.
            StructureError: the rules are not a prefix of the tree.
            DataError: the processes of the mesh pass different trees. Raised on all processes.
        """
        meshes.require_devices(self._mesh, 'shard')
        return transfer.put_on_mesh(
            self.mesh, tree, lambda: shardings_with_warnings(self._resolve(rules, tree), self._mesh)
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
        """Moves a tree of arrays from any mesh to this mesh.

        The meshes may have different devices, any number of them, in any order. Each device sends parts of
        its shards directly to the devices that need them, and data that is on the right device already is
        not sent. Values are bit-identical and weak types are kept, so that a step that was compiled for
        *tree* on this mesh is not compiled again. Every process of the program has to call it.

        Args:
            tree: arrays in device memory. If this process holds no shard of an array, pass a
                ``jax.ShapeDtypeStruct`` with its sharding instead.
            rules: as for `shard`, for the resulting tree.
            mapping: the new names of leaves, from leaf paths to leaf paths, in the forms of
                `load_safetensors`. ``'w[2]'`` is layer 2 of the stacked array ``'w'``. ``'layers/*/w'`` are
                the layers of an array, one leaf each. The result is then a tree of nested dicts.
            dtype: the dtype to which floating-point leaves are cast, except for float8 leaves. A cast leaf
                has no weak type.
            donate: delete each leaf as soon as it has been moved. By default, the result shares no memory
                with *tree*.
            memory: a limit, such as ``'2GiB'``, on the memory that each device needs besides its shards of
                *tree* and of the result. Arrays then move in parts. By default, each block moves in one
                piece.

        Returns:
            The tree with jax.Arrays on this mesh, sharded by the rules.

        Raises:
            ArgumentError: the mapping does not match the tree; leaves are deleted arrays or host data; an
                option is invalid.
            ShardingError: some leaves cannot be sharded as the rules specify. The error lists all of them,
                and nothing is moved.
            DataError: the processes of the program pass different trees. Raised on all processes.

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
        """Fetches a tree of arrays to every host, as NumPy arrays of the global shapes.

        Leaves that are not jax.Arrays are returned unchanged. NumPy has no weak types: if state with weak
        types is fetched and sharded again, a step is compiled again for it. `reshard` and checkpoints keep
        weak types.

        Raises:
            DataError: the processes fetch different leaves. Raised on all processes.
        """
        return transfer.to_host(tree)

    @renamed(pytree='tree', sharding_rule='rules')
    def make_shard_and_gather_fns(self, tree: Any, rules: RuleLike) -> tuple[Any, Any]:
        """Returns two trees of functions, one to shard and one to gather each leaf.

        `shard` and `gather` do the same for an entire tree at once.
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
        fun: Callable[Params, Result],
        in_shardings: RuleLike = None,
        out_shardings: RuleLike = None,
        static_argnums: int | Iterable[int] | None = None,
        args_sharding_constraint: RuleLike = None,
        annotation_shardings: Mapping[str, RuleLike] | None = None,
        **options: Unpack[SjitOptions],
    ) -> SjitFunction[Params, Result]: ...
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
    ) -> Callable[[Callable[Params, Result]], SjitFunction[Params, Result]]: ...
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
        """Compiles a function like ``jax.jit``, with shardings from rules.

        Use it as ``helper.sjit(fun, ...)``, ``@helper.sjit`` or ``@helper.sjit(...)``, for functions, methods
        (``self`` is argument 0, usually static) and callable objects.

        Args:
            fun: the function.
            in_shardings: the rules for the arguments: a tuple or list by position (without the static
                arguments), a dict by argument name, or one rule for every argument. Leaf paths start inside
                each argument. An argument with None keeps its sharding.
            out_shardings: the rules for the outputs: a rule or a pytree prefix of rules. If an output, or a
                top-level element of it, has no rule, and a donated argument has exactly its structure, shapes
                and dtypes, it gets the shardings of that argument.
            static_argnums: the positions of the static arguments, which are part of the compiled program.
                They may be negative.
            args_sharding_constraint: like `in_shardings`, but the arguments are resharded inside the
                function.
            annotation_shardings: a dict from the names in `with_sharding_annotation` to rules.
            static_argnames: the names of the static arguments.
            donate_argnums: the positions of the donated arguments, whose buffers may be reused.
            donate_argnames: the names of the donated arguments.
            batch_argnums: the positions of the batch arguments, along which the function is partitioned
                (docs/partitioning.md). By default, if rules shard some of the arguments, these are the
                arguments that only specs shard and that are not donated. ``()`` disables partitioning.
            batch_argnames: the names of the batch arguments.
            on_mismatch: what to do with an argument that is committed to another sharding: ``'error'`` raises
                PlacementError, ``'reshard'`` moves the argument at every such call.
            pipeline: the mesh axis of the pipeline stages, and the number of microbatches. Scans over layers
                that are sharded over this axis run as pipelines (docs/pipeline_parallelism.md).
            partitioning: how weights are gathered and gradients are reduced: the dtypes, and when
                (docs/partitioning.md). None uses the helper's `partitioning`.
            **jit_kwargs: other options of ``jax.jit``, such as ``compiler_options``.

        Returns:
            An `SjitFunction`, which is called like *fun*. It has the methods ``lower``, ``trace``,
            ``eval_shape``, ``shardings_for``, ``explain_propagation``, ``get_jitted_function_by_args`` and
            ``clear_cache``. In a terminal or notebook, a line on stderr shows the progress of the first call
            (``compiling step ... 41 s``), unless the environment variable ``SCALAX_PROGRESS`` is 0.

        Raises:
            ArgumentError: the options do not match the parameters of *fun*. At a call: an argument is not an
                array, or has been donated before, or a static argument cannot be hashed.
            StructureError: the rules do not have the structure of the arguments or the outputs.
            ShardingError: some leaves cannot be sharded as the rules specify. The error lists all of them.
            PlacementError: some arguments are committed to another sharding.
            PipelineError: the function cannot run as a pipeline.

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
        fun: Callable[Params, Result],
        in_specs: RuleLike,
        out_specs: RuleLike,
        *,
        axis_names: str | Iterable[str] | None = None,
        check_vma: bool = True,
    ) -> Callable[Params, Result]: ...
    @overload
    def shard_map(
        self,
        fun: None = None,
        *,
        in_specs: RuleLike,
        out_specs: RuleLike,
        axis_names: str | Iterable[str] | None = None,
        check_vma: bool = True,
    ) -> Callable[[Callable[Params, Result]], Callable[Params, Result]]: ...
    def shard_map(
        self,
        fun: Callable[..., Any] | None = None,
        in_specs: RuleLike = REQUIRED,
        out_specs: RuleLike = REQUIRED,
        *,
        axis_names: str | Iterable[str] | None = None,
        check_vma: bool = True,
    ) -> Callable[..., Any]:
        """Maps a function over shards of its arguments like ``jax.shard_map``, with rules in place of specs.

        Arguments with other shardings than `in_specs` are resharded, even if JAX would reject them: on
        Explicit axes, and, outside of a compiled function, on other devices.

        Args:
            fun: the function of one device's local shards. It may use collectives, such as ``jax.lax.psum``.
                Without it, the result is a decorator.
            in_specs: how the arguments are sharded: rules in any form that ``in_shardings`` of `sjit`
                accepts. None keeps the sharding of an argument, on Explicit axes only. A dimension that is
                not divisible by its mesh axes is an error under every policy. Some rules, such as FSDP,
                replicate small arrays, which *fun* has to support.
            out_specs: how the outputs are sharded: a spec, or a pytree prefix of specs or of rules that look
                at paths only (because the global shape of an output depends on its spec).
            axis_names: the manual mesh axes, along which *fun* sees local shards. By default, all axes. The
                compiler handles the other axes. Specs may name them, after the manual axes of a dimension, to
                shard the arguments and outputs further.
            check_vma: as in ``jax.shard_map``: whether JAX checks that outputs are replicated along the axes
                that `out_specs` does not name.

        Returns:
            A function with the parameters of *fun*. This helper is active inside *fun*.

        Raises:
            MeshError: `axis_names` names an axis that the mesh does not have, or that is manual already.
            RuleError: a rule in `out_specs` looks at more than paths.
            ShardingError: some leaves cannot be sharded as the rules specify. The error lists all of them.
            StructureError: the rules do not have the structure of the arguments or the outputs.

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

    # --- Shardings, plans and verification -------------------------------------------------------

    @renamed(sharding_rules='rules', pytree='tree')
    def match_sharding_rule(self, rules: RuleLike, tree: Any) -> Any:
        """Returns the sharding that rules give each leaf of a tree on this mesh.

        Args:
            rules: as for `shard`.
            tree: as for `shard`. Leaves may also be ``jax.ShapeDtypeStruct`` or types (``jax.typeof``).

        Returns:
            A pytree of NamedShardings with the structure of *tree*.

        Raises:
            ShardingError: some leaves cannot be sharded as the rules specify. The error lists all of them.
            StructureError: the rules are not a prefix of the tree.
        """
        resolution = self._resolve(rules, tree)
        return jax.tree.unflatten(resolution.treedef, resolution.shardings)

    def _resolve(self, rules: RuleLike, tree: Any, mode: ResolveMode = ResolveMode.CONCRETE) -> Resolution:
        return resolve(rules, tree, self._mesh, mode=mode, on_indivisible=self._on_indivisible)

    @renamed(pytree='tree')
    def abstract(self, tree: Any, rules: RuleLike) -> Any:
        """Returns a tree of ``jax.ShapeDtypeStruct`` with shardings, to restore a checkpoint or to plan for.

        The structs have the types of the arrays that `shard` would return, including weak types.

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
        """Reports the sharding of each leaf, the rule that chose it, and its size. ``print`` shows a table.

        Args:
            tree: as for `match_sharding_rule`.
            rules: as for `match_sharding_rule`. None, which leaves a leaf to the compiler, is shown as such.
        """
        from scalax.explain import make_report

        return make_report(rules, self._resolve(rules, tree, ResolveMode.BOUNDARY), dict(self._mesh.shape))

    @renamed(tree_or_array='tree')
    def visualize(self, tree: Any, rules: RuleLike = None) -> Visualization:
        """Draws which device holds which block of each leaf, for terminals and notebooks.

        Args:
            tree: with rules, as for `match_sharding_rule`. Without rules, every leaf needs a sharding on any
                mesh: a jax.Array, or a ``jax.ShapeDtypeStruct`` from `abstract`.
            rules: the rules that shard the leaves. None shows the current shardings.

        Returns:
            A `Visualization`: ``print`` it, end a notebook cell with it, or write it with ``to_html(path)``.

        Raises:
            ShardingError: the rules cannot shard some leaves, or, without rules, some leaves have no
                sharding.

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
        """Reports the memory, communication and time of a function. It is compiled but not run.

        Args:
            fun: a function of `sjit`, or of ``jax.jit`` on this mesh. Any other function is compiled with the
                shardings of its arguments.
            *args: its arguments, which may be ``jax.ShapeDtypeStruct`` or types (``jax.typeof``).
            quick: skip code generation in the TPU compiler, which takes most of the compilation time: seconds
                instead of minutes. The memory is then the compiler's estimate. It is within 1 % of a full
                plan for decoders of 1B to 70B parameters, but less accurate below 2 GiB (16 % too low for a
                single matmul). `scalax.plan.Plan.quick` is then True, and shardings are the specified ones.
                Other compilers ignore this option.
            **kwargs: its keyword arguments.

        Returns:
            A `scalax.plan.Plan`: the memory and whether it fits, the shardings, the collectives, and the
            bottleneck of the step. It prints as a page of text. On a mesh of `from_topology`, that hardware's
            compiler makes the plan. A step that does not fit has a plan as well (``plan.fits`` is False).

        Raises:
            PlanError: the compiler failed, or scalax cannot read the compiled program.
            MeshError: the helper was created from an AbstractMesh.
            ArgumentError: *fun* is not a function, or has an argument called ``quick``; or the devices of the
                mesh are not attached, and neither *fun* nor its arguments have shardings on it.

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
        compare_intermediates: bool | None = None,
        **kwargs: Any,
    ) -> VerificationReport:
        """Checks that a step gives the same results on this mesh as on one device.

        The step runs on the mesh and on one device, for several sets of arguments. For each set, several
        steps run in a row, and each takes the results of the previous one. The results of all devices are
        compared. The tolerance is sampled: the step runs on one device with random rounding errors.
        Integers, booleans and keys that do not depend on rounded values have to be equal (docs/verify.md).

        Args:
            fun: a function of `sjit` or ``jax.jit``. Or, without *args*, a function that takes a helper and
                returns such a function with the tuple of its arguments, as for ``scalax plan``. This form is
                required if the code of the step uses the mesh, for example in a `shard_map`.
            *args: its arguments. For a ``jax.ShapeDtypeStruct``, values are sampled that suit the operations
                on it. Arrays are used once with their own values, and then with similar values.
            seeds: the number of sets of arguments. The default is 3.
            steps: the number of steps in a row. The default is 2.
            config: the second argument of the function that makes the step, such as a dataclass or a dict.
                Its numbers are reduced if the devices of this mesh are not attached (`from_topology`) or
                the arguments are large. Without it, the shapes of the arguments are reduced.
            compare_intermediates: if the results are equal, compare all intermediate values as well. The
                default is False.
            **kwargs: its keyword arguments.

        Returns:
            A `scalax.testing.VerificationReport`: ``.ok``, ``.differences`` with paths, errors and
            tolerances, and ``.first_difference`` with the line of the first operation that differs. It prints
            as a page of text.

        Raises:
            ArgumentError: *fun* is not a function, or cannot run on one device; or an option has the name of
                one of its arguments.
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

        all_options = {'seeds': seeds, 'steps': steps, 'config': config}
        all_options['compare_intermediates'] = compare_intermediates
        reject_misspelt(fun, kwargs, all_options, 'verify')
        options = {name: value for name, value in all_options.items() if value is not None}
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
        """Creates global arrays from the data of each process.

        Args:
            tree: the data of this process. Scalars are replicated, and must be equal on all processes. NumPy
                arrays must not change while the result is in use, because on CPU it may share their memory.
            batch_axis: the batch dimension, along which the data of all processes are concatenated in process
                order. It may be negative.
            mesh_axis_subset: the mesh axes over which the batch is sharded. By default, all axes in mesh
                order. Over the other axes the batch is replicated.
            check: check that the data of all processes have the same structure, shapes and dtypes, and equal
                scalars. This costs one all-gather of 20 bytes per process, which waits for the programs that
                are queued on the devices. Without the check, processes that disagree may deadlock. With a
                single process there is nothing to check.
            local_batch: which examples *tree* holds. ``'equal_share'``: an equal share of the batch; only
                examples that the devices of another process need are sent there. ``'addressable'``: the
                examples that this process's devices hold, as `process_examples` lists them; nothing is sent.
            check_replicas: with ``local_batch='addressable'``, compare checksums of the examples that
                several processes hold.

        Returns:
            The tree with global jax.Arrays.

        Raises:
            DataError: the global batch isn't divisible by the mesh axes, or the processes disagree. The error
                lists all such leaves, on every process.
            MeshError: the mesh has no such axis.

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
        """Iterates over batches as global arrays, which a background thread loads ahead.

        The thread iterates over the loader and copies batches to this process's devices. Processes
        communicate only in ``next``, which also raises the errors of the loader. With ``check``, the other
        processes then raise a DataError, as they do if the data of one process ends early.

        Args:
            iterable: the loader, an iterable of trees as for `local_data_to_global_array`. It may reuse the
                same memory for each batch.
            batch_axis: as for `local_data_to_global_array`.
            mesh_axis_subset: as for `local_data_to_global_array`.
            size: the maximum number of batches in memory, without the batches that the caller holds.
            check: as for `local_data_to_global_array`, for each batch.
            local_batch: as for `local_data_to_global_array`.

        Returns:
            An iterator that is also a context manager. It stops loading when it is closed or deleted. For
            type checkers its batches have the type of the loader's batches.

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
            global_batch: the number of examples in the global batch.
            batch_axis: as for `local_data_to_global_array`. The result does not depend on it.
            mesh_axis_subset: as for `local_data_to_global_array`.

        Returns:
            A slice if the examples are consecutive, and otherwise their indices in ascending order. Both can
            index a NumPy array: ``batch[helper.process_examples(len(batch))]``.

        Raises:
            DataError: the batch is not divisible by the mesh axes.
            MeshError: the mesh has no such axis.

        Example:
            >>> from scalax.sharding import MeshShardingHelper
            >>> MeshShardingHelper([4, 2], ['data', 'tp']).process_examples(16)
            slice(0, 16, None)
        """
        meshes.require_devices(self._mesh, 'process_examples')
        batch_layout.checked_axis(batch_axis)
        layout = batch_layout.layout_of(self.mesh, mesh_axis_subset)
        return batch_layout.process_examples(self.mesh, global_batch, layout)

    @renamed(pytree='tree')
    def global_array_to_local_data(
        self,
        tree: Any,
        batch_axis: int = 0,
        *,
        local_batch: Literal['equal_share', 'addressable'] = 'equal_share',
    ) -> Any:
        """Returns this process's part of global arrays, the inverse of `local_data_to_global_array`.

        The result has NumPy arrays, and typed PRNG keys for keys.

        Args:
            tree: global jax.Arrays. An array that is entirely on this process's devices is returned entirely.
            batch_axis: the batch dimension, which may be negative.
            local_batch: ``'equal_share'``: this process's equal share, in process order; if it is on the
                devices of other processes, all processes fetch the leaf together. ``'addressable'``: the
                examples that this process's devices hold.

        Raises:
            DataError: some leaves cannot be divided in this way. The error lists all of them, on every
                process.
        """
        return global_array_to_local_data(tree, batch_axis, local_batch)

    def broadcast_from(self, process: int, tree: Tree) -> Tree:
        """Broadcasts a tree of values from one process to all processes.

        Args:
            process: the index of the process that sends its values.
            tree: a tree with the same structure, shapes and dtypes on every process. The other processes may
                pass any values, or ``jax.ShapeDtypeStruct``.

        Returns:
            The tree in host memory, with bit-identical values: NumPy arrays, Python numbers, and typed PRNG
            keys. A jax.Array with a weak type becomes a NumPy array, which has no weak type.

        Raises:
            DataError: the trees differ, or cannot be sent. The error lists processes and leaves, on every
                process.

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
        """Returns a context manager that activates this helper, as `sjit` does inside compiled functions.

        With Explicit axes, a plain ``jax.jit`` also needs ``jax.set_mesh(helper.mesh)``.

        Args:
            annotation_shardings: a dict from the names in `with_sharding_annotation` to rules. Bindings of
                enclosing contexts stay active.
        """
        return active_helper.ActiveHelper(self, self._contexts, annotation_shardings)

    @classmethod
    def get_global_mesh_helper(cls) -> MeshShardingHelper | None:
        """Returns the helper that is active in this thread, or None."""
        context = active_helper.current()
        return cast('MeshShardingHelper', context.helper) if context else None

    @classmethod
    def get_global_mesh(cls) -> Mesh | None:
        """Returns the mesh of the active helper, or None."""
        return context.helper.mesh if (context := active_helper.current()) else None

    @classmethod
    def get_global_annotation_shardings(cls) -> dict[str, RuleLike] | None:
        """Returns the active annotation bindings, including inherited ones, or None without a helper."""
        return context.rules() if (context := active_helper.current()) else None

    # `help` lists the members of a class in the order of `_fields`.
    _fields = ('__init__', *(name for name in vars() if not name.startswith('_')))


def _unpickle(cls: type[MeshShardingHelper], parts: Any, options: Mapping[str, Any]) -> MeshShardingHelper:
    return cls.from_mesh(meshes.unpickled(parts), **options)

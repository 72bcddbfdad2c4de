"""WHEN: compiled functions, and the contexts they run in."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

from jax.sharding import Mesh

from scalax import _axis_modes, _constrain, _context, _shard_map, _sjit
from scalax._helper._where import Where
from scalax._prefix import RuleLike
from scalax.plan import Plan, make_plan
from scalax.plan._make import reject_own_argument

if TYPE_CHECKING:
    from scalax._helper._front import MeshShardingHelper


class When(Where):
    """What is compiled."""

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
            'on_mismatch': on_mismatch,
        }
        if fun is None:
            return functools.partial(self.sjit, **options, **jit_kwargs)
        return _sjit.sjit(self, fun, **options, jit_kwargs=jit_kwargs)

    def shard_map(
        self,
        fun: Callable[..., Any],
        in_specs: RuleLike,
        out_specs: RuleLike,
        *,
        axis_names: str | Iterable[str] | None = None,
        check_vma: bool = True,
    ) -> Callable[..., Any]:
        """Maps a function over blocks of its arguments like ``jax.shard_map``, with rules in place of specs.

        Arguments that lie otherwise than `in_specs` says are resharded, also where JAX would refuse them
        (Explicit axes; other devices, outside of a compiled function).

        Args:
            fun: the function of one device's blocks; it may use collectives (``jax.lax.psum`` ...).
            in_specs: how the arguments are cut: rules in all the forms that `sjit` takes for
                ``in_shardings``. None takes the blocks that an argument has, on Explicit axes only. A size
                that does not divide is an error whatever the policy. A rule with a choice, such as FSDP, may
                leave small arrays whole: *fun* has to reckon with that.
            out_specs: how the outputs are put together: a spec, or a pytree prefix of specs, or of rules
                that look at paths only (the shape of an output depends on its spec).
            axis_names: the mesh axes along which *fun* sees blocks; all by default. Axes that are left
                out stay with the compiler; specs may name them, behind manual ones in a dimension, and
                shard the whole arguments and outputs with them.
            check_vma: as in ``jax.shard_map``: whether JAX checks that outputs are replicated where
                `out_specs` says so.

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
        return _shard_map.shard_map(self.get_context(), fun, in_specs, out_specs, axis_names, check_vma)

    def auto_axes(
        self,
        fun: Callable[..., Any] | None = None,
        *,
        axes: str | Iterable[str] | None = None,
        out_sharding: RuleLike,
    ) -> Callable[..., Any]:
        """Runs a function with mesh axes of type Auto, like ``jax.sharding.auto_axes``, with rules for specs.

        Inside, the compiler propagates shardings along these axes, and types do not mention them; constraints
        of this helper are constraints there. For operations that have no sharding rule of their own, or
        whose result could be sharded in several ways.

        Args:
            fun: the function; without it the result is a decorator.
            axes: the mesh axes that are Auto inside; all of them by default.
            out_sharding: how the outputs lie: a rule or a pytree prefix of rules. None, which leaves it to
                the compiler, is for axes that are Auto outside too.

        Returns:
            A function with the parameters of *fun*. Called outside of a compiled function it is compiled, and
            arguments that lie on other devices are copied to those of the mesh.

        Raises:
            MeshError: `axes` names an axis that the mesh lacks, or one that is manual (inside `shard_map`).
            ShardingError: outputs that cannot be sharded as asked; all of them are named.
            StructureError: rules whose structure does not fit the outputs.

        Example:
            >>> import jax, numpy as np
            >>> from jax.sharding import AxisType
            >>> from scalax.sharding import MeshShardingHelper, PartitionSpec
            >>> helper = MeshShardingHelper([4, 2], ['data', 'model'], axis_types=AxisType.Explicit)
            >>> x = helper.shard(np.ones((8, 8), np.float32), PartitionSpec('data', 'model'))
            >>> transposed_sum = helper.auto_axes(lambda x: x + x.T, out_sharding=PartitionSpec('data'))
            >>> jax.typeof(transposed_sum(x))
            ShapedArray(float32[8@data,8])
        """
        if fun is None:
            return functools.partial(self.auto_axes, axes=axes, out_sharding=out_sharding)
        return _axis_modes.auto_axes(self.get_context(), fun, axes, out_sharding)

    def explicit_axes(
        self,
        fun: Callable[..., Any] | None = None,
        *,
        axes: str | Iterable[str] | None = None,
        in_sharding: RuleLike,
    ) -> Callable[..., Any]:
        """Runs a function with mesh axes of type Explicit, like ``jax.sharding.explicit_axes``, with rules.

        Inside, how an array lies along these axes is part of its type. Outside, what the function returns is
        the compiler's again along axes that are Auto there.

        Args:
            fun: the function; without it the result is a decorator.
            axes: the mesh axes that are Explicit inside; all of them by default.
            in_sharding: how the arguments lie inside: rules in all the forms that `sjit` takes for
                ``in_shardings``. None keeps the type of an argument, where no axis changes its type.

        Returns:
            A function with the parameters of *fun*. Called outside of a compiled function it is compiled, and
            arguments that lie on other devices are moved to those of the mesh.

        Raises:
            MeshError: `axes` names an axis that the mesh lacks, or one that is manual (inside `shard_map`).
            ShardingError: arguments that cannot be sharded as asked; all of them are named.
            StructureError: rules whose structure does not fit the arguments.

        Example:
            >>> import jax, numpy as np
            >>> from scalax.sharding import MeshShardingHelper, PartitionSpec
            >>> helper = MeshShardingHelper([4, 2], ['data', 'model'])
            >>> @helper.explicit_axes(in_sharding=PartitionSpec('data', 'model'))
            ... def total(x):
            ...     print(jax.typeof(x), jax.typeof(x.sum(axis=0)))
            ...     return x.sum(axis=0)
            >>> total(np.ones((8, 8), np.float32)).shape
            float32[8@data,8@model] float32[8@model]
            (8,)
        """
        if fun is None:
            return functools.partial(self.explicit_axes, axes=axes, in_sharding=in_sharding)
        return _axis_modes.explicit_axes(self.get_context(), fun, axes, in_sharding)

    def plan(self, fun: Callable[..., Any], /, *args: Any, quick: bool | None = None, **kwargs: Any) -> Plan:
        """What a function would hold, and what its devices would send one another; compiled, not run.

        Args:
            fun: a function that `sjit` made, or one of ``jax.jit`` over this mesh. Any other is compiled with
                its arguments as they lie.
            *args: its arguments; ``jax.ShapeDtypeStruct`` will do.
            quick: have the compiler of TPUs make no code, which takes most of its time: seconds instead of
                minutes. Memory is then what it lays out: within 1 % of that of a full plan on decoders of
                1B to 70B, but a guide only below 2 GiB (16 % less for a lone product).
                `scalax.plan.Plan.quick` says so, and shardings are those that were asked for. Other
                compilers are quick anyway.
            **kwargs: its keyword arguments.

        Returns:
            A `scalax.plan.Plan`: memory, and whether it fits; shardings, collectives, and what bounds the
            step. It prints as a page of text. On a mesh of `from_topology` it is that of hardware that is not
            here, as its compiler says; a step that does not fit is a plan too (``plan.fits`` is False).

        Raises:
            PlanError: the compiler failed, or the compiled program is written in a way that is not known.
            MeshError: the helper was made from an AbstractMesh.
            ArgumentError: *fun* is no function, or has an argument of its own that is called ``quick``; or
                nothing says that it runs on devices that are not here.

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
        if quick is not None:
            reject_own_argument(fun, 'quick')
        return make_plan(self, fun, args, kwargs, quick=bool(quick))

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
        return cast('MeshShardingHelper', context.helper) if context else None

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

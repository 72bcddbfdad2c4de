"""WHAT: rules meet trees on the mesh; shardings, reports, and arrays placed by them."""

from __future__ import annotations

from typing import Any

import jax

from scalax import _mesh, _transfer
from scalax._helper._where import Where
from scalax._paths import canonical_dtype
from scalax._prefix import RuleLike
from scalax._resolve import Use, resolve
from scalax.explain import ShardingReport, make_report
from scalax.visualize import Visualization, visualize


class What(Where):
    """What rules say of trees."""

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

        shardings = self.match_sharding_rule(rules, pytree)
        with _transfer.naming(pytree):
            return jax.tree.map(struct, pytree, shardings)

    def explain(self, pytree: Any, rules: RuleLike) -> ShardingReport:
        """What each leaf gets, which rule says so, and what it costs; prints as a table.

        Args:
            pytree: as for `match_sharding_rule`.
            rules: as for `match_sharding_rule`; None (leave it to the compiler) is shown as such.
        """
        resolution = resolve(rules, pytree, self._mesh, use=Use.BOUNDARY, on_indivisible=self._on_indivisible)
        return make_report(rules, resolution, dict(self._mesh.shape))

    def visualize(self, tree_or_array: Any, rules: RuleLike = None) -> Visualization:
        """Which device holds which block: a picture for terminals and notebooks.

        Args:
            tree_or_array: with rules, as for `match_sharding_rule`. Without, every leaf has a sharding, of
                any mesh: jax.Arrays, and the ``jax.ShapeDtypeStruct`` that `abstract` makes.
            rules: shows where these would place each leaf; None shows the leaves as they lie.

        Returns:
            A `Visualization`: ``print`` it, end a notebook cell with it, or write it with ``to_html(path)``
            or ``to_svg(path)``.

        Raises:
            ShardingError: leaves that the rules cannot place, or that have no sharding where there are no
                rules.

        Example:
            >>> from scalax.sharding import MeshShardingHelper, PartitionSpec
            >>> helper = MeshShardingHelper([4, 2], ['fsdp', 'tp'])
            >>> print(helper.visualize(jax.ShapeDtypeStruct((8, 4), 'float32'), PartitionSpec('tp')))
            float32[8,4]
            P('tp',): 2 blocks of [4,4], each on 4 devices
            dim 0 → 8 over tp=2; dim 1: 4, whole
                0:4       4:8
            ┌─────────┬─────────┐
            │ 0,2,4,6 │ 1,3,5,7 │
            └─────────┴─────────┘
            <BLANKLINE>
            Numbers are ids of CPU devices, in the mesh (fsdp=4, tp=2).
        """
        return visualize(tree_or_array if rules is None else self.abstract(tree_or_array, rules))

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
        return _transfer.put_on(self.mesh, pytree, lambda: self._shardings(rules, pytree)[0])

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

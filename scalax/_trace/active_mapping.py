"""Which mapping of logical axes to mesh axes is active in this thread?

It is a JAX user context, like the active helper (see `_context`), and so part of JAX's own trace cache key:
a function that JAX has traced under one mapping is traced again under another.
"""

from __future__ import annotations

from typing import Any

import jax

from scalax.rules import LogicalAxisShardingRule

# Created at import, because creating a user context is not thread-safe.
_active = jax.make_user_context(None)


def current() -> LogicalAxisShardingRule | None:
    """The mapping that is active in this thread, as the rule it stands for; None without one."""
    return _active.value


def entered(mapping: LogicalAxisShardingRule) -> Any:
    """A context manager in which *mapping* is the active one. Equal mappings share JAX's traces."""
    return _active(mapping)

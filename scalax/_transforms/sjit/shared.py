"""The states of sjit functions, shared by all that are made of one function with the same options.

``helper.sjit(f, ...)`` again, with equal options, finds what was traced and compiled before, as
``jax.jit(f)`` does. A state lives for as long as both the helper and the function do, keeps neither of them
alive, and is gone with them at once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from scalax._trace.contexts import MeshOwner, hashable
from scalax._transforms.calls.argument_shardings import Options
from scalax._transforms.calls.call_signature import CallSignature
from scalax._transforms.sjit.dispatch import Dispatcher
from scalax._util.lru_cache import Recent
from scalax.rules._prefix import key_of
from scalax.rules._resolve import are_pure

_Dispatchers = Recent[Any, Dispatcher]
_dispatchers: weakref.WeakKeyDictionary[
    MeshOwner, weakref.WeakKeyDictionary[Callable[..., Any], _Dispatchers]
] = weakref.WeakKeyDictionary()


def dispatcher_of(
    helper: MeshOwner, fun: Callable[..., Any], signature: CallSignature, options: Options
) -> Dispatcher:
    """The state of *fun* with these options; a new one where none is known, or none can be shared."""
    key = _key(fun, signature, options)
    if key is None:
        return Dispatcher(helper, fun, signature, options)
    functions = _dispatchers.setdefault(helper, weakref.WeakKeyDictionary())
    kept = functions.setdefault(fun, Recent())
    return kept.get(key) or kept.add(key, Dispatcher(helper, fun, signature, options))


def _key(fun: Callable[..., Any], signature: CallSignature, options: Options) -> Any:
    """What tells states of one function apart; None if they cannot be shared."""
    kind: Any = type(fun)
    if kind.__eq__ is not object.__eq__ or not kind.__weakrefoffset__:
        return None  # an equal function is another one, and may be gone when this one is called
    bound = options.annotation_shardings
    rules = [options.in_shardings, options.out_shardings, options.args_sharding_constraint, *bound.values()]
    if not all(map(are_pure, rules)):
        return None  # asked again by each: what they say, or hold, may change
    key = (
        signature.key,
        tuple(hashable(key_of(each)) for each in rules),
        tuple(bound),
        options.on_mismatch,
        tuple(sorted(options.jit_kwargs.items())),
    )
    try:
        hash(key)
    except TypeError:
        return None
    return key

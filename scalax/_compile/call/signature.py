"""The parameters of a function, and its calls as a flat list of slots.

``jax.jit`` takes shardings, static and donated arguments by position only. So each call is laid out as one
flat list of *slots*: the positional parameters, the extra positional arguments, the keyword-only parameters,
and one dict of the remaining keywords.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import keyword
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from scalax._core.pytree.path_identity import uncertain_nodes
from scalax._core.util import lru_cache
from scalax.errors import ArgumentError, StructureError, did_you_mean, near_names, plural
from scalax.rules._rule_tree import RuleLike, is_rule

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
EXTRA_KEYWORDS = '**'

Argnums = int | Iterable[int] | None
Argnames = str | Iterable[str] | None


class _Omitted:
    """The value of a slot whose argument the caller left to its default. A pytree without leaves."""

    def __repr__(self) -> str:
        return '<omitted>'


OMITTED = _Omitted()
jax.tree_util.register_pytree_node(_Omitted, lambda _: ((), None), lambda *_: OMITTED)


Selection = tuple[tuple[int, ...], frozenset[str]]
"""The positions and the names that a pair of options such as static_argnums and static_argnames selects."""


@dataclasses.dataclass(frozen=True)
class CallLayout:
    """The slots of calls with a certain number of extra positional arguments.

    Attributes:
        names: the argument of each slot as messages name it: ``state``, ``args[1]``, or ``**`` for keywords
            that no parameter takes.
        paths: the path of each argument in messages; None for those keywords.
        positional: how many are passed by position; those of keyword-only arguments follow.
        dynamic: the numbers of the slots that hold data.
        static: those of the slots that are part of the program rather than data.
        donated: those of the slots whose buffers may be reused for outputs.
        batch: those of the slots that the user names as batches.
        flat_signature: the signature of a function of the slots: JAX names arguments by it.
    """

    names: tuple[str, ...]
    paths: tuple[str | None, ...]
    positional: int
    dynamic: tuple[int, ...]
    static: tuple[int, ...]
    donated: tuple[int, ...]
    batch: tuple[int, ...]
    flat_signature: inspect.Signature = dataclasses.field(compare=False)


class CallSignature:
    """The parameters of a function, with its static and donated arguments and those that are a batch.

    Args:
        fun: the function.
        static: positions (negative ones count from the end) and names of static arguments.
        donated: those of donated arguments.
        batch: those of arguments that are batches.

    Attributes:
        has_explicit_batch: whether the user says which arguments are batches; perhaps none.
        disables_batch: whether the user says that none is.
        batch_keywords: those of them among the extra keywords.
        uncertain_nodes: the nodes of a structure of arguments that do not determine the leaf paths.

    Raises:
        ArgumentError: a position or a name that the function does not have, or one that is static and also
            donated or a batch.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        static: tuple[Argnums, Argnames] = (None, None),
        donated: tuple[Argnums, Argnames] = (None, None),
        batch: tuple[Argnums, Argnames] = (None, None),
    ) -> None:
        self.name = name_of(fun)
        self.parameters = _parameters(fun)
        self.python_signature = inspect.Signature(self.parameters)
        kinds = inspect.Parameter
        self.positional = [p.name for p in self.parameters if p.kind in _POSITIONAL]
        self.keyword_only = [p.name for p in self.parameters if p.kind is kinds.KEYWORD_ONLY]
        named = {p.kind: p.name for p in self.parameters}
        self.varargs, self.keywords = named.get(kinds.VAR_POSITIONAL), named.get(kinds.VAR_KEYWORD)
        # They name extra positional arguments, if a wrapper has the same parameters before these.
        behind = _parameters_behind(fun)
        names = [p.name for p in behind if p.kind in _POSITIONAL]
        fits = not self.varargs or names[: len(self.positional)] == self.positional
        self.wrapped_names, self._hidden = (names, []) if fits else ([], names)
        # A wrapper may take keywords for itself, but hardly one that looks like a misspelled one of these.
        self._most = None if kinds.VAR_POSITIONAL in [p.kind for p in behind] else len(names)
        passes_on = fits and kinds.VAR_KEYWORD not in [p.kind for p in behind]
        self._behind = [p.name for p in behind] if passes_on else []
        self._static = self._selection('static', *static)
        self._donated = self._selection('donate', *donated)
        self._batch = self._selection('batch', *batch)
        self.has_explicit_batch = any(each is not None for each in batch)
        self.disables_batch = self.has_explicit_batch and not any(self._batch)
        # Static and donated names among the extra keywords need slots of their own.
        self.static_keywords, self.donated_keywords, self.batch_keywords = [
            tuple(sorted(chosen.difference(self.positional, self.keyword_only))) if self.keywords else ()
            for _, chosen in (self._static, self._donated, self._batch)
        ]
        own = (self.static_keywords, self.donated_keywords, self.keywords)
        self.fixed = len(self.positional) + len(self.keyword_only) + sum(map(bool, own))
        self._layouts: dict[int, CallLayout] = {}
        self.uncertain_nodes = functools.lru_cache(maxsize=lru_cache.SIZE)(uncertain_nodes)
        if self.varargs is None:
            self.layout(0)  # raises about arguments that are both static and donated

    def _selection(self, what: str, numbers: Argnums, names: Argnames) -> Selection:
        """A pair of options such as static_argnums and static_argnames, checked."""
        if numbers is None and names is None:
            return (), frozenset()
        nums = tuple(map(operator.index, _sequence(numbers, int | np.integer)))
        given = frozenset(_sequence(names, str))
        count = len(self.positional)
        for number in nums:
            if self.varargs is None and not -count <= number < count:
                raise ArgumentError(
                    f'{what}_argnums={number}: {self.name} takes {plural(count, "positional argument")} '
                    f'({", ".join(self.positional) or "none"})'
                )
        for name in sorted(given):
            if near := self._unknown(name):
                raise ArgumentError(f'{what}_argnames={name!r}: {self.name} has no such argument ({near})')
        # Under a wrapper of (*args, **kwargs), an argument with a position may also come by its name.
        return nums, given | self._names_at(nums).difference(self.positional)

    def _names_at(self, numbers: Iterable[int]) -> set[str]:
        """The names of the function behind a wrapper at these positions."""
        size = len(self.wrapped_names)
        from_start = [n + size if n < 0 and self._most is not None else n for n in numbers]
        return {self.wrapped_names[n] for n in from_start if 0 <= n < size}

    def _unknown(self, name: Any) -> str:
        """What is near a name that no argument can have; empty if one can."""
        known = dict.fromkeys([*self.positional, *self.keyword_only, *self.wrapped_names])
        if name in known or name in self._behind:
            return ''
        is_free = self.keywords is not None and name not in self._hidden
        return '' if is_free and not near_names(str(name), self._behind) else did_you_mean(str(name), known)

    @property
    def key(self) -> Any:
        """Equal for functions of equal parameters and options."""
        parameters = tuple([(p.name, p.kind, p.default is p.empty) for p in self.parameters])
        batch = (self.has_explicit_batch, *self._batch)
        return self.name, parameters, tuple(self.wrapped_names), self._static, self._donated, batch

    def layout_of(self, flat_args: Sequence[Any]) -> CallLayout:
        """The layout of a call."""
        extras = len(flat_args) - self.fixed
        return self._layouts.get(extras) or self.layout(extras)

    def layout(self, extras: int) -> CallLayout:
        """The layout of calls with this number of extra positional arguments."""
        known = self._layouts.get(extras)
        if known is None:
            known = self._layouts.setdefault(extras, self._lay_out(extras))
        return known

    def _lay_out(self, extras: int) -> CallLayout:
        count = len(self.positional)
        extra = [f'{self.varargs}[{i}]' for i in range(extras)]
        if self._keeps_some(extras):
            for numbers, named in (self._static, self._donated, self._batch):
                self._require_own(named - self._names_at(numbers), 'an option')
        else:
            extra[: len(self.wrapped_names[count:])] = self.wrapped_names[count : count + extras]
        names = [*self.positional, *extra]
        total = len(names)
        # Negative positions count from the last parameter of the function behind, whether it is given or not.
        end = total if self._most is None else max(total, len(self.wrapped_names))
        names += self.keyword_only
        numbered = list(enumerate(names))
        static, donated, batch = [
            [i for i, name in numbered if name in named or (i < total and not {i, i - end}.isdisjoint(given))]
            for given, named in (self._static, self._donated, self._batch)
        ]
        if self.static_keywords:
            static.append(len(names))
            names.append('static keywords')
        if self.donated_keywords:
            donated.append(len(names))
            names.append(EXTRA_KEYWORDS)
        if self.keywords:
            names.append(EXTRA_KEYWORDS)
        keywords = sorted(set(self.static_keywords).intersection(self.batch_keywords))
        for what, wrong in (
            ('donated', [names[slot] for slot in donated if slot in static]),
            ('a batch', [names[slot] for slot in batch if slot in static] + keywords),
        ):
            if wrong:
                raise ArgumentError(f'{self.name}: {", ".join(wrong)} cannot be both static and {what}')
        return CallLayout(
            tuple(names),
            tuple([None if name == EXTRA_KEYWORDS else name for name in names]),
            total,
            dynamic=tuple([slot for slot in range(len(names)) if slot not in static]),
            static=tuple(static),
            donated=tuple(donated),
            batch=tuple(batch),
            flat_signature=_flat_signature(names),
        )

    def _keeps_some(self, extras: int) -> bool:
        """Whether a wrapper is given more arguments by position than the function behind it takes."""
        total = len(self.positional) + extras
        return self.varargs is not None and self._most is not None and total > self._most

    def _require_own(self, names: Iterable[str], what: str) -> None:
        """Raises ArgumentError if some names are those of arguments of the function behind a wrapper."""
        wrong = [
            n for n in names if n in self.wrapped_names and n not in (*self.positional, *self.keyword_only)
        ]
        if wrong:
            raise ArgumentError(
                f'{self.name}: {what} names {", ".join(map(repr, sorted(wrong)))}, and the wrapper is called '
                'with more positional arguments than the function that it wraps takes: give positions'
            )

    def flatten(self, args: Sequence[Any], keywords: Mapping[str, Any]) -> tuple[Any, ...]:
        """The flat arguments of a call; raises TypeError as Python does for a call that does not fit."""
        try:
            bound = self.python_signature.bind(*args, **keywords)
        except TypeError as error:
            raise TypeError(f'{self.name}(): {error}') from None
        flat_args = [bound.arguments.get(name, OMITTED) for name in self.positional]
        flat_args += bound.arguments.get(self.varargs, ()) if self.varargs else ()
        flat_args += [bound.arguments.get(name, OMITTED) for name in self.keyword_only]
        if self.keywords:
            flat_args += self.split_keywords(bound.arguments.get(self.keywords, {}))
        return tuple(flat_args)

    def restore(self, flat_args: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """The arguments and keywords with which to call the function."""
        rest = list(flat_args)
        keywords: dict[str, Any] = {}
        for own in (self.keywords, self.donated_keywords, self.static_keywords):
            if own:
                keywords.update(rest.pop())
        positional = len(rest) - len(self.keyword_only)
        for name, value in zip(self.keyword_only, rest[positional:], strict=True):
            if value is not OMITTED:
                keywords[name] = value
        args = rest[:positional]
        while args and args[-1] is OMITTED:
            args.pop()
        omitted = [i for i, value in enumerate(args) if value is OMITTED]
        if omitted:
            # A parameter before the last one given was omitted, so the later ones came by keyword.
            named = zip(self.positional[omitted[0] :], args[omitted[0] :], strict=False)
            keywords.update((name, value) for name, value in named if value is not OMITTED)
            args = args[: omitted[0]]
        return args, keywords

    def split_keywords(self, keywords: Mapping[str, Any]) -> list[Any]:
        """The last slots of a call: the static and donated keywords, if there can be any, and the others."""
        rest = dict(keywords)
        slots: list[Any] = []
        if self.static_keywords:
            slots.append(tuple((n, rest.pop(n)) for n in self.static_keywords if n in keywords))
        if self.donated_keywords:
            slots.append({n: rest.pop(n) for n in self.donated_keywords if n in keywords})
        return [*slots, rest]

    def as_called(
        self, layout: CallLayout, flat_args: Sequence[Any], count: int, names: Sequence[str]
    ) -> tuple[Sequence[Any], dict[str, Any], dict[str, Any]]:
        """A call in the form of its user, with *count* arguments by position and others by these names.

        Returns:
            The arguments, the keywords, and the options of ``jax.jit`` that say which are static and donated.
        """
        args, keywords = self.restore(flat_args)
        values = {**dict(zip(self.positional, args, strict=False)), **keywords}
        options: dict[str, Any] = {}
        for option, slots, chosen in (
            ('static', layout.static, self.static_keywords),
            ('donate', layout.donated, self.donated_keywords),
        ):
            known = {*chosen, *[layout.names[slot] for slot in slots]}
            options[f'{option}_argnums'] = [slot for slot in slots if slot < count]
            options[f'{option}_argnames'] = [name for name in names if name in known]
        return flat_args[:count], {name: values[name] for name in names}, options

    def rules_by_slot(
        self, rules: RuleLike, layout: CallLayout, flat_args: Sequence[Any], what: str, rest: str
    ) -> dict[int, RuleLike]:
        """The rules of each dynamic slot, by slot number.

        Args:
            rules: a tuple or list by position, a dict by argument name, or one rule for all.
            layout: the slots of the call.
            flat_args: the call.
            what: the name of the option, for messages.
            rest: what to give for arguments without a sharding, for messages.

        Raises:
            StructureError: the rules do not fit the arguments.
        """
        kind: Any = type(rules)
        if kind is not tuple and is_rule(rules):
            return dict.fromkeys(layout.dynamic, rules)
        by_slot: dict[int, RuleLike] = dict.fromkeys(layout.dynamic)
        if isinstance(rules, Mapping):
            self.check_names(rules, what)
            if self._keeps_some(len(flat_args) - self.fixed):
                self._require_own(rules, what)
            for i in layout.dynamic:
                name = layout.names[i]
                if name == EXTRA_KEYWORDS:
                    by_slot[i] = {key: rules.get(key) for key in flat_args[i]} or None
                elif len(self.positional) <= i < layout.positional:
                    by_slot[i] = rules.get(name, rules.get(self.varargs or ''))
                else:
                    by_slot[i] = rules.get(name)
            return by_slot
        if not isinstance(rules, tuple | list):
            raise StructureError(
                f'{what} of {self.name} is {type(rules).__name__}: give a tuple by position, a dict by '
                'argument name, or one rule for every argument'
            )
        places = [i for i in layout.dynamic if i < layout.positional]
        given = [i for i in places if flat_args[i] is not OMITTED]
        if len(rules) > len(places) or (given and len(rules) <= places.index(given[-1])):
            names = ', '.join(layout.names[i] for i in places) or 'none'
            takes = f'{"this call has" if self.varargs else "the function takes"} '
            takes += plural(len(places), 'positional argument')
            takes += ' besides static ones' if layout.static else ''
            raise StructureError(
                f'{what} of {self.name} has {plural(len(rules), "entry", "entries")}, but {takes} ({names}): '
                f'give one entry each ({rest}), or a dict by argument name'
            )
        return by_slot | dict(zip(places, rules, strict=False))

    def check_names(self, rules: RuleLike, what: str) -> None:
        """Raises StructureError if a dict of rules names an argument that the function does not have."""
        if not isinstance(rules, Mapping) or is_rule(rules):
            return
        layout = self.layout(0)
        static = {layout.names[slot] for slot in layout.static}
        for name in rules:
            if name in static or name in self.static_keywords:
                raise StructureError(f'{what} of {self.name}: {name!r} is static, it has no sharding')
            if name != self.varargs and (near := self._unknown(name)):
                raise StructureError(f'{what} of {self.name}: there is no argument {name!r} ({near})')


def name_of(fun: Callable[..., Any]) -> str:
    """The name of a function in messages and profiles; of a ``functools.partial`` that of its function."""
    while isinstance(fun, functools.partial) and not hasattr(fun, '__name__'):
        fun = fun.func
    return str(getattr(fun, '__name__', type(fun).__name__))


def _flat_signature(names: Iterable[str]) -> inspect.Signature:
    """The signature of a function of slots with these names."""
    taken = dict[str, None]()
    for each in names:
        name = re.sub(r'\W+', '_', each).strip('_') or 'kwargs'
        while name in taken or not name.isidentifier() or keyword.iskeyword(name):
            name += '_'
        taken[name] = None
    kind = inspect.Parameter.POSITIONAL_ONLY
    return inspect.Signature([inspect.Parameter(name, kind) for name in taken])


def _parameters(fun: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters of *fun* itself, not of a function that it wraps."""
    try:
        return list(inspect.signature(fun, follow_wrapped=False).parameters.values())
    except (ValueError, TypeError):  # some built-ins have no signature
        return list(inspect.signature(lambda *args, **kwargs: None).parameters.values())


def _parameters_behind(fun: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters of the function that *fun* wraps, whose names users know."""
    try:
        return list(inspect.signature(fun).parameters.values())
    except (ValueError, TypeError):
        return []


def _sequence(value: Any, kind: Any) -> tuple[Any, ...]:
    return () if value is None else (value,) if isinstance(value, kind) else tuple(value)

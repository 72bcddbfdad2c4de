"""The parameters of a function, and the layout of its calls as a flat list of slots.

``jax.jit`` takes shardings, static arguments and donated arguments by position only. So each call is laid out
as one flat list of *slots*: the positional parameters, the extra positional arguments, the keyword-only
parameters, and one dict of the remaining keywords.
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

from scalax._core.pytree.ambiguous_paths import ambiguous_nodes
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
    """The slots of the calls with a given number of extra positional arguments.

    Attributes:
        names: the argument of each slot as messages name it: ``state``, ``args[1]``, or ``**`` for keywords
            that no parameter takes.
        paths: the path of each argument in messages. It is None for the slots of extra keywords.
        num_positional: the number of slots passed by position. The keyword-only arguments follow them.
        dynamic: the indices of the slots that hold data.
        static: the indices of the slots that are part of the program rather than data.
        donated: the indices of the slots whose buffers may be reused for outputs.
        batch: the indices of the slots that the user names as batches.
        flat_signature: the signature of a function of the slots. JAX's messages name arguments by it.
    """

    names: tuple[str, ...]
    paths: tuple[str | None, ...]
    num_positional: int
    dynamic: tuple[int, ...]
    static: tuple[int, ...]
    donated: tuple[int, ...]
    batch: tuple[int, ...]
    flat_signature: inspect.Signature = dataclasses.field(compare=False)


class CallSignature:
    """The parameters of a function, and which of its arguments are static, donated or a batch.

    A function may be a wrapper with ``*args`` or ``**kwargs``. The parameters of the function that it wraps
    then name its extra arguments, as long as the wrapper's own parameters come first in both.

    Args:
        fun: the function.
        static: the positions (negative positions count from the end) and the names of static arguments.
        donated: the positions and the names of donated arguments.
        batch: the positions and the names of arguments that are batches.

    Attributes:
        positional: the names of the positional parameters.
        keyword_only: the names of the keyword-only parameters.
        varargs: the name of the parameter for extra positional arguments, or None.
        keywords: the name of the parameter for extra keywords, or None.
        wrapped_names: the names of the positional parameters of the wrapped function.
        has_explicit_batch: whether the user specified the batch arguments, perhaps as none.
        disables_batch: whether the user specified that no argument is a batch.
        static_keywords, donated_keywords, batch_keywords: the selected names among the extra keywords.
        num_fixed_slots: the number of slots of a call without extra positional arguments.
        ambiguous_nodes: finds the nodes of a tree structure that do not determine the leaf paths.

    Raises:
        ArgumentError: *fun* has no such position or name, or a static argument is also donated or a batch.
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
        name_by_kind = {p.kind: p.name for p in self.parameters}
        self.varargs = name_by_kind.get(kinds.VAR_POSITIONAL)
        self.keywords = name_by_kind.get(kinds.VAR_KEYWORD)
        wrapped = _wrapped_parameters(fun)
        wrapped_kinds = [p.kind for p in wrapped]
        names = [p.name for p in wrapped if p.kind in _POSITIONAL]
        matches = not self.varargs or names[: len(self.positional)] == self.positional
        self.wrapped_names, self._hidden_names = (names, []) if matches else ([], names)
        self._max_positional = None if kinds.VAR_POSITIONAL in wrapped_kinds else len(names)
        # A wrapper may take keywords for itself, but hardly a keyword that looks like a misspelled name of a
        # wrapped parameter.
        passes_keywords_on = matches and kinds.VAR_KEYWORD not in wrapped_kinds
        self._keyword_candidates = [p.name for p in wrapped] if passes_keywords_on else []
        self._static = self._select('static', *static)
        self._donated = self._select('donate', *donated)
        self._batch = self._select('batch', *batch)
        self.has_explicit_batch = any(option is not None for option in batch)
        self.disables_batch = self.has_explicit_batch and not any(self._batch)
        # Static and donated names among the extra keywords need separate slots.
        self.static_keywords, self.donated_keywords, self.batch_keywords = [
            tuple(sorted(names.difference(self.positional, self.keyword_only))) if self.keywords else ()
            for _, names in (self._static, self._donated, self._batch)
        ]
        keyword_slots = (self.static_keywords, self.donated_keywords, self.keywords)
        self.num_fixed_slots = len(self.positional) + len(self.keyword_only) + sum(map(bool, keyword_slots))
        self._layouts: dict[int, CallLayout] = {}
        self.ambiguous_nodes = functools.lru_cache(maxsize=lru_cache.SIZE)(ambiguous_nodes)
        if self.varargs is None:
            self.layout(0)  # raises about arguments that are both static and donated

    def _select(self, option: str, argnums: Argnums, argnames: Argnames) -> Selection:
        """Checks a pair of options such as static_argnums and static_argnames."""
        if argnums is None and argnames is None:
            return (), frozenset()
        positions = tuple(map(operator.index, _sequence(argnums, int | np.integer)))
        names = frozenset(_sequence(argnames, str))
        count = len(self.positional)
        for position in positions:
            if self.varargs is None and not -count <= position < count:
                raise ArgumentError(
                    f'{option}_argnums={position}: {self.name} takes {plural(count, "positional argument")} '
                    f'({", ".join(self.positional) or "none"})'
                )
        for name in sorted(names):
            if hint := self._unknown_name_hint(name):
                raise ArgumentError(f'{option}_argnames={name!r}: {self.name} has no such argument ({hint})')
        # A wrapper with (*args, **kwargs) may also get an argument that has a position by its name.
        return positions, names | self._wrapped_names_at(positions).difference(self.positional)

    def _wrapped_names_at(self, positions: Iterable[int]) -> set[str]:
        """Returns the names of the wrapped function's parameters at these positions."""
        size = len(self.wrapped_names)
        indices = [n + size if n < 0 and self._max_positional is not None else n for n in positions]
        return {self.wrapped_names[n] for n in indices if 0 <= n < size}

    def _unknown_name_hint(self, name: Any) -> str:
        """Returns which names are similar to a name that no argument can have; '' for a valid name."""
        names = dict.fromkeys([*self.positional, *self.keyword_only, *self.wrapped_names])
        if name in names or name in self._keyword_candidates:
            return ''
        is_free_keyword = self.keywords is not None and name not in self._hidden_names
        is_valid = is_free_keyword and not near_names(str(name), self._keyword_candidates)
        return '' if is_valid else did_you_mean(str(name), names)

    @property
    def key(self) -> Any:
        """A cache key that is equal for functions with equal parameters and options."""
        parameters = tuple([(p.name, p.kind, p.default is p.empty) for p in self.parameters])
        batch = (self.has_explicit_batch, *self._batch)
        return self.name, parameters, tuple(self.wrapped_names), self._static, self._donated, batch

    def layout_of(self, flat_args: Sequence[Any]) -> CallLayout:
        """Returns the layout of a call."""
        num_extras = len(flat_args) - self.num_fixed_slots
        return self._layouts.get(num_extras) or self.layout(num_extras)

    def layout(self, num_extras: int) -> CallLayout:
        """Returns the layout of calls with this number of extra positional arguments."""
        layout = self._layouts.get(num_extras)
        if layout is None:
            layout = self._layouts.setdefault(num_extras, self._make_layout(num_extras))
        return layout

    def _make_layout(self, num_extras: int) -> CallLayout:
        count = len(self.positional)
        extra_names = [f'{self.varargs}[{i}]' for i in range(num_extras)]
        if self._exceeds_wrapped(num_extras):
            for positions, selected in (self._static, self._donated, self._batch):
                self._reject_wrapped_names(selected - self._wrapped_names_at(positions), 'an option')
        else:
            extra_names[: len(self.wrapped_names[count:])] = self.wrapped_names[count : count + num_extras]
        names = [*self.positional, *extra_names]
        num_positional = len(names)
        # Negative positions count from the last parameter of the wrapped function, even if the call omits it.
        end = num_positional if self._max_positional is None else max(num_positional, len(self.wrapped_names))
        names += self.keyword_only
        static, donated, batch = [
            [
                i
                for i, name in enumerate(names)
                if name in selected or (i < num_positional and not {i, i - end}.isdisjoint(positions))
            ]
            for positions, selected in (self._static, self._donated, self._batch)
        ]
        if self.static_keywords:
            static.append(len(names))
            names.append('static keywords')
        if self.donated_keywords:
            donated.append(len(names))
            names.append(EXTRA_KEYWORDS)
        if self.keywords:
            names.append(EXTRA_KEYWORDS)
        batch_and_static = sorted(set(self.static_keywords).intersection(self.batch_keywords))
        for description, conflicts in (
            ('donated', [names[slot] for slot in donated if slot in static]),
            ('a batch', [names[slot] for slot in batch if slot in static] + batch_and_static),
        ):
            if conflicts:
                raise ArgumentError(
                    f'{self.name}: {", ".join(conflicts)} cannot be both static and {description}'
                )
        return CallLayout(
            tuple(names),
            tuple([None if name == EXTRA_KEYWORDS else name for name in names]),
            num_positional,
            dynamic=tuple([slot for slot in range(len(names)) if slot not in static]),
            static=tuple(static),
            donated=tuple(donated),
            batch=tuple(batch),
            flat_signature=_flat_signature(names),
        )

    def _exceeds_wrapped(self, num_extras: int) -> bool:
        """Whether a wrapper gets more positional arguments than the function that it wraps takes."""
        total = len(self.positional) + num_extras
        return self.varargs is not None and self._max_positional is not None and total > self._max_positional

    def _reject_wrapped_names(self, names: Iterable[str], option: str) -> None:
        """Raises ArgumentError if some of the names are parameters of the wrapped function only."""
        wrong = [
            n for n in names if n in self.wrapped_names and n not in (*self.positional, *self.keyword_only)
        ]
        if wrong:
            raise ArgumentError(
                f'{self.name}: {option} names {", ".join(map(repr, sorted(wrong)))}, and the wrapper is '
                'called with more positional arguments than the function that it wraps takes: give positions'
            )

    def flatten(self, args: Sequence[Any], keywords: Mapping[str, Any]) -> tuple[Any, ...]:
        """Returns the flat arguments of a call, one for each slot.

        Raises:
            TypeError: the arguments do not match the parameters.
        """
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
        """Returns the arguments and keywords with which to call the function, from flat arguments."""
        rest = list(flat_args)
        keywords: dict[str, Any] = {}
        for has_slot in (self.keywords, self.donated_keywords, self.static_keywords):
            if has_slot:
                keywords.update(rest.pop())
        num_positional = len(rest) - len(self.keyword_only)
        for name, value in zip(self.keyword_only, rest[num_positional:], strict=True):
            if value is not OMITTED:
                keywords[name] = value
        args = rest[:num_positional]
        while args and args[-1] is OMITTED:
            args.pop()
        omitted = [i for i, value in enumerate(args) if value is OMITTED]
        if omitted:
            # The caller omitted a parameter before the last argument, so the later arguments were keywords.
            pairs = zip(self.positional[omitted[0] :], args[omitted[0] :], strict=False)
            keywords.update((name, value) for name, value in pairs if value is not OMITTED)
            args = args[: omitted[0]]
        return args, keywords

    def split_keywords(self, keywords: Mapping[str, Any]) -> list[Any]:
        """Splits the extra keywords into the last slots: static keywords, donated keywords, the rest.

        A function without static or donated keywords has no slots for them.
        """
        rest = dict(keywords)
        slots: list[Any] = []
        if self.static_keywords:
            slots.append(tuple((n, rest.pop(n)) for n in self.static_keywords if n in keywords))
        if self.donated_keywords:
            slots.append({n: rest.pop(n) for n in self.donated_keywords if n in keywords})
        return [*slots, rest]

    def as_user_call(
        self, layout: CallLayout, flat_args: Sequence[Any], num_positional: int, names: Sequence[str]
    ) -> tuple[Sequence[Any], dict[str, Any], dict[str, Any]]:
        """Restores the positional and keyword arguments that the user wrote.

        Args:
            layout: the slots of the call.
            flat_args: the flat arguments of the call.
            num_positional: the number of arguments that the user passed by position.
            names: the names of the arguments that the user passed by keyword.

        Returns:
            The arguments, the keywords, and the options of ``jax.jit`` for static and donated arguments.
        """
        args, keywords = self.restore(flat_args)
        values = {**dict(zip(self.positional, args, strict=False)), **keywords}
        options: dict[str, Any] = {}
        for option, slots, selected_keywords in (
            ('static', layout.static, self.static_keywords),
            ('donate', layout.donated, self.donated_keywords),
        ):
            selected = {*selected_keywords, *[layout.names[slot] for slot in slots]}
            options[f'{option}_argnums'] = [slot for slot in slots if slot < num_positional]
            options[f'{option}_argnames'] = [name for name in names if name in selected]
        return flat_args[:num_positional], {name: values[name] for name in names}, options

    def rules_by_slot(
        self, rules: RuleLike, layout: CallLayout, flat_args: Sequence[Any], option: str, default: str
    ) -> dict[int, RuleLike]:
        """Returns the rules of each dynamic slot, by slot index.

        Args:
            rules: a tuple or list by position, a dict by argument name, or one rule for all arguments.
            layout: the slots of the call.
            flat_args: the flat arguments of the call.
            option: the name of the option, for messages.
            default: what to write for arguments without a sharding, for messages.

        Raises:
            StructureError: the rules do not match the arguments.
        """
        kind: Any = type(rules)
        if kind is not tuple and is_rule(rules):
            return dict.fromkeys(layout.dynamic, rules)
        by_slot: dict[int, RuleLike] = dict.fromkeys(layout.dynamic)
        if isinstance(rules, Mapping):
            self.reject_unknown_names(rules, option)
            if self._exceeds_wrapped(len(flat_args) - self.num_fixed_slots):
                self._reject_wrapped_names(rules, option)
            for i in layout.dynamic:
                name = layout.names[i]
                if name == EXTRA_KEYWORDS:
                    by_slot[i] = {key: rules.get(key) for key in flat_args[i]} or None
                elif len(self.positional) <= i < layout.num_positional:
                    by_slot[i] = rules.get(name, rules.get(self.varargs or ''))
                else:
                    by_slot[i] = rules.get(name)
            return by_slot
        if not isinstance(rules, tuple | list):
            raise StructureError(
                f'{option} of {self.name} is {type(rules).__name__}: give a tuple by position, a dict by '
                'argument name, or one rule for every argument'
            )
        positional = [i for i in layout.dynamic if i < layout.num_positional]
        passed = [i for i in positional if flat_args[i] is not OMITTED]
        if len(rules) > len(positional) or (passed and len(rules) <= positional.index(passed[-1])):
            names = ', '.join(layout.names[i] for i in positional) or 'none'
            takes = f'{"this call has" if self.varargs else "the function takes"} '
            takes += plural(len(positional), 'positional argument')
            takes += ' besides static ones' if layout.static else ''
            raise StructureError(
                f'{option} of {self.name} has {plural(len(rules), "entry", "entries")}, but {takes} '
                f'({names}): give one entry each ({default}), or a dict by argument name'
            )
        return by_slot | dict(zip(positional, rules, strict=False))

    def reject_unknown_names(self, rules: RuleLike, option: str) -> None:
        """Raises StructureError if a dict of rules names an argument that the function does not have."""
        if not isinstance(rules, Mapping) or is_rule(rules):
            return
        layout = self.layout(0)
        static = {layout.names[slot] for slot in layout.static}
        for name in rules:
            if name in static or name in self.static_keywords:
                raise StructureError(f'{option} of {self.name}: {name!r} is static, it has no sharding')
            if name != self.varargs and (hint := self._unknown_name_hint(name)):
                raise StructureError(f'{option} of {self.name}: there is no argument {name!r} ({hint})')


def name_of(fun: Callable[..., Any]) -> str:
    """Returns the name of a function in messages and profiles. A ``functools.partial`` has its function's."""
    while isinstance(fun, functools.partial) and not hasattr(fun, '__name__'):
        fun = fun.func
    return str(getattr(fun, '__name__', type(fun).__name__))


def _flat_signature(slot_names: Iterable[str]) -> inspect.Signature:
    """Returns the signature of a function of slots with these names, made unique and valid in Python."""
    names = dict[str, None]()
    for slot_name in slot_names:
        name = re.sub(r'\W+', '_', slot_name).strip('_') or 'kwargs'
        while name in names or not name.isidentifier() or keyword.iskeyword(name):
            name += '_'
        names[name] = None
    kind = inspect.Parameter.POSITIONAL_ONLY
    return inspect.Signature([inspect.Parameter(name, kind) for name in names])


def _parameters(fun: Callable[..., Any]) -> list[inspect.Parameter]:
    """Returns the parameters of *fun* itself, not of a function that it wraps."""
    try:
        return list(inspect.signature(fun, follow_wrapped=False).parameters.values())
    except (ValueError, TypeError):  # some built-ins have no signature
        return list(inspect.signature(lambda *args, **kwargs: None).parameters.values())


def _wrapped_parameters(fun: Callable[..., Any]) -> list[inspect.Parameter]:
    """Returns the parameters of the function that *fun* wraps, whose names users know."""
    try:
        return list(inspect.signature(fun).parameters.values())
    except (ValueError, TypeError):
        return []


def _sequence(value: Any, kind: Any) -> tuple[Any, ...]:
    return () if value is None else (value,) if isinstance(value, kind) else tuple(value)

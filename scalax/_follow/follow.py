"""The batch is followed through a jaxpr, and values that hold its rows are constrained to stay where they are."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from scalax._follow.primitives import PINNED, RULES, size_of
from scalax._follow.trail import LOST, Trail, merged, possible

_BODIES = {
    **dict.fromkeys(('jit', 'pjit', 'remat', 'remat2', 'checkpoint'), 'jaxpr'),
    **dict.fromkeys(('closed_call', 'core_call', 'custom_jvp_call', 'custom_vjp_call'), 'call_jaxpr'),
}
_ROUNDS = 8


@dataclasses.dataclass
class Body:
    """A jaxpr with constraints."""

    jaxpr: Any
    trails: tuple[Trail, ...]


class Follower:
    def __init__(self, mesh: Mesh) -> None:
        self._mesh, self._sizes = mesh, dict(mesh.shape)
        self._known: dict[Any, tuple[Any, Body]] = {}
        self.pins = 0
        self.lost: dict[str, int] = {}

    def body(self, jaxpr: Any, trails: Sequence[Trail], pinned: bool = False) -> Body:
        """The body with constraints; *pinned*: also of its arguments and results (of loops)."""
        key = id(jaxpr), tuple(trails), pinned
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = jaxpr, self._edited(jaxpr, trails, pinned)
        return known[1]

    def _edited(self, closed: Any, trails: Sequence[Trail], pinned: bool) -> Body:
        jaxpr = closed.jaxpr
        env: dict[Any, Trail] = {v: t for v, t in zip(jaxpr.invars, trails, strict=True) if t}
        if not env:
            return Body(closed, (LOST,) * len(jaxpr.outvars))
        renamed: dict[Any, Any] = {}
        equations: list[Any] = []
        spoken = {id(e.invars[0]) for e in jaxpr.eqns if e.primitive.name == 'sharding_constraint'}

        def read(atom: Any) -> Trail:
            return LOST if isinstance(atom, Literal) else env.get(atom, LOST)

        def pin(var: Any, source: Any) -> None:
            if id(var) in spoken:
                return
            self.pins += 1
            new = renamed[var] = Var(var.aval)
            equations.append(self._constraint(var, new, env[var], source))

        if pinned:
            for var in jaxpr.invars:
                if var in env:
                    pin(var, jaxpr.eqns[0])
        cheap: set[Any] = set()
        fixed: set[Any] = set()
        for eqn in jaxpr.eqns:
            operands = [read(atom) for atom in eqn.invars]
            renames = [a if isinstance(a, Literal) else renamed.get(a, a) for a in eqn.invars]
            name = eqn.primitive.name
            if not any(operands):
                equations.append(eqn.replace(invars=renames) if renamed else eqn)
                if name in ('iota', 'broadcast_in_dim') or all(
                    isinstance(a, Literal) or a in cheap for a in eqn.invars
                ):
                    cheap.update(eqn.outvars)
                if name not in ('scan', 'while'):
                    continue
            params, results = self._equation(eqn, operands)
            results = [
                possible(trail, getattr(var.aval, 'shape', ()), self._sizes)
                for var, trail in zip(eqn.outvars, results, strict=True)
            ]
            if not any(operands):
                continue
            equations.append(eqn.replace(invars=renames, params=params))
            if not any(results) and any(len(getattr(v.aval, 'shape', ())) for v in eqn.outvars):
                label = name
                self.lost[label] = max(self.lost.get(label, 0), max(map(size_of, eqn.outvars)))
            mixes = name in ('scan', 'while', 'cond') or (name in PINNED and not all(operands))
            if not mixes and len(eqn.invars) > 1 and name in RULES:
                mixes = any(
                    not trail
                    and not isinstance(atom, Literal)
                    and atom not in cheap
                    and len(getattr(atom.aval, 'shape', ())) == len(getattr(eqn.outvars[0].aval, 'shape', ()))
                    for atom, trail in zip(eqn.invars, operands, strict=True)
                )
            for var, trail in zip(eqn.outvars, results, strict=True):
                if trail:
                    env[var] = trail
                    if mixes and not type(var).__name__ == 'DropVar':
                        pin(var, eqn)
                        fixed.add(var)
        outs = list(jaxpr.outvars)
        if pinned:
            for atom in outs:
                if read(atom) and atom not in renamed and not isinstance(atom, Literal):
                    pin(atom, jaxpr.eqns[-1])
        new = jaxpr.replace(
            eqns=equations,
            outvars=[a if isinstance(a, Literal) else renamed.get(a, a) for a in outs],
        )
        return Body(_with_jaxpr(closed, new), tuple(map(read, outs)))

    def _equation(self, eqn: Any, operands: Sequence[Trail]) -> tuple[dict[str, Any], Sequence[Trail]]:
        name, params = eqn.primitive.name, eqn.params
        nothing = (LOST,) * len(eqn.outvars)
        if name in RULES:
            return params, RULES[name](eqn, operands)
        if name in _BODIES:
            inner = params[_BODIES[name]]
            closed = inner if hasattr(inner, 'jaxpr') else _Open(inner)
            if len(closed.jaxpr.invars) != len(operands):
                return params, nothing
            body = self.body(closed, operands)
            return {**params, _BODIES[name]: _unwrapped(inner, body.jaxpr)}, body.trails
        if name == 'scan':
            return self._scan(eqn, operands)
        if name == 'while':
            return self._while(eqn, operands)
        if name == 'cond':
            branches = [self.body(branch, operands[1:]) for branch in params['branches']]
            results = [
                merged(trails, len(getattr(out.aval, 'shape', ())))
                for out, *trails in zip(eqn.outvars, *(b.trails for b in branches), strict=True)
            ]
            return {**params, 'branches': tuple(b.jaxpr for b in branches)}, results
        return params, nothing

    def _scan(self, eqn: Any, operands: Sequence[Trail]) -> tuple[dict[str, Any], Sequence[Trail]]:
        closed = eqn.params['jaxpr']
        inner = closed.jaxpr
        carried = sum(1 for _ in itertools.takewhile(lambda p: _ranks_equal(*p), zip(eqn.outvars, inner.outvars, strict=True)))
        stacked = sum(1 for _ in itertools.takewhile(lambda p: not _ranks_equal(*p), zip(eqn.invars[::-1], inner.invars[::-1], strict=True)))
        constants = len(inner.invars) - carried - stacked
        fixed = list(operands[:constants])
        rows = [trail[1:] if any(trail[1:]) else LOST for trail in operands[constants + carried :]]
        state = list(operands[constants : constants + carried])

        def run(state: Sequence[Trail], pinned: bool = False) -> Body:
            return self.body(closed, [*fixed, *state, *rows], pinned)

        state = self._settled(state, [v.aval for v in inner.outvars[:carried]], lambda s: run(s).trails[:carried])
        body = run(state, True)
        results = [*body.trails[:carried], *(((), *t) if t else LOST for t in body.trails[carried:])]
        return {**eqn.params, 'jaxpr': body.jaxpr}, results

    def _settled(self, state: list[Trail], avals: Sequence[Any], step: Callable[[list[Trail]], Sequence[Trail]]) -> list[Trail]:
        """The trails of what a loop carries: those of the first round, and those that a round returns."""
        for _ in range(_ROUNDS):
            grown = [
                possible(merged([mine, theirs], len(aval.shape)), aval.shape, self._sizes) if hasattr(aval, 'shape') else LOST
                for mine, theirs, aval in zip(state, step(state), avals, strict=True)
            ]
            if grown == state:
                break
            state = grown
        for _ in range(_ROUNDS):
            kept = [_both(mine, theirs) for mine, theirs in zip(state, step(state), strict=True)]
            if kept == state:
                break
            state = kept
        return state

    def _while(self, eqn: Any, operands: Sequence[Trail]) -> tuple[dict[str, Any], Sequence[Trail]]:
        params = eqn.params
        test, body = params['cond_nconsts'], params['body_nconsts']
        closed = params['body_jaxpr']
        fixed = list(operands[test : test + body])
        state = self._settled(
            list(operands[test + body :]),
            [v.aval for v in closed.jaxpr.outvars],
            lambda s: self.body(closed, [*fixed, *s]).trails,
        )
        found = self.body(closed, [*fixed, *state], True)
        return {**params, 'body_jaxpr': found.jaxpr}, found.trails

    def _constraint(self, var: Any, new: Any, trail: Trail, source: Any) -> Any:
        spec = PartitionSpec(
            *(PartitionSpec.UNCONSTRAINED if not axes else axes[0] if len(axes) == 1 else axes for axes in trail)
        )
        template = _template(NamedSharding(self._mesh, spec), jax.sharding.get_abstract_mesh())
        return template.replace(invars=[var], outvars=[new], source_info=source.source_info)


@functools.lru_cache(maxsize=1024)
def _template(sharding: Any, mesh: Any) -> Any:
    shape = []
    for entry in sharding.spec:
        names = entry if isinstance(entry, tuple) else (entry,) if isinstance(entry, str) else ()
        shape.append(math.prod(sharding.mesh.shape[n] for n in names))
    [eqn] = (
        jax.jit(lambda x: jax.lax.with_sharding_constraint(x, sharding))
        .trace(jax.ShapeDtypeStruct(tuple(shape), 'float32'))
        .jaxpr.eqns
    )
    return eqn


def _ranks_equal(a: Any, b: Any) -> bool:
    return len(getattr(a.aval, 'shape', ())) == len(getattr(b.aval, 'shape', ()))


def _both(mine: Trail, theirs: Trail) -> Trail:
    kept = tuple(a if a == b else () for a, b in zip(mine, theirs, strict=False)) if theirs else ()
    return kept if any(kept) else LOST


class _Open:
    """A jaxpr without constants, in the form of a closed one."""

    def __init__(self, jaxpr: Any) -> None:
        self.jaxpr = jaxpr


def _with_jaxpr(closed: Any, new: Any) -> Any:
    if isinstance(closed, _Open):
        return _Open(new)
    if isinstance(closed, Jaxpr):
        return new
    return ClosedJaxpr(new, closed.consts)


def _unwrapped(inner: Any, edited: Any) -> Any:
    return edited.jaxpr if isinstance(edited, _Open) else edited


def followed(fun: Callable[..., Any], mesh: Mesh, trails_of: Callable[[Sequence[Any]], Sequence[Trail]]) -> Callable[..., Any]:
    """A function of which values that hold rows of the batch stay where they are."""

    def call(*args: Any) -> Any:
        leaves = jax.tree.leaves(args)
        inner = jax.jit(fun)
        outer = jax.jit(lambda *a: inner(*a)).trace(*args)
        [eqn] = outer.jaxpr.eqns
        follower = Follower(mesh)
        body = follower.body(eqn.params['jaxpr'], trails_of(args))
        call.follower = follower
        order = {v: leaf for v, leaf in zip(outer.jaxpr.jaxpr.invars, leaves, strict=True)}
        outs = eqn.primitive.bind(*[order[v] for v in eqn.invars], **{**eqn.params, 'jaxpr': body.jaxpr})
        by_var = dict(zip(eqn.outvars, outs, strict=True))
        flat = [by_var.get(v, order.get(v)) if not isinstance(v, Literal) else v.val for v in outer.jaxpr.jaxpr.outvars]
        return jax.tree.unflatten(jax.tree.structure(outer.out_info), flat)

    return call

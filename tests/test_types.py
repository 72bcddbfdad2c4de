"""What type checkers know: a user's program passes ``mypy --strict``, and wrong ones do not.

JAX itself has types that change; the newest is what the library is checked with.
"""

import importlib.util
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import jax
import pytest

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec('mypy') is None, reason='mypy is not installed'),
    pytest.mark.skipif(jax.__version_info__ < (0, 12), reason='types are checked with the newest JAX'),
]

ROOT = Path(__file__).resolve().parent.parent

COMMON = """\
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from scalax.sharding import (
    FSDPShardingRule,
    MeshShardingHelper,
    PartitionSpec,
    TreePathShardingRule,
    with_sharding_constraint,
)


class Batch(NamedTuple):
    tokens: jax.Array
    targets: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    params: dict[str, jax.Array]
    step: jax.Array


helper = MeshShardingHelper([-1, 2], ['fsdp', 'tp'], on_indivisible='replicate')
rules = TreePathShardingRule(('kernel', PartitionSpec('fsdp', 'tp')), strict=False) | FSDPShardingRule()


def init() -> State:
    return State({'kernel': jnp.zeros((64, 64))}, jnp.zeros((), jnp.int32))


def train_step(state: State, batch: Batch, rate: float = 0.1) -> tuple[State, jax.Array]:
    hidden = with_sharding_constraint(batch.tokens @ state.params['kernel'], PartitionSpec('fsdp'))
    loss = ((hidden - batch.targets) ** 2).mean()
    return State({name: x - rate for name, x in state.params.items()}, state.step + 1), loss


step = helper.sjit(train_step, in_shardings=(rules, PartitionSpec('fsdp')), donate_argnums=0)
"""

PROGRAM = """
import functools
import tempfile
from collections.abc import Iterator

from scalax import microbatch
from scalax.axes import named_jit
from scalax.checkpoint import Checkpointer
from scalax.custom_op import FactorContext, sharded_op
from scalax.sharding import Prefetch, SjitFunction


@helper.sjit
def evaluate(state: State, batch: Batch) -> jax.Array:
    return train_step(state, batch)[1]


@helper.sjit(
    in_shardings={'state': rules, 'batch': PartitionSpec('fsdp')},
    out_shardings=(rules, PartitionSpec()),
    static_argnames='rate',
    on_mismatch='reshard',
    annotation_shardings={'hidden': PartitionSpec('fsdp')},
    compiler_options={'xla_embed_ir_in_executable': True},
)
def other_step(state: State, batch: Batch, rate: float = 0.1) -> tuple[State, jax.Array]:
    return train_step(state, batch, rate)


class Model:
    @helper.sjit(static_argnums=0)
    def apply(self, x: jax.Array, *, scale: float = 1.0) -> jax.Array:
        return x * scale


@helper.shard_map(in_specs=PartitionSpec('fsdp'), out_specs=PartitionSpec('fsdp'))
def normalized(x: jax.Array) -> jax.Array:
    total: jax.Array = jax.lax.psum(x.sum(), 'fsdp')
    return x / total


@helper.explicit_axes(in_sharding=PartitionSpec('fsdp'))
def typed(x: jax.Array) -> jax.Array:
    return x


@helper.auto_axes
def untyped(x: jax.Array) -> jax.Array:
    return x


@named_jit(axis_resources={'batch': 'fsdp'}, mesh=helper, keep_unused=True)
def named(x: jax.Array, scale: int = 2) -> jax.Array:
    return x * scale


@sharded_op('b c -> b', reduction_factors=('c',))
def sums(ctx: FactorContext, x: jax.Array) -> jax.Array:
    total: jax.Array = ctx.psum(x.sum(axis=-1), 'c')
    return total


@dataclass
class Trainer:
    step: SjitFunction[[State, Batch], jax.Array]


def batches() -> Iterator[Batch]:
    for _ in range(2):
        yield Batch(jnp.zeros((8, 64)), jnp.zeros((8, 64)))


def train(directory: str) -> float:
    state = helper.sjit(init, out_shardings=rules)()
    with Checkpointer(directory, keep=2) as checkpointer:
        if checkpointer.latest_step() is not None:
            state = checkpointer.restore(helper, rules, like=init)
            state = checkpointer.restore(helper, rules, like=state)
        with helper.prefetch(batches(), 0, 'fsdp', rows='needed') as loader:
            for number, batch in enumerate(loader):
                state, loss = step(state, batch)
                state, loss = other_step(state, batch, rate=0.2)
                checkpointer.save(number, state)
    first: Prefetch = helper.prefetch(batches(), 0, 'fsdp')
    compiled: SjitFunction[[State, Batch], jax.Array] = evaluate
    lowered = compiled.lower(state, batch).compile()
    assert lowered is not None
    loss += evaluate(state, next(first)) + Trainer(evaluate).step(state, batch)
    loss += Model().apply(batch.tokens, scale=2.0).sum()
    loss += untyped(batch.tokens, out_sharding=PartitionSpec('fsdp')).sum()
    loss += typed(normalized(batch.tokens)).sum() + named(batch.tokens, 3).sum() + sums(batch.tokens).sum()
    grads = microbatch(jax.grad(lambda w: (w**2).sum()), 2, batch=0)(batch.tokens)
    loss += grads.sum()
    return float(loss)


placed = helper.shard(init(), rules)
print(train(tempfile.mkdtemp()), placed.step, helper.gather(placed).params['kernel'].shape)
print(helper.explain(placed, rules), helper.plan(step, placed, next(batches()), quick=True))
print(helper.abstract(init(), rules), helper.visualize(placed))
mesh_only = functools.partial(helper.shard, rules=None)
"""

WRONG = {
    'argument': ('step(init(), jnp.zeros(3))', 'arg-type'),
    'result': ('state: State = step(init(), Batch(jnp.ones(3), jnp.ones(3)))', 'assignment'),
    'option': ('helper.sjit(train_step, in_sharding=rules)', 'call-overload'),
    'literal': ("helper.sjit(train_step, on_mismatch='move')", 'call-overload'),
    'rule': ("helper.abstract(init(), 'fsdp')", 'arg-type'),
}


@pytest.fixture(scope='module')
def messages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What mypy says of each program, by its name."""
    folder = tmp_path_factory.mktemp('types')
    (folder / 'program.py').write_text(COMMON + PROGRAM, encoding='utf-8')
    for name, (statement, _) in WRONG.items():
        (folder / f'{name}.py').write_text(f'{COMMON}\n\n{statement}\n', encoding='utf-8')
    # PartitionSpec and the collectives of JAX have no types.
    command = [
        sys.executable,
        '-m',
        'mypy',
        '--strict',
        '--untyped-calls-exclude=jax',
        '--cache-dir=cache',
        '.',
    ]
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, 'PYTHONPATH': str(ROOT), 'MYPY_FORCE_COLOR': '0'},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found: dict[str, list[str]] = {name: [] for name in ['program', *WRONG]}
    for name, line, text in re.findall(r'^(\w+)\.py:(\d+): error: (.*)$', done.stdout, re.MULTILINE):
        found[name].append(f'{line}: {text}')
    return found


def test_a_program_of_a_user_passes(messages: dict[str, list[str]]) -> None:
    assert messages['program'] == []


def test_the_program_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / 'program.py').write_text(COMMON + PROGRAM, encoding='utf-8')
    runpy.run_path(str(tmp_path / 'program.py'), run_name='program')
    assert 'train_step on 8 cpu devices' in capsys.readouterr().out


@pytest.mark.parametrize('name', WRONG)
def test_a_wrong_program_is_refused(messages: dict[str, list[str]], name: str) -> None:
    _, code = WRONG[name]
    line = len(COMMON.splitlines()) + 3
    assert {re.sub(r': .* ', ': ', text) for text in messages[name]} == {f'{line}: [{code}]'}, messages[name]

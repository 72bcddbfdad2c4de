"""Type errors: mypy reports an unused comment for each line where it does not find the expected error."""

import jax.numpy as jnp

from scalax import microbatch
from scalax.axes import fsdp
from tests.typed.program import (
    Batch,
    Model,
    State,
    Trainer,
    by_call,
    evaluate,
    helper,
    init,
    rules,
    step,
    stored,
    train_step,
)

step(init(), jnp.zeros(3))  # type: ignore[arg-type]
state: State = step(init(), Batch(jnp.ones(3), jnp.ones(3)))  # type: ignore[assignment]
helper.sjit(train_step, in_sharding=rules)  # type: ignore[call-overload]
helper.sjit(train_step, on_mismatch='move')  # type: ignore[call-overload]
step(init(), next(helper.prefetch([init()])))  # type: ignore[arg-type]
Model().apply(jnp.ones(3), scale='2')  # type: ignore[arg-type]
stored('x')  # type: ignore[arg-type]
by_call(init())  # type: ignore[call-arg]
fsdp(train_step, rules, {}, donate_argnums=0)  # type: ignore[call-overload]
Model().apply()  # type: ignore[call-arg]
Trainer(evaluate).step(init())  # type: ignore[call-arg]
microbatch(lambda state, batch: evaluate(state, batch), 2)(init())  # type: ignore[call-arg]
helper.abstract(init(), 'fsdp')  # type: ignore[arg-type]

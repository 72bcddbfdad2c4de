"""What several processes check of a program that one of them has saved."""

import os
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from scalax.plan import load_executable
from scalax.sharding import MeshShardingHelper
from scalax.sharding import PartitionSpec as P


def check_a_saved_program() -> None:
    helper = MeshShardingHelper([4, 2], ['fsdp', 'tp'])
    rules = P('fsdp', 'tp'), P('fsdp')
    step = helper.sjit(
        lambda w, x: (x @ w, x.sum()), in_shardings=rules, out_shardings=(P('fsdp', 'tp'), P())
    )
    struct = jax.ShapeDtypeStruct((16, 16), 'float32')
    path = Path(os.environ['SCALAX_TEST_FOLDER']) / 'step.bin'
    plan = helper.plan(step, struct, struct)
    if jax.process_index() == 0:
        plan.save_executable(path)
    multihost_utils.sync_global_devices('saved')
    values = np.random.default_rng(0).standard_normal((2, 16, 16), 'float32')
    w, x = helper.shard(tuple(values), rules)
    product, total = load_executable(path, helper)(w, x)
    expected = step(w, x)
    assert product.sharding.spec == P('fsdp', 'tp') and float(total) == float(expected[1])
    for shard, same in zip(product.addressable_shards, expected[0].addressable_shards, strict=True):
        np.testing.assert_array_equal(shard.data, same.data)

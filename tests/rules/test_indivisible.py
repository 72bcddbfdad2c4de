"""The policies for dimensions that are not divisible, applied to specs."""

import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from scalax._core.pytree.partition_specs import MeshAxes
from scalax.errors import RuleError
from scalax.rules._indivisible import apply_policy, checked_policy

AXES = MeshAxes({'a': 2, 'b': 4}, {'a': AxisType.Auto, 'b': AxisType.Explicit})


@pytest.mark.parametrize('policy', ['error', 'replicate', 'warn'])
def test_policies(policy):
    assert checked_policy(policy) == policy


@pytest.mark.parametrize('policy', ['ignore', '', None, True])
def test_unknown_policies(policy):
    with pytest.raises(RuleError) as error:
        checked_policy(policy)
    assert str(error.value) == f"on_indivisible is 'error', 'replicate' or 'warn', got {policy!r}"


UNEVEN = 'dimension 0 of size 5 is not divisible by 2 (a=2)'


@pytest.mark.parametrize(
    ('spec', 'policies', 'pads', 'expected', 'faults', 'warned'),
    [
        (P('a', 'b'), ['error'], False, P('a', 'b'), 1, []),
        (P('a', 'b'), ['warn', 'error'], False, P('a', 'b'), 1, []),
        (P('a', 'b'), ['replicate'], False, P(None, 'b'), 0, []),
        (P('a', 'b'), ['replicate', 'warn'], True, P(None, 'b'), 0, [f'; {P(None, "b")} is used']),
        (
            P('a', 'b'),
            ['error'],
            True,
            P('a', 'b'),
            0,
            ['; XLA pads it, and computes some operations wrong there (jnp.nonzero)'],
        ),
        (P(('a', 'b')), ['error'], True, P(('a', 'b')), 1, []),  # Explicit: part of the type
        (P(None, 'a'), ['error'], False, P(None, 'a'), 0, []),
    ],
)
def test_the_strictest_policy_decides(spec, policies, pads, expected, faults, warned):
    result, wrong, warnings = apply_policy(spec, (5, 8), AXES, policies, 'a rule', pads)
    assert result == expected and len(wrong) == faults
    assert warnings == [f'{spec} from a rule: {UNEVEN}{end}' for end in warned]

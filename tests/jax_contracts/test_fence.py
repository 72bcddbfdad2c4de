"""Tests that only `scalax/_jax` depends on undocumented behavior of JAX, by patterns in the source."""

import ast
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import ROOT

PACKAGE = ROOT / 'scalax'
ROOM = sorted((PACKAGE / '_jax').glob('*.py'))
TREES = {
    path: ast.parse(path.read_text(encoding='utf-8'))
    for path in sorted(PACKAGE.rglob('*.py'))
    if path.parent.name != '_jax'
}

# Undocumented attributes of JAX objects (`OBSERVED`), and attributes that only some objects have.
OBSERVED = {
    *('arg_names', 'constvars', 'debug_info', 'manual_axis_type', 'params', 'source_info'),
    *('block_mappings', 'grid_mapping', 'index_map_jaxpr', 'scratch_avals', 'vmapped_dims'),
}
ASKED_FOR = OBSERVED | {
    'coords',
    'core_on_chip',
    'memory_space',
    'partitions',
    'slice_index',
    'unreduced_kind',
}
# Fields of equations and jaxprs that `replace` may change.
CHANGED = {'consts', 'constvars', 'eqns', 'invars', 'jaxpr', 'outvars', 'params', 'source_info'}


def called(node: Any) -> str:
    """Returns the name of the function that a call calls: 'Var', 'jax.typeof', '.replace'."""
    if not isinstance(node, ast.Call):
        return ''
    text = ast.unparse(node.func)
    return (
        text if text.startswith('jax.') or isinstance(node.func, ast.Name) else f'.{text.rpartition(".")[2]}'
    )


def imports_of_jax_extend(tree: ast.Module) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [f'{node.module}.{alias.name}' for alias in node.names]
        if any(name.startswith('jax.extend') for name in names):
            yield node
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith('jax.extend'):
            yield node


def observed_attributes(tree: ast.Module) -> Iterator[ast.AST]:
    node: Any
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in OBSERVED and ast.unparse(node.value) != 'self':
            yield node
        if called(node) in ('getattr', 'hasattr') and ast.unparse(node.args[1]).strip("'") in ASKED_FOR:
            yield node


def changes_of_equations(tree: ast.Module) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            changes = {keyword.arg for keyword in node.keywords} & CHANGED
            ours = ast.unparse(node.func) == 'dataclasses.replace'
            if called(node) in ('Var', 'jax.core.Var') or (
                called(node) == '.replace' and changes and not ours
            ):
                yield node


def probes_by_exception(tree: ast.Module) -> Iterator[ast.AST]:
    """Yields each `try` with a call of JAX and a handler that does not raise."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Try):
            calls = [called(inner) for statement in node.body for inner in ast.walk(statement)]
            asks = any(re.match(r'jax\.(?!tree|dtypes)', call) for call in calls)
            quiet = [
                handler
                for handler in node.handlers
                if not any(isinstance(inner, ast.Raise) for inner in ast.walk(handler))
            ]
            if asks and quiet:
                yield node


def texts_of_errors(tree: ast.Module) -> Iterator[ast.AST]:
    """Yields each search for a text in the message of an exception."""
    caught = {node.name for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler)} | {'error'}
    for node in ast.walk(tree):
        texts: list[ast.expr] = []
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
            texts = node.comparators
        elif isinstance(node, ast.Call) and called(node) in ('.search', '.match', '.fullmatch', '.findall'):
            texts = node.args
        if any(ast.unparse(text) in {f'str({name})' for name in caught} for text in texts):
            yield node


def versions_of_jax(tree: ast.Module) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == '__version_info__':
            yield node
        if isinstance(node, ast.Compare) and 'jax.__version__' in ast.unparse(node):
            yield node


PATTERNS: dict[Callable[[ast.Module], Iterator[ast.AST]], str] = {
    imports_of_jax_extend: 'jax.extend is imported',
    observed_attributes: 'an attribute is read that no page of JAX promises',
    changes_of_equations: 'an equation or a jaxpr is made or changed',
    probes_by_exception: 'JAX is asked a question by its error',
    texts_of_errors: 'the text of an error decides',
    versions_of_jax: 'the version of JAX decides',
}


@pytest.mark.medium
@pytest.mark.parametrize('pattern', PATTERNS, ids=lambda pattern: pattern.__name__)
def test_only_scalax_jax_relies_on_undocumented_jax(
    pattern: Callable[[ast.Module], Iterator[ast.AST]],
) -> None:
    wrong = [
        f'{path.relative_to(ROOT)}:{node.lineno}: {PATTERNS[pattern]}, which belongs into scalax/_jax: '
        f'{ast.unparse(node).splitlines()[0]}'
        for path, tree in TREES.items()
        for node in pattern(tree)
        if isinstance(node, ast.stmt | ast.expr)
    ]
    assert not wrong, '\n'.join(wrong)


SEEN = {
    imports_of_jax_extend: [
        'from jax.extend.core import Var',
        'import jax.extend.core',
        'from jax import extend',
        'jax.extend.core.Primitive',
    ],
    observed_attributes: [
        "equation.params['jaxpr']",
        'equation.source_info.name_stack',
        "getattr(device, 'coords', None)",
        "hasattr(spec, 'partitions')",
    ],
    changes_of_equations: ['Var(aval)', 'equation.replace(invars=[x])', 'jaxpr.replace(consts=consts)'],
    probes_by_exception: [
        'try:\n    jax.sharding.get_mesh()\nexcept ValueError:\n    traced = True',
        'try:\n    found = jax.devices()\nexcept RuntimeError:\n    found = []',
    ],
    texts_of_errors: [
        "'divisible' in str(error)",
        'try:\n    f()\nexcept ValueError as fault:\n    found = PATTERN.search(str(fault))',
    ],
    versions_of_jax: ["jax.__version__ < '0.11'", 'jax.__version_info__ < (0, 11)'],
}
NOT_SEEN = {
    imports_of_jax_extend: ['import jax', 'from scalax._jax.equations import Literal'],
    observed_attributes: ['self.params', "getattr(fun, '__name__', '')", 'kernels.grid(equation)'],
    changes_of_equations: ["text.replace('a', 'b')", 'dataclasses.replace(found, jaxpr=jaxpr)'],
    probes_by_exception: [
        'try:\n    jax.jit(f)(x)\nexcept ValueError as error:\n    raise Explained from error',
        'try:\n    f()\nexcept TypeError:\n    x = None',
    ],
    texts_of_errors: ["'a' in text", "f'{error}'"],
    versions_of_jax: ["f'JAX {jax.__version__}'"],
}


@pytest.mark.parametrize('pattern', PATTERNS, ids=lambda pattern: pattern.__name__)
def test_patterns_match_their_examples(pattern: Callable[[ast.Module], Iterator[ast.AST]]) -> None:
    for source in SEEN[pattern]:
        assert list(pattern(ast.parse(source))), source
    for source in NOT_SEEN[pattern]:
        assert not list(pattern(ast.parse(source))), source


# --- Each function has a contract ----------------------------------------------------------------

TESTS = '\n'.join(
    path.read_text(encoding='utf-8')
    for path in (ROOT / 'tests' / 'jax_contracts').glob('test_*.py')
    if path.name != 'test_fence.py'
)


def asked(path: Path) -> dict[str, str]:
    """Returns the docstrings of the public functions of a file by name, also of assigned functions."""
    body = ast.parse(path.read_text(encoding='utf-8')).body
    docstrings = {}
    for node, after in itertools.pairwise([*body, None]):
        if isinstance(node, ast.FunctionDef):
            docstrings[node.name] = ast.get_docstring(node) or ''
        elif isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(after, ast.Expr):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            docstrings[ast.unparse(target)] = ast.unparse(after)
    return {name: text for name, text in docstrings.items() if not name.startswith('_') and name.islower()}


@pytest.mark.parametrize('path', ROOM, ids=lambda path: path.stem)
def test_each_function_has_a_contract(path: Path) -> None:
    assert [name for name in asked(path) if not re.search(rf'\b{name}\b', TESTS)] == []


@pytest.mark.parametrize('path', ROOM, ids=lambda path: path.stem)
def test_each_docstring_names_the_behavior_that_the_function_relies_on(path: Path) -> None:
    of_all = ast.get_docstring(ast.parse(path.read_text(encoding='utf-8'))) or ''
    if 'relies on' not in of_all:
        assert [name for name, text in asked(path).items() if 'Relies on' not in text] == []

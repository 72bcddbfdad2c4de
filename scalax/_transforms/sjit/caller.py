"""What do users call? A function generated with the parameters of their own.

Python then binds positions, keywords and defaults in C. A wrapper with ``*args, **kwargs`` costs
150-190 ns a call for the same, this one 15-85 ns.
"""

from __future__ import annotations

import inspect
import keyword
import linecache
import zlib
from types import CodeType, FunctionType
from typing import Any

from scalax._transforms.calls.call_signature import OMITTED, CallSignature

_OWN = ('fast_call', 'dispatcher', 'omitted', 'split', 'error', 'Exception')
_SOURCE = """\
def {name}({parameters}):
    {fast_call} = {dispatcher}.fast_call
    if {fast_call} is not None:
        try:
            return {fast_call}({flat_args})
        except {Exception} as {error}:
            if not {dispatcher}.explain_or_retry({error}, {fast_call}, ({tuple})):
                raise
    return {dispatcher}.dispatch(({tuple}))
"""


def generate_caller(signature: CallSignature, dispatcher: Any) -> FunctionType:
    """Builds the function that users call.

    The program is read once, because another thread may replace it between the call and the look at the
    error.

    Args:
        signature: how the user's function is called.
        dispatcher: has ``fast_call``, the program that calls try first, None before the first call;
            ``explain_or_retry(error, fast_call, flat_args)``, whether an error means that another program is
            needed; and ``dispatch(flat_args)``, which finds or makes it.
    """
    # Named in the source: Python calls a function faster whose code was never replaced.
    name = signature.name
    if not name.isidentifier() or keyword.iskeyword(name):
        name = 'sjit_function'
    own = _free_names({name, *(parameter.name for parameter in signature.parameters)})
    flat_args = _flat_args(signature, own['split'])
    source = _SOURCE.format(
        name=name,
        parameters=', '.join(_declarations(signature, own['omitted'])),
        flat_args=flat_args,
        tuple=f'{flat_args},' if flat_args else '',
        **own,
    )
    namespace: dict[str, Any] = {
        '__name__': __name__,
        own['dispatcher']: dispatcher,
        own['omitted']: OMITTED,
        own['split']: signature.split_keywords,
        own['Exception']: Exception,  # which may be the name of a parameter
    }
    exec(_compiled(source, name), namespace)
    # Without itself among its globals it is no reference cycle, and goes with the last reference to it.
    return namespace.pop(name)


def _free_names(taken: set[str]) -> dict[str, str]:
    """Names for what the generated function needs, none of which the user's function has."""
    prefix = '_scalax_'
    while any(name.startswith(prefix) for name in taken):
        prefix += '_'
    return {own: f'{prefix}{own}' for own in _OWN}


def _compiled(source: str, name: str) -> CodeType:
    """The code of a module, in a file of its own whose lines tracebacks and debuggers can show."""
    file = f'<scalax sjit of {name}, {zlib.crc32(source.encode()):08x}>'
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    return compile(source, file, 'exec')


def _declarations(signature: CallSignature, omitted: str) -> list[str]:
    """The parameters of the generated function as source text."""
    kinds = inspect.Parameter
    texts = []
    previous = None
    for parameter in signature.parameters:
        kind = parameter.kind
        if previous is kinds.POSITIONAL_ONLY and kind is not kinds.POSITIONAL_ONLY:
            texts.append('/')
        if kind is kinds.KEYWORD_ONLY and signature.varargs is None and previous is not kind:
            texts.append('*')
        optional = '' if parameter.default is kinds.empty else f'={omitted}'
        star = '*' if kind is kinds.VAR_POSITIONAL else '**' if kind is kinds.VAR_KEYWORD else ''
        texts.append(f'{star}{parameter.name}{optional}')
        previous = kind
    if previous is kinds.POSITIONAL_ONLY:
        texts.append('/')
    return texts


def _flat_args(signature: CallSignature, split: str) -> str:
    """The row of slots as source text, from the names of the parameters."""
    parts = [*signature.positional]
    if signature.varargs:
        parts.append(f'*{signature.varargs}')
    parts.extend(signature.keyword_only)
    if signature.keywords and (signature.static_keywords or signature.donated_keywords):
        parts.append(f'*{split}({signature.keywords})')
    elif signature.keywords:
        parts.append(signature.keywords)
    return ', '.join(parts)

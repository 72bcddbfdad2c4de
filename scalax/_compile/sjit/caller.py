"""The function that users call, generated with the parameters of the user's function.

Python then binds positional arguments, keywords and defaults in C, which takes 15-85 ns a call. A wrapper
with ``*args, **kwargs`` would take 150-190 ns.
"""

from __future__ import annotations

import inspect
import keyword
from types import FunctionType
from typing import Any

from scalax._compile.call.signature import OMITTED, CallSignature

_SOURCE = """\
def {name}({parameters}):
    _scalax_fast_call = _scalax_dispatcher.fast_call
    if _scalax_fast_call is not None:
        try:
            return _scalax_fast_call({flat_args})
        except _scalax_Exception as _scalax_error:
            if not _scalax_dispatcher.explain_or_retry(_scalax_error, _scalax_fast_call, ({tuple})):
                raise
    return _scalax_dispatcher.dispatch(({tuple}))
"""


def generate_caller(signature: CallSignature, dispatcher: Any) -> FunctionType:
    """Builds the function that users call.

    The generated code reads ``fast_call`` once, because another thread may replace it before an error is
    handled.

    Args:
        signature: the parameters of the user's function.
        dispatcher: a `Dispatcher`. Its ``fast_call`` is the program that calls try first, or None before the
            first call. If that raises, ``explain_or_retry(error, fast_call, flat_args)`` returns whether
            ``dispatch(flat_args)`` may serve the call.
    """
    # The source contains the name: Python calls a function faster if its code object was never replaced.
    name = signature.name
    if not name.isidentifier() or keyword.iskeyword(name):
        name = 'sjit_function'
    flat_args = ', '.join([_slots(parameter, signature) for parameter in signature.parameters])
    source = _SOURCE.format(
        name=name,
        parameters=_parameter_list(signature),
        flat_args=flat_args,
        tuple=f'{flat_args},' if flat_args else '',
    )
    namespace: dict[str, Any] = {
        '__name__': __name__,
        '_scalax_dispatcher': dispatcher,
        '_scalax_omitted': OMITTED,
        '_scalax_split': signature.split_keywords,
        '_scalax_Exception': Exception,  # which may be the name of a parameter
    }
    exec(compile(source, f'<scalax sjit of {name}>', 'exec'), namespace)
    # Removed from its globals, the function is not a reference cycle: it is freed with its last reference.
    return namespace.pop(name)


def _parameter_list(signature: CallSignature) -> str:
    """Returns the parameters of the generated function as source text."""
    empty = inspect.Parameter.empty
    parameters = [
        parameter.replace(annotation=empty, default=empty if parameter.default is empty else OMITTED)
        for parameter in signature.parameters
    ]
    return str(inspect.Signature(parameters))[1:-1].replace(repr(OMITTED), '_scalax_omitted')


def _slots(parameter: inspect.Parameter, signature: CallSignature) -> str:
    """Returns the expression for the slots of a parameter as source text."""
    if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
        return f'*{parameter.name}'
    if parameter.name == signature.keywords and (signature.static_keywords or signature.donated_keywords):
        return f'*_scalax_split({parameter.name})'
    return parameter.name

"""`sjit`: compiles a user's function, with shardings that follow rules.

The stages of a call are listed in `dispatch`; `function` is what users get, `caller` what they call.
"""

from scalax._transforms.calls.errors import describe_difference
from scalax._transforms.calls.signature import name_of
from scalax._transforms.sjit.function import (
    SjitFunction,
    call_of,
    made_anew,
    names_of_arguments,
    owner_of,
    shardings_of,
    sjit,
    staged_of,
)

__all__ = [
    'SjitFunction',
    'call_of',
    'made_anew',
    'name_of',
    'names_of_arguments',
    'owner_of',
    'shardings_of',
    'sjit',
    'staged_of',
    'describe_difference',
]

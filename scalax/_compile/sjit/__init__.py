"""`sjit`: compiles a user's function, with shardings that follow rules.

The stages of a call are listed in `dispatch`; `function` is what users get, `caller` what they call.
"""

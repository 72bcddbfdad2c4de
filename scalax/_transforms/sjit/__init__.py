"""WHEN: how does a function of the user's become a compiled one whose shardings follow rules?

``_convention`` lays a call out as a row of slots, ``_signature`` says which calls take the same
shardings, ``_boundary`` asks the rules for those, ``_program`` is one compiled set
of shardings (the cache key is written down there), ``_state`` finds or makes the program of each call,
``_choice`` guesses it when there are several, ``_replay`` keeps the user's code from being traced
twice, ``_placement`` puts arguments where they belong, ``_misplaced`` says what is wrong with where they
lie, ``_caller`` is the function that users call.
"""

from scalax._transforms.calls.call_signature import name_of
from scalax._transforms.calls.placement_errors import told_apart
from scalax._transforms.sjit.function import SjitFunction, names_of_arguments, owner_of, sjit

__all__ = ['SjitFunction', 'name_of', 'names_of_arguments', 'owner_of', 'sjit', 'told_apart']

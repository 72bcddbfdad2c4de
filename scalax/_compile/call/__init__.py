"""One call of a user's function: its signature, its key, the shardings of its arguments, their placement,
and the errors about arguments with other shardings.
"""

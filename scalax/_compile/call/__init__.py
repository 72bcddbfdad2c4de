"""Calls of users' functions: their signatures, the shardings that rules give their arguments, and
the errors where arguments are placed otherwise.
"""

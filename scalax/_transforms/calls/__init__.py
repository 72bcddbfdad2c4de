"""Calls of users' functions: their signatures, the shardings that rules give their arguments, and
what is said where arguments are placed otherwise.
"""

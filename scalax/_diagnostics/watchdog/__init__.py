"""Which process of a program is stuck, and where.

A step notes its number. All else is found by a thread in each process: once a second it tells process 0 what
the stacks of its threads say (`state`), and process 0 answers with a report if one is behind (`watch`). So a
step pays for two attributes.
"""

"""Watchdog that finds the process that is stuck, and the line at which it is.

A step only records its number, so it pays for two attributes. A thread in each process finds the rest: once a
second it samples the stacks of the threads (`state`) and sends the result to process 0, which responds with a
report if a process lags behind (`watch`).
"""

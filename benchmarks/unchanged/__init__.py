"""Models for one device, as their communities write them, and the annotations that an expert adds for many
devices.
"""

"""Meshes.

Offers meshes built from axis dimensions and names, of devices that are here or of TPU topologies.
"""

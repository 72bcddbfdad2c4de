"""Data between hosts, devices and meshes."""

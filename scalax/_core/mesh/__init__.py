"""Meshes of attached devices, and topologies of TPUs and GPUs that are not attached."""

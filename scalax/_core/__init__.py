"""What every other package builds on: utilities, rendering, pytrees, meshes, the active context, channels."""

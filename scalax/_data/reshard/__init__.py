"""Moving arrays between meshes: which blocks go where, in which rounds, and what carries them."""

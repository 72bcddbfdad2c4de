"""The sizes of the five models."""

VOCABULARY = 256  # bytes
SEQUENCE = 64
WIDTH, HIDDEN, HEADS, LAYERS = 64, 256, 4, 2

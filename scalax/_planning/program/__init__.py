"""The compiler's program, read: HLO text, its call tree, trip counts, source lines, phases, replica groups."""

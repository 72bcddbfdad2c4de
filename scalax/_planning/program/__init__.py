"""The compiler's program: HLO text, its call tree, trip counts, source lines, phases, replica groups."""

"""Whether a step computes on a mesh what it computes on one device."""

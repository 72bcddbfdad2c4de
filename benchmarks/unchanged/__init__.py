"""Models for one device, and the annotations that an expert adds for many devices."""

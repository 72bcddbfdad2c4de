"""The seconds of a step: roofline, collectives, and the compiler's schedule."""

"""What one device computes, moves, holds and sends in one call of a step."""

"""Models as their communities write them, for one device; and what an expert would add for many."""

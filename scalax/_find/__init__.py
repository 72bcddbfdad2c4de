"""Finds a mesh and a rule for a step of one device, and writes the rule as a person would."""

"""Jaxprs, read: what each primitive does with dimensions, and an interpreter of facts about values."""

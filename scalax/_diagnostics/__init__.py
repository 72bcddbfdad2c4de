"""Diagnosis of installations, and of processes that hang."""

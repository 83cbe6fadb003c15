"""Scheduling problems with published instances."""

"""Inventory problems with published tables: lost sales with lead times, dual sourcing."""

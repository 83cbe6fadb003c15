"""Rewards computed from events."""

"""Policies that are not learned."""

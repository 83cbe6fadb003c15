"""Dispatching of orders to vehicles that come and go."""

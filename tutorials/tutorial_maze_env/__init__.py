"""Step-by-step tutorial: an online two-dimensional cutting stock problem.

Each part adds to the one before: what a part does not change, it imports from where it was introduced.
"""

"""Policies at work: bundles that need NumPy and onnxruntime only.

Nothing is imported here. :mod:`maze.serve.bundle` reads and runs bundles; it needs torch to make them
(:mod:`maze.serve.export`).
"""

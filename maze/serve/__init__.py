"""Serving of policies: bundles that need NumPy and onnxruntime only, and the decision server.

Nothing is imported here. :mod:`maze.serve.bundle` reads and runs bundles; exporting them needs torch
(:mod:`maze.serve.export`).
"""

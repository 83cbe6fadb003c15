"""Online bin packing with published heuristics."""

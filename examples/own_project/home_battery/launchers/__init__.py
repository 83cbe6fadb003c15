"""Ways to run the jobs of a sweep."""

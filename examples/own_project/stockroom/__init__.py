"""Four products on shelves: which one is delivered today, and how much of it?"""

"""Four products on shelves: which one to deliver, and how much?"""

"""What the documentation site writes by itself: the reference, the configurations, the gallery."""

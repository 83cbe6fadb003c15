"""Problems that need a recurrent state or stacked observations."""

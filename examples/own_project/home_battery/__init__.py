"""The battery of a house with a solar roof, traded against hourly prices."""

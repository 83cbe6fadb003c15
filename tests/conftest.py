"""Settings that hold for all tests."""

from hypothesis import settings

# A first call may import half of torch; how long an example takes says nothing on a machine that does other things too.
settings.register_profile("maze", deadline=None)
settings.load_profile("maze")

"""What holds for every test."""

from hypothesis import settings

# Tests do not assert timings: a busy machine is not a failure.
settings.register_profile("etude", deadline=None)
settings.load_profile("etude")

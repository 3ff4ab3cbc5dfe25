"""Settings of every test."""

from hypothesis import settings

# No deadline per example: a busy machine is no failure, and pytest's own time-out ends what hangs.
settings.register_profile("specsync", deadline=None)
settings.load_profile("specsync")

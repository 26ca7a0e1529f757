from __future__ import annotations

from hypothesis import settings

settings.register_profile("untimed", deadline=None)  # a busy machine is no reason for a test to fail
settings.load_profile("untimed")

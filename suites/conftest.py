"""Profiles of Hypothesis, to be chosen with `--hypothesis-profile`."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile(
    "nightly", max_examples=25 * settings.get_profile("default").max_examples, deadline=None
)

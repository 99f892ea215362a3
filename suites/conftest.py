"""Profiles of Hypothesis, to be chosen with `--hypothesis-profile`, and what all suites rely on."""

from __future__ import annotations

import signal

from hypothesis import settings

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts what runs in the background deaf to Ctrl-C, and so would be all that is started here.
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile(
    "nightly", max_examples=25 * settings.get_profile("default").max_examples, deadline=None
)

"""Profiles of Hypothesis, to be chosen with `--hypothesis-profile`, and what all suites rely on."""

from __future__ import annotations

import os
import signal

from hypothesis import settings

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts what runs in the background deaf to Ctrl-C, and so would be all that is started here.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests import the runtime themselves: it shall neither report to its makers nor leave a file.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

settings.register_profile(
    "nightly", max_examples=25 * settings.get_profile("default").max_examples, deadline=None
)

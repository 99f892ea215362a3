"""Profiles of Hypothesis, to be chosen with `--hypothesis-profile`, and what all suites rely on."""

from __future__ import annotations

import os
import signal

import pytest
from hypothesis import settings

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts what runs in the background deaf to Ctrl-C, and so would be all that is started here.
    signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    # And `nohup` what it starts deaf to a closed terminal.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Tests import the runtime themselves: it shall neither report to its makers nor leave a file.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """What is marked `hf` needs torch and transformers, and so may its fixtures."""
    if item.get_closest_marker("hf") is None:
        return
    from harness.engines.hf import ENGINE
    from harness.pytest_plugin.gates import missing

    state = ENGINE.availability()
    if not state.usable:
        missing(item, {"hf"}, f"hf is not usable here: {state.reason} {state.next_action}")


# No test depends on how fast a machine is, or how busy: no example has a deadline, as on CI servers.
settings.register_profile("default", settings.get_profile("default"), deadline=None)
settings.register_profile(
    "nightly", max_examples=25 * settings.get_profile("default").max_examples, deadline=None
)

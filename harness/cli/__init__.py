"""The command `onnx-parity`: one module for each verb, all of them thin."""

from __future__ import annotations

from typing import NoReturn

__all__ = ["main"]


def main() -> NoReturn:
    """Run the command and exit with its status."""
    import sys

    from harness.cli.process import deferred_interrupts

    try:
        with deferred_interrupts():
            from harness.cli.app import run
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(run(sys.argv[1:]))

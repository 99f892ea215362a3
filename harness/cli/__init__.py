"""The command `onnx-parity`: one module for each verb, all of them thin."""

from __future__ import annotations

from typing import NoReturn

__all__ = ["main"]


def main() -> NoReturn:
    """Run the command and exit with its status."""
    import sys

    status = 130
    try:
        from harness.cli.process import deferred_interrupts, ending, take_interrupts

        take_interrupts()
        with deferred_interrupts():
            from harness.cli.app import run
        status = run(sys.argv[1:])
        ending()
    except KeyboardInterrupt:
        pass
    sys.exit(status)

"""The command `lipcert`, also as `python -m lipcert`."""

import os
import signal


def main() -> None:
    """Run the command line; as long as it only imports, Ctrl-C and SIGTERM end it at once."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _end)
    from lipcert.cli import main as run

    run()


def _end(*_: object) -> None:
    """Nothing has been begun, and libraries do not survive an exception in the middle of their import."""
    os.write(2, b"stopped\n")
    os._exit(130)


if __name__ == "__main__":
    main()

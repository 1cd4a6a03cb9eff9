"""Commands of Flower's command line, several in one process: it takes more than a second to start.

python -m fedloom.deploy.flower_commands < COMMANDS    (a list of lists of words, as JSON; each answer ends with a NUL)
"""

from __future__ import annotations

import json
import os
import sys


def run_commands() -> None:
    """Run one command after another, up to the first that fails."""
    from flwr.cli.app import app  # what the program `flwr` runs

    for words in json.load(sys.stdin):
        try:
            app(words, prog_name="flwr")
        except SystemExit as end:
            if end.code:
                return
        sys.stdout.flush()
        os.write(sys.stdout.fileno(), b"\0")


if __name__ == "__main__":
    run_commands()

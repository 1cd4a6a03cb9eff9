"""A run that never ends: python -m support.conducting HOME prints a line once it has begun."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from fedloom.deploy.site import conducted, write_state

if __name__ == "__main__":
    home = Path(sys.argv[1])
    with conducted(home):
        write_state(home, 1, "running", process=os.getpid())
        print(flush=True)
        time.sleep(600)

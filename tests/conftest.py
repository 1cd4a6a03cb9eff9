"""Every test uses one thread: two workers on two cores would otherwise wait for each other most of the time."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

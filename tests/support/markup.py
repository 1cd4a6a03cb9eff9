"""A name that is markup: pages must show it, not run it."""

from __future__ import annotations

EVIL = "</script><img src=x onerror=alert(1)>"  # as a class, and as a client

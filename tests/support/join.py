"""python -m support.join: a rank that joins the others, and says what rank 0 tells it."""

from __future__ import annotations

from fedloom.core.errors import LostRankError
from fedloom.engine.ranks import joined

if __name__ == "__main__":
    try:
        print(joined().broadcast("hello"))
    except LostRankError as error:
        print(error)

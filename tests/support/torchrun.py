"""python -m support.torchrun WORDS...: torchrun; started warm, it forks its ranks from a warm process, too."""

from __future__ import annotations

import sys

from torch.distributed.run import main

if __name__ == "__main__":
    main(sys.argv[1:])

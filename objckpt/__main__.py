"""`python -m objckpt`: the same as the command `objckpt`."""

from __future__ import annotations

import sys

from objckpt.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

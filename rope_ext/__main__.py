"""``python -m rope_ext``: the command ``rope-ext``, for launchers that start modules."""

import sys

from rope_ext.cli import main

if __name__ == "__main__":
    sys.exit(main())

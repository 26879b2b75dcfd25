"""``python -m vit_lightning`` is the ``lightning`` command."""

import sys

from vit_lightning.cli import main

if __name__ == "__main__":
    sys.exit(main())

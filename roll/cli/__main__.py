"""`python -m roll.cli` is `roll`."""

import sys

from roll.cli import main

sys.exit(main())

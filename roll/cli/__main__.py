"""`python -m roll.cli` is `roll`."""

import sys

from roll.cli.commands import main

sys.exit(main())

"""`python -m headlab.cli` is the command `headlab`."""

import sys

from headlab.cli import main

sys.exit(main())

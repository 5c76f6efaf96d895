"""`python -m storage`: see storage/command.py."""

import sys

from storage.command import main

sys.exit(main())

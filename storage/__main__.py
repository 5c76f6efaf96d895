"""Entry point of `python -m storage`; see storage/snapshots_command.py."""

import sys

from storage.snapshots_command import main

sys.exit(main())

"""For processes that have this folder in PYTHONPATH; see titan_stubs.py."""

import titan_stubs

titan_stubs.when_needed()

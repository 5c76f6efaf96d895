"""Run a script, given with its flags, with Accelerate's FSDP2 on CPUs and nothing else of ours."""

import runpy
import sys

from harness.adapters import import_hook

NAMES = ("accelerate.parallelism_config", "accelerate.state")
import_hook.install({name: import_hook.PATCHES[name] for name in NAMES})
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")

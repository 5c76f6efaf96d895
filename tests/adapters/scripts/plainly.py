"""Runs a script of Accelerate without the harness, and lets its process group stand until the
process ends.

torch 2.13 hangs every now and then where it is taken down first: the last to let go of it is then
DistributedDataParallel's reducer, which joins a thread of gloo with the GIL held, and that thread
waits for the GIL to let go of a tensor that was gathered. Scripts under the harness have neither.
"""

import runpy
import sys

from accelerate.state import PartialState

PartialState.destroy_process_group = lambda self, group=None: None
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")

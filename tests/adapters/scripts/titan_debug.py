"""torchtitan.train with its debug model and a little data, on a computer without an accelerator:
with ../titan_cpu in PYTHONPATH."""

import runpy
import sys

import titan_assets

titan_assets.make()
sys.argv = ["torchtitan.train", *titan_assets.FLAGS, *sys.argv[1:]]
runpy.run_module("torchtitan.train", run_name="__main__")

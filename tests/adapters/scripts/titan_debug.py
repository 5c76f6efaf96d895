"""torchtitan.train with its debug model and a little data, on a computer without an accelerator."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "titan_cpu"))
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(Path("hf").absolute())}

import titan_assets
import titan_stubs

titan_stubs.when_needed()
titan_assets.make()

from torchtitan.train import main

sys.argv = [sys.argv[0], *titan_assets.FLAGS, *sys.argv[1:]]
main()

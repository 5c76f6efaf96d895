"""Parts of `make gpu` that end as their names say."""

import subprocess
import sys
import time


def run(bench):
    bench.checked("what it wrote before", True)
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
    if bench.part == "fails":
        raise RuntimeError("the device is gone")
    if bench.part == "hangs":
        time.sleep(300)
    if bench.part == "wrong":
        bench.checked("that two and two are five", 2 + 2 == 5, "it is four")

"""The pictures of docs/howto/see-a-run.md: pages of `rft view` on a run, in Chromium.

make quickstart
python scripts/view_pictures.py runs/rft/quickstart/RUN
"""

from __future__ import annotations

import base64
import re
import sys
import time
from pathlib import Path

import bench_harness as harness
from bench_view import Viewer, chromium

PICTURES = {  # name: page, width, height, dark
    "view_overview": ("", 1280, 800, False),
    "view_rollout": ("rollout/{worst}?colour=logprob", 1280, 860, True),
}
STEP = 10


def main() -> None:
    run_dir = Path(sys.argv[1])
    with Viewer(run_dir) as viewer, chromium() as window:
        found = re.findall(
            r'/rollout/([\d.]+)"', viewer.get(f"rollouts?step={STEP}&order=worst")[0]
        )
        for name, (page, width, height, dark) in PICTURES.items():
            size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
            window.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            scheme = {
                "features": [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
            }
            window.execute_cdp_cmd("Emulation.setEmulatedMedia", scheme)
            window.get(viewer.run + page.format(step=STEP, worst=found[0]))
            ends = time.monotonic() + 20
            drawn = (
                "return !document.querySelector('#charts') || "
                "Number(document.querySelector('#charts').dataset.drawn) > 0"
            )
            while not window.execute_script(drawn) and time.monotonic() < ends:
                window.execute_async_script("setTimeout(arguments[0], 50)")
            path = harness.ROOT / "docs" / "assets" / f"{name}.webp"
            taken = window.execute_cdp_cmd(
                "Page.captureScreenshot", {"format": "webp", "quality": 80}
            )
            path.write_bytes(base64.b64decode(taken["data"]))
            print(path, path.stat().st_size)


if __name__ == "__main__":
    main()

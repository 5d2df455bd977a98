"""What a Ray of our own is told and writes: cluster.ray_init.num_cpus and monitor.enable_ray_timeline."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import asyncio, sys
from pathlib import Path
from rft.launch.cluster import Cluster

cluster = Cluster.connect(None, num_cpus=int(sys.argv[1]))
try:
    import ray
    assert ray.cluster_resources()["CPU"] == float(sys.argv[1]), ray.cluster_resources()

    class Part:
        def work(self):
            return 7

    part = ray.remote(Part).options(num_cpus=0).remote()
    assert ray.get(part.work.remote()) == 7
    cluster.timeline(Path(sys.argv[2]))
finally:
    cluster.close()
"""


@pytest.mark.slow  # a Ray for each
@pytest.mark.parametrize("num_cpus", [3, 5])
def test_cpus_and_timeline(num_cpus, tmp_path: Path):
    path = tmp_path / "ray_timeline.json"
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(num_cpus), str(path)], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    events = json.loads(path.read_text())
    assert any("work" in str(e.get("name")) for e in events), events
    assert [p.name for p in tmp_path.iterdir()] == [path.name]

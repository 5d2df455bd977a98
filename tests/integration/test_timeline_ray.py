"""What a Ray of our own is told, starts and writes: cluster.ray_init.num_cpus and
monitor.enable_ray_timeline.
"""

import json
import subprocess
import sys
from pathlib import Path

CODE = """
import sys, time
from pathlib import Path
from rft.launch.cluster import Cluster

path, ends = Path(sys.argv[1]), time.monotonic() + 60
cluster = Cluster.connect(None, num_cpus=3, timeline=True)
try:
    import ray
    from ray.experimental.internal_kv import _internal_kv_get
    assert ray.cluster_resources()["CPU"] == 3.0, ray.cluster_resources()
    assert _internal_kv_get("dashboard", namespace="dashboard"), "its agent would ask once a second, and log that it got nothing"

    class Part:
        def work(self):
            return 7

    part = ray.remote(Part).options(num_cpus=0).remote()
    while ray.get(part.work.remote()) == 7:
        cluster.timeline(path)
        if "work" in path.read_text() or time.monotonic() > ends:  # events come in once a second
            break
    print(*{path.name.split(".")[0] for path in (cluster._folder / "ray/session_latest/logs").iterdir()})
finally:
    cluster.close()
"""


def test_what_a_ray_of_our_own_is_told_starts_and_writes(tmp_path: Path) -> None:
    path = tmp_path / "ray_timeline.json"
    command = [sys.executable, "-c", CODE, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    logs = set(done.stdout.split())
    assert {"gcs_server", "raylet", "dashboard_agent"} <= logs
    assert not logs & {"dashboard", "monitor", "log_monitor"}, (
        "each takes processor time, and nothing uses it"
    )
    events = json.loads(path.read_text())
    assert any("work" in str(e.get("name")) for e in events), events
    assert [p.name for p in tmp_path.iterdir()] == [path.name]

"""What a Ray of our own is told, starts and writes: cluster.ray_init.num_cpus and monitor.enable_ray_timeline."""

import json
import os
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
    assert not logs & {"dashboard", "monitor", "log_monitor"}, "each takes processor time, and nothing uses it"
    events = json.loads(path.read_text())
    assert any("work" in str(e.get("name")) for e in events), events
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


# What a worker of Ray loads first: it makes its folders when those of the run are gone, as on a busy machine.
LATE = """
import os, sys, time

if "default_worker.py" in " ".join(sys.orig_argv[:3]):
    makedirs, ends = os.makedirs, time.monotonic() + 30

    def late(path, *args, **kwargs):
        open(os.environ["STARTING"], "w").close()
        while os.path.exists(path) and time.monotonic() < ends:
            os.sched_yield()
        makedirs(path, *args, **kwargs)

    os.makedirs = late
"""
STARTING = """
import os, time, psutil
from rft.launch.cluster import Cluster

cluster, ends = Cluster.connect(None, num_cpus=3), time.monotonic() + 60
folder = cluster._folder
try:
    import ray
    part = ray.remote(type("Part", (), {})).options(num_cpus=0).remote()
    while not os.path.exists(os.environ["STARTING"]):
        assert time.monotonic() < ends, "Ray started no worker"
    raylet, = (p for p in psutil.Process().children(recursive=True) if p.name() == "raylet")
    raylet.kill()  # where it is asked to end, it kills its workers
    raylet.wait(60)
finally:
    cluster.close()
alive = [p.pid for p in psutil.process_iter(["cmdline"]) if str(folder) in " ".join(p.info["cmdline"] or ())]
print("left:", *alive, *folder.parent.glob(folder.name + "*"))
"""


def test_a_worker_that_is_only_starting_ends_with_ray(tmp_path: Path) -> None:
    """It would make Ray's folders anew, and then find nobody."""
    tmp_path.joinpath("sitecustomize.py").write_text(LATE)
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "PYTHONPATH": path, "STARTING": str(tmp_path / "starting")}
    command = [sys.executable, "-c", STARTING]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stdout.split("left:")[-1].strip()) == (0, ""), done.stdout + done.stderr[-4000:]

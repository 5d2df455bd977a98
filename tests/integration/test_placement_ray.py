"""Placement on a real Ray with fake GPUs: every actor sees its own devices only."""

import subprocess
import sys
import textwrap


def run(code):
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


HEAD = """
import asyncio, os
from rft.engine.settings import EngineSettings
from rft.trainer.settings import LearnerSettings
from rft.launch.cluster import placement, reserve
engines = [EngineSettings(name=f"engine-{i}", device="cuda", tensor_parallel_size=2) for i in range(2)]
learner = LearnerSettings(model_path="m", device="cuda", world_size=4)

async def who(gpus_per_node):
    import ray

    class Seen:
        def where(self):
            return sorted(os.environ["CUDA_VISIBLE_DEVICES"].split(",")), ray.get_runtime_context().get_node_id()

    places = await reserve(placement(engines, learner, gpus_per_node))
    actors = {(s.role, s.index): ray.remote(Seen).options(**places.options(s.role, s.index)).remote() for s in places.seats}
    return {key: await a.where.remote() for key, a in actors.items()}
"""


def test_eight_fake_gpus_on_one_node():
    out = run(
        HEAD
        + """
from rft.launch.cluster import Cluster
cluster = Cluster.connect(None, num_gpus=8)
try:
    assert cluster.gpus_per_node() == [8]
    seen = asyncio.run(who(cluster.gpus_per_node()))
    used = [d for devices, _ in seen.values() for d in devices]
    assert sorted(used) == [str(i) for i in range(8)], seen
    assert len(seen["engine", 0][0]) == 2 and len(seen["trainer", 3][0]) == 1
finally:
    cluster.close()
again = Cluster.connect(None, num_gpus=1)  # the next stage of a program
assert again.gpus_per_node() == [1]
again.close()
print("placed")
"""
    )
    assert "placed" in out


def test_two_fake_nodes():
    out = run(
        HEAD
        + """
import tempfile, shutil
tempfile.tempdir = os.environ["TMPDIR"] = os.environ["RAY_TMPDIR"] = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0")
import ray
from ray.cluster_utils import Cluster as Nodes

node = {"num_cpus": 4, "num_gpus": 4, "node_ip_address": "127.0.0.1"}
nodes = Nodes(initialize_head=True, head_node_args={**node, "include_dashboard": False})
nodes.add_node(**node)
try:
    ray.init(address=nodes.address, log_to_driver=False)
    seen = asyncio.run(who([4, 4]))
    per_node = {}
    for devices, node in seen.values():
        per_node.setdefault(node, []).extend(devices)
    assert sorted(map(sorted, per_node.values())) == [["0", "1", "2", "3"]] * 2, seen
finally:
    ray.shutdown()
    nodes.shutdown()
    shutil.rmtree(os.environ["RAY_TMPDIR"])
print("placed")
"""
    )
    assert "placed" in out


def test_ranks_have_the_gpus_of_the_engines_they_take_turns_with():
    """mode: colocate: each of two engines of two GPUs is told the very devices that its ranks get."""
    out = run(
        HEAD.replace(
            "placement(engines, learner, gpus_per_node)", "placement(engines, learner, gpus_per_node, shared=True)"
        ).replace(
            "ray.remote(Seen).options(**places.options(s.role, s.index))",
            "ray.remote(Seen).options(**places.options(s.role, s.index), runtime_env={'env_vars': places.env(s.role, s.index)})",
        )
        + """
from rft.launch.cluster import Cluster
cluster = Cluster.connect(None, num_gpus=4)
try:
    seen = {key: devices for key, (devices, _) in asyncio.run(who([4])).items()}
    assert sorted(seen["engine", 0] + seen["engine", 1]) == list("0123"), seen
    for engine in (0, 1):
        ranks = [seen["trainer", 2 * engine + i] for i in (0, 1)]
        assert [len(r) for r in ranks] == [1, 1] and sorted(ranks[0] + ranks[1]) == seen["engine", engine], seen
finally:
    cluster.close()
print("shared")
"""
    )
    assert "shared" in out

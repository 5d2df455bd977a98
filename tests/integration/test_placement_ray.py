"""Placement on a real Ray with fake GPUs: every actor sits on its planned node and sees its own
devices only.
"""

import subprocess
import sys
import textwrap

import pytest


def run(code):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


HEAD = """
import asyncio, os, shutil, tempfile
from rft.engine.settings import EngineSettings
from rft.trainer.settings import LearnerSettings
from rft.launch.cluster import Cluster, placement, reserve

async def who(engines, tp, ranks, **how):
    import ray

    class Seen:
        def where(self):
            return sorted(os.environ["CUDA_VISIBLE_DEVICES"].split(",")), ray.get_runtime_context().get_node_id()

    settings = [EngineSettings(name=f"engine-{i}", device="cuda", tensor_parallel_size=tp) for i in range(engines)]
    learner = LearnerSettings(model_path="m", device="cuda", world_size=ranks) if ranks else None
    places = await reserve(lambda gpus: placement(settings, learner, gpus, **how))
    actors = {}
    for s in places.seats:
        env = {"env_vars": places.env(s.role, s.index)}
        actors[s.role, s.index] = ray.remote(Seen).options(**places.options(s.role, s.index), runtime_env=env).remote()
    return places, {key: await a.where.remote() for key, a in actors.items()}
"""
FAKE_NODES = (
    HEAD
    + """
tempfile.tempdir = os.environ["TMPDIR"] = os.environ["RAY_TMPDIR"] = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0")
import ray
from ray.cluster_utils import Cluster as Nodes

def node(gpus):
    return {"num_cpus": 4, "num_gpus": gpus, "node_ip_address": "127.0.0.1", "object_store_memory": 80 << 20}

GPUS = GIVEN
nodes = Nodes(initialize_head=True, head_node_args={**node(GPUS[0]), "include_dashboard": False})
for gpus in GPUS[1:]:
    nodes.add_node(**node(gpus))
try:
    ray.init(address=nodes.address, log_to_driver=False)
    BODY
finally:
    ray.shutdown()
    nodes.shutdown()
    shutil.rmtree(os.environ["RAY_TMPDIR"])
print("placed")
"""
)


def on_fake_nodes(gpus, body):
    return run(
        FAKE_NODES.replace("GIVEN", repr(gpus)).replace(
            "BODY", textwrap.indent(textwrap.dedent(body), "    ").strip()
        )
    )


def test_eight_fake_gpus_on_one_node():
    out = run(
        HEAD
        + """
cluster = Cluster.connect(None, num_gpus=8)
try:
    _, seen = asyncio.run(who(2, 2, 4))
    used = [d for devices, _ in seen.values() for d in devices]
    assert sorted(used) == [str(i) for i in range(8)], seen
    assert len(seen["engine", 0][0]) == 2 and len(seen["trainer", 3][0]) == 1
finally:
    cluster.close()
again = Cluster.connect(None, num_gpus=1)  # the next stage of a program
assert len(asyncio.run(who(0, 1, 1))[1]) == 1
again.close()
print("placed")
"""
    )
    assert "placed" in out


@pytest.mark.parametrize(
    ("gpus", "engines", "tp", "ranks"),
    [([4, 4], 2, 2, 4), ([8, 8, 8], 8, 1, 16), ([4, 8, 8, 8], 2, 4, 16)],
)
def test_every_actor_sits_on_its_planned_node(gpus, engines, tp, ranks):
    """U6: the plan's nodes are those of Ray, so `rft check`'s picture is what happens, and
    neighbouring ranks share a node.
    """
    out = on_fake_nodes(
        gpus,
        f"""
        places, seen = asyncio.run(who({engines}, {tp}, {ranks}))
        planned = {{}}
        for seat in places.seats:
            planned.setdefault(seat.node, set()).add(seen[seat.role, seat.index][1])
        assert all(len(ids) == 1 for ids in planned.values()), planned
        assert len(set.union(*planned.values())) == len(planned), planned
        devices = {{}}
        for used, node in seen.values():
            devices.setdefault(node, []).extend(used)
        assert all(len(set(used)) == len(used) for used in devices.values()), devices
        """,
    )
    assert "placed" in out


def test_gpus_of_another_job_are_passed_over():
    """A second process on the same Ray, an explorer for example, takes what is free, and waits for
    what is not.
    """
    out = on_fake_nodes(
        [4, 4],
        """
        from rft.errors import SetupError
        from ray.util.placement_group import remove_placement_group

        async def both():
            first, _ = await who(1, 4, 0)
            second, seen = await who(0, 1, 4)
            assert {s.node for s in second.seats} == {1 - first.seats[0].node} and len({node for _, node in seen.values()}) == 1
            try:
                await reserve(lambda gpus: placement([EngineSettings(name="e", device="cuda")], None, gpus), timeout_s=1)
                raise AssertionError("there was no free GPU")
            except SetupError as e:
                assert "did not reserve 1 GPUs within 1 s; other jobs hold them" in str(e), e
            waiting = asyncio.ensure_future(
                reserve(lambda gpus: placement([EngineSettings(name="e", device="cuda")], None, gpus))
            )
            await asyncio.sleep(0)
            remove_placement_group(first._group)
            assert {s.node for s in (await waiting).seats} == {first.seats[0].node}

        asyncio.run(both())
        """,
    )
    assert "placed" in out


def test_ranks_have_the_gpus_of_the_engines_they_take_turns_with():
    """mode: colocate: each of two engines of two GPUs is told the very devices that its ranks get."""
    out = run(
        HEAD
        + """
cluster = Cluster.connect(None, num_gpus=4)
try:
    seen = {key: devices for key, (devices, _) in asyncio.run(who(2, 2, 4, shared=True))[1].items()}
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

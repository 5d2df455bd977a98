"""Who sits where, without a cluster."""

import os
from types import SimpleNamespace

import pytest

from rft.engine.settings import EngineSettings
from rft.errors import SetupError
from rft.launch import parts
from rft.launch.cluster import placement
from rft.trainer.settings import LearnerSettings


def engines(count, tp, device="cuda"):
    return [
        EngineSettings(name=f"engine-{i}", device=device, tensor_parallel_size=tp)
        for i in range(count)
    ]


def learner(world, device="cuda"):
    return LearnerSettings(model_path="m", device=device, world_size=world)


def test_engines_first_then_trainer():
    seats = placement(engines(2, 2), learner(4), [8])
    assert [(s.role, s.index, s.gpus) for s in seats] == [
        ("engine", 0, 2),
        ("engine", 1, 2),
        ("trainer", 0, 1),
        ("trainer", 1, 1),
        ("trainer", 2, 1),
        ("trainer", 3, 1),
    ]


def test_a_tensor_parallel_engine_stays_inside_one_node():
    seats = placement(engines(2, 3), learner(2), [4, 4])
    assert [s.node for s in seats] == [0, 1, 0, 1]


def test_too_few_gpus_are_refused_with_the_numbers():
    with pytest.raises(
        SetupError,
        match=r"engine 1 needs 4 GPU\(s\) on one node.*\[2, 2\] left of \[6, 2\].*9 GPUs in all",
    ):
        placement(engines(2, 4), learner(1), [6, 2])


def test_cpu_parts_need_no_gpu():
    assert {s.gpus for s in placement(engines(1, 1, "cpu"), learner(2, "cpu"), [0])} == {0}


def test_auxiliary_models_sit_between_engines_and_trainer():
    seats = placement(engines(1, 2), learner(1), [4, 4], [4, 1])
    assert [(s.role, s.node) for s in seats] == [
        ("engine", 0),
        ("auxiliary", 1),
        ("auxiliary", 0),
        ("trainer", 0),
    ]
    with pytest.raises(SetupError, match=r"auxiliary 0 needs 8"):
        placement(engines(1, 2), learner(1), [4, 4], [8])
    assert [s.role for s in placement(engines(1, 2), None, [2])] == ["engine"]


def test_ranks_on_several_machines_need_the_run_folder_and_a_network(tmp_path, monkeypatch):
    several = SimpleNamespace(cluster=SimpleNamespace(node_num=2))
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(parts, "_address", lambda plan: "127.0.0.1")
    with pytest.raises(
        SetupError, match=r"trainer rank 3 on .* does not see .*checkpoint_root_dir"
    ):
        parts.ready_to_meet(several, 3, str(tmp_path / "meeting"))
    (tmp_path / "meeting").touch()
    parts.ready_to_meet(
        SimpleNamespace(cluster=SimpleNamespace(node_num=1)), 0, str(tmp_path / "meeting")
    )
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    monkeypatch.setattr(parts, "_address", lambda plan: "192.0.2.9")
    with pytest.raises(
        SetupError,
        match=r"no network interface of .* has Ray's address 192.0.2.9; set GLOO_SOCKET_IFNAME",
    ):
        parts.ready_to_meet(several, 0, str(tmp_path / "meeting"))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    parts.ready_to_meet(several, 0, str(tmp_path / "meeting"))
    assert os.environ["GLOO_SOCKET_IFNAME"] == "ib0"


@pytest.mark.parametrize(
    ("gpus", "tps", "settings", "nodes"),
    [
        ([8, 8, 8], [], {"world_size": 24}, [0] * 8 + [1] * 8 + [2] * 8),
        ([8, 8, 8], [1] * 8, {"world_size": 16}, [1] * 8 + [2] * 8),
        # node 0 has 2 GPUs left
        ([8, 8, 8], [3, 3], {"world_size": 16, "fsdp_size": 8}, [1] * 8 + [2] * 8),
        ([4, 8], [1], {"world_size": 4}, [1] * 4),
        ([6, 6], [], {"world_size": 8, "fsdp_size": 4}, [0] * 4 + [1] * 4),
        ([3, 3, 2], [], {"world_size": 8, "sequence_parallel": 2}, [0, 0, 1, 1, 2, 2, 0, 1]),
    ],
)
def test_ranks_that_exchange_most_share_a_node(gpus, tps, settings, nodes):
    """U6: ranks of one FSDP or Ulysses group are neighbours."""
    rollout = [
        EngineSettings(name=f"engine-{i}", device="cuda", tensor_parallel_size=tp)
        for i, tp in enumerate(tps)
    ]
    seats = placement(rollout, LearnerSettings(model_path="m", device="cuda", **settings), gpus)
    assert [s.node for s in seats if s.role == "trainer"] == nodes


def test_ranks_on_engines_gpus_are_numbered_by_node():
    """U6, mode colocate: three engines of two GPUs and two ranks more, on nodes of four."""
    seats = placement(engines(3, 2), learner(8), [4, 4], shared=True)
    ranks = [(s.node, s.host) for s in seats if s.role == "trainer"]
    assert ranks == [(0, 0), (0, 0), (0, 1), (0, 1), (1, 2), (1, 2), (1, None), (1, None)]
    with pytest.raises(
        SetupError,
        match=r"trainer 8 needs 1 GPU\(s\) on one node, but the nodes have \[0, 2\] left of \[4, "
        r"4\]",
    ):
        placement(engines(3, 2), learner(9), [4, 4], shared=True)

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
    return [EngineSettings(name=f"engine-{i}", device=device, tensor_parallel_size=tp) for i in range(count)]


def learner(world, device="cuda"):
    return LearnerSettings(model_path="m", device=device, world_size=world)


def test_engines_first_then_trainer():
    seats = placement(engines(2, 2), learner(4), [8])
    assert [(s.role, s.index, s.gpus) for s in seats] == [
        ("engine", 0, 2), ("engine", 1, 2), ("trainer", 0, 1), ("trainer", 1, 1), ("trainer", 2, 1), ("trainer", 3, 1),
    ]  # fmt: skip


def test_a_tensor_parallel_engine_stays_inside_one_node():
    seats = placement(engines(2, 3), learner(2), [4, 4])
    assert [s.node for s in seats] == [0, 1, 0, 1]


def test_too_few_gpus_are_refused_with_the_numbers():
    with pytest.raises(SetupError, match=r"engine 1 needs 4 GPU\(s\) on one node.*\[2, 2\] left of \[6, 2\].*9 GPUs in all"):
        placement(engines(2, 4), learner(1), [6, 2])


def test_cpu_parts_need_no_gpu():
    assert {s.gpus for s in placement(engines(1, 1, "cpu"), learner(2, "cpu"), [0])} == {0}


def test_auxiliary_models_sit_between_engines_and_trainer():
    seats = placement(engines(1, 2), learner(1), [4, 4], [4, 1])
    assert [(s.role, s.node) for s in seats] == [("engine", 0), ("auxiliary", 1), ("auxiliary", 0), ("trainer", 0)]
    with pytest.raises(SetupError, match=r"auxiliary 0 needs 8"):
        placement(engines(1, 2), learner(1), [4, 4], [8])
    assert [s.role for s in placement(engines(1, 2), None, [2])] == ["engine"]


def test_ranks_on_several_machines_need_the_run_folder_and_a_network(tmp_path, monkeypatch):
    several = SimpleNamespace(cluster=SimpleNamespace(node_num=2))
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(parts, "_address", lambda plan: "127.0.0.1")
    with pytest.raises(SetupError, match=r"trainer rank 3 on .* does not see .*checkpoint_root_dir"):
        parts.ready_to_meet(several, 3, str(tmp_path / "meeting"))
    (tmp_path / "meeting").touch()
    parts.ready_to_meet(SimpleNamespace(cluster=SimpleNamespace(node_num=1)), 0, str(tmp_path / "meeting"))
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    monkeypatch.setattr(parts, "_address", lambda plan: "192.0.2.9")
    with pytest.raises(SetupError, match=r"no network interface of .* has Ray's address 192.0.2.9; set GLOO_SOCKET_IFNAME"):
        parts.ready_to_meet(several, 0, str(tmp_path / "meeting"))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    parts.ready_to_meet(several, 0, str(tmp_path / "meeting"))
    assert os.environ["GLOO_SOCKET_IFNAME"] == "ib0"

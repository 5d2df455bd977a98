"""Variables for processes that compute."""

import os

import pytest

from rft.engine import environment
from rft.engine.environment import cpu_environment, host_program, trainer_environment
from rft.engine.settings import EXTERNAL_LIB, EngineSettings
from rft.errors import SetupError


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("VLLM_", "OMP_", "KMP_", "GLOO_", "LD_PRELOAD", "GLIBC_")):
            monkeypatch.delenv(name)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {4, 5, 6, 7})


def test_one_shard_gets_its_cores() -> None:
    env = cpu_environment(EngineSettings(cpu_threads=2))
    assert env["VLLM_CPU_OMP_THREADS_BIND"] == "4,5" and env["OMP_NUM_THREADS"] == "2"
    assert env["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0" and env["TORCH_COMPILE_DISABLE"] == "1"


def test_two_shards_share_the_threads() -> None:
    env = cpu_environment(EngineSettings(cpu_threads=4, tensor_parallel_size=2))
    assert env["VLLM_CPU_OMP_THREADS_BIND"] == "4,5|6,7" and "OMP_NUM_THREADS" not in env
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in env


def test_engines_of_several_processes_have_other_cores() -> None:
    two = (
        EngineSettings(cpu_threads=2, tensor_parallel_size=2, first_core=first) for first in (0, 2)
    )
    assert [cpu_environment(e)["VLLM_CPU_OMP_THREADS_BIND"] for e in two] == ["4|5", "6|7"]
    beyond = EngineSettings(cpu_threads=2, tensor_parallel_size=2, first_core=3)
    assert cpu_environment(beyond)["VLLM_CPU_OMP_THREADS_BIND"] == "7|4", (
        "it begins again, which `rft check` says"
    )


def test_a_library_is_told_to_vllms_own_processes_and_not_forked() -> None:
    assert EXTERNAL_LIB not in cpu_environment(EngineSettings())
    own = EngineSettings(external_lib="my_models")
    assert cpu_environment(own)[EXTERNAL_LIB] == "my_models" and host_program(own) is None


def test_more_shards_than_cores_are_refused() -> None:
    with pytest.raises(SetupError, match="needs a core for each"):
        cpu_environment(EngineSettings(tensor_parallel_size=5))


def test_cuda_gets_the_neutral_variables_only() -> None:
    env = cpu_environment(EngineSettings(device="cuda"))
    assert (
        "LD_PRELOAD" not in env
        and "VLLM_CPU_OMP_THREADS_BIND" not in env
        and env["VLLM_NO_USAGE_STATS"] == "1"
    )
    # vLLM's processes take titles; with this their environment still says whose they are
    assert env["SPT_NOENV"] == "1"


def test_what_the_user_set_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert trainer_environment(4)["OMP_NUM_THREADS"] == "1"


def test_glibc_keeps_its_memory_where_it_allocates(
    monkeypatch: pytest.MonkeyPatch, tmp_path: os.PathLike[str]
) -> None:
    monkeypatch.setattr(environment, "library", lambda name: None)
    assert "trim_threshold" in cpu_environment(EngineSettings())["GLIBC_TUNABLES"]
    monkeypatch.setenv("GLIBC_TUNABLES", "mine")
    assert cpu_environment(EngineSettings())["GLIBC_TUNABLES"] == "mine"
    monkeypatch.setattr(environment, "library", lambda name: tmp_path / name)
    monkeypatch.delenv("GLIBC_TUNABLES")
    assert "GLIBC_TUNABLES" not in cpu_environment(EngineSettings())


def test_libraries_are_preloaded_before_the_users_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: os.PathLike[str]
) -> None:
    monkeypatch.setattr(environment, "library", lambda name: tmp_path / name)
    monkeypatch.setenv("LD_PRELOAD", "/mine.so")
    assert (
        trainer_environment(2, "cuda")["LD_PRELOAD"]
        == f"{tmp_path}/{environment.ALLOCATOR}:/mine.so"
    )
    assert (
        trainer_environment(2)["LD_PRELOAD"]
        == f"{tmp_path}/{environment.OPENMP}:{tmp_path}/{environment.ALLOCATOR}:/mine.so"
    )


def test_missing_libraries_come_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(environment, "library", lambda name: None)
    assert "LD_PRELOAD" not in trainer_environment(2) and "apt-get" in caplog.text
    assert len(environment.missing_libraries()) == 2


def test_a_core_that_needs_an_interpreter_of_its_own_gets_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: os.PathLike[str]
) -> None:
    monkeypatch.setattr(environment, "library", lambda name: tmp_path / name)
    assert host_program(EngineSettings()) is not None
    for other in (
        {"enforce_eager": False},
        {"tensor_parallel_size": 2},
        {"device": "cuda"},
        {"engine_type": "transformers"},
    ):
        assert host_program(EngineSettings(**other)) is None
    monkeypatch.setattr(environment, "library", lambda name: None)  # vLLM preloads its own
    assert host_program(EngineSettings()) is None

"""The factory, the pool and the reports."""

import asyncio
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from rft.engine.base import PromptTooLong, prompt_limit, worst
from rft.engine.built_in import make
from rft.engine.pool import EnginePool
from rft.engine.scripted import ScriptedEngine
from rft.engine.settings import EngineSettings
from rft.engine.vllm_args import check_installed
from rft.errors import ConfigError, EngineFailed, SetupError
from rft.testing.engine_contract import ask
from rft.types.ids import Version
from rft.types.ports import LoadReport


async def test_scripted_from_settings() -> None:
    engine = await make(
        EngineSettings(engine_type="scripted", extra_engine_args={"texts": ["yes"]})
    )
    assert (await engine.generate(ask()))[0].text == "yes"
    with pytest.raises(EngineFailed, match="script is over"):
        await engine.generate(ask())


async def test_an_unknown_engine_is_named() -> None:
    with pytest.raises(ConfigError, match=r"unknown engine 'vlm'.*transformers"):
        await make(EngineSettings(engine_type="vlm"))


async def test_an_engine_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from rft.engine.scripted import ScriptedEngine\nclass Mine(ScriptedEngine):\n    "
        "pass\nthing = 3\n",
        encoding="utf-8",
    )
    engine = await make(EngineSettings(engine_type=f"{tmp_path}/mine.py:Mine"))
    assert type(engine).__name__ == "Mine"
    with pytest.raises(ConfigError, match="not an engine"):
        await make(EngineSettings(engine_type=f"{tmp_path}/mine.py:thing"))


def test_prompt_limit_leaves_room_for_a_token() -> None:
    assert prompt_limit(EngineSettings(max_model_len=100)) == 99
    assert prompt_limit(EngineSettings(max_model_len=100, max_prompt_tokens=50)) == 50
    error = pickle.loads(pickle.dumps(PromptTooLong(7, 5)))  # noqa: S301  # crosses processes as an exception
    assert (error.tokens, error.limit) == (7, 5)


def test_the_worst_of_several_reports() -> None:
    good = LoadReport(
        version=Version(1, 2),
        num_tensors=3,
        nbytes=30,
        probed_layers=2,
        probe_error=1e-7,
        probe_worst="a",
        load_s=1.0,
    )
    bad = LoadReport(
        version=Version(1, 1),
        num_tensors=0,
        nbytes=0,
        missing=("x",),
        probed_layers=0,
        probe_error=0.5,
        probe_worst="b",
        load_s=0.5,
    )
    report = worst([good, bad], Version(1, 2))
    assert report == LoadReport(
        version=Version(1, 1),
        num_tensors=0,
        nbytes=0,
        missing=("x",),
        probed_layers=0,
        probe_error=0.5,
        probe_worst="b",
        load_s=1.0,
    )
    assert worst([good, good], Version(1, 2)) == good


async def test_a_pool_routes_prompts() -> None:
    engines = [ScriptedEngine(answer=lambda _: "ok") for _ in range(2)]
    pool = EnginePool(engines)
    for e in engines:
        e.hold()
    tasks = [asyncio.create_task(pool.generate(ask(text, n=2))) for text in ("a", "b", "a", "c")]
    await engines[0].waiting(4)
    await engines[1].waiting(4)
    assert [[c.messages[0]["content"] for c in e.calls] for e in engines] == [
        ["a", "a"],
        ["b", "c"],
    ]
    for e in engines:
        e.release()
    await asyncio.gather(*tasks)


async def test_a_pool_names_the_engine_that_failed() -> None:
    engines = [ScriptedEngine(answer=lambda _: "ok") for _ in range(2)]
    pool = EnginePool(engines)
    engines[0].die("out of order")
    with pytest.raises(EngineFailed, match=r"engine 0 of 2: .*out of order"):
        await pool.generate(ask())


def test_vllm_must_be_there_and_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.metadata
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SetupError, match=r"where there are GPUs, else see docs/install-cpu\.md"):
        check_installed()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.31.2+cpu")
    with pytest.raises(SetupError, match=r"0\.31\.2\+cpu is not supported: 0\.32 to 0\.33"):
        check_installed()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.33.1")
    check_installed()


def test_light_parts_load_no_torch() -> None:
    modules = (
        "rft.engine.base, rft.engine.pool, rft.engine.environment, rft.engine.weights, "
        "rft.engine.vllm, rft.engine.transformers"
    )
    code = (
        f"import sys, {modules}, rft.engine.scripted, rft.fault_injection; sys.exit('torch' in "
        f"sys.modules or 'vllm' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0

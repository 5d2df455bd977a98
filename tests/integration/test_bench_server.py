"""`mode: bench` with a model behind an OpenAI-compatible server: the same tasks, rewards and
numbers as with the model itself.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from rft.config.load import load
from rft.config.plan import Facts
from rft.config.resolve import resolve
from rft.engine.built_in import make
from rft.engine.settings import EngineSettings
from rft.errors import ConfigErrors, RunFailed, SetupError
from rft.launch.execute import execute
from rft.monitor.read import read, series
from rft.types.ports import ChatModel
from rft.workflow.endpoint import public
from tests.integration.test_bench_mode import EVAL, PLUGIN, TINY

KEY = "sk-of-nobody-but-this-test"


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[str]:
    """The tiny model behind rft's own server, in a thread with an event loop of its own: its
    address.
    """
    ready: list[str] = []
    up = threading.Event()
    stop = threading.Event()

    async def serve() -> None:
        settings = EngineSettings(
            engine_type="transformers",
            model_path=str(tiny_model),
            max_model_len=64,
            fixed_weights=True,
        )
        engine = await make(settings)
        async with public(cast(ChatModel, engine), "tiny", port=None, key=KEY) as where:
            ready.append(where["base_url"])
            up.set()
            await asyncio.to_thread(stop.wait)
        await engine.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="openai-server")
    thread.start()
    up.wait(60)
    yield ready[0]
    stop.set()
    thread.join(60)


def options(root: Path, *more: str) -> list[str]:
    (root / "plugin.py").write_text(PLUGIN)
    reward = f"buffer.explorer_input.default_reward_fn_type={root / 'plugin.py'}:any_answer_counts"
    return [reward, f"checkpoint_root_dir={root}", "mode=bench", EVAL, *more]


def external(url: str, **more: Any) -> list[str]:
    given = {
        "enable": "true",
        "base_url": url,
        "api_key_env": "OF_THIS_TEST",
        "model_name": "tiny",
        **more,
    }
    return [f"model.external_model.{k}={v}" for k, v in given.items()]


def test_a_server_is_evaluated_as_the_model_itself(
    server: str,
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("OF_THIS_TEST", KEY)
    (tmp_path / "own").mkdir()
    own = execute(
        TINY, options(tmp_path / "own", f"model.model_path={tiny_model}"), in_process=True
    ).run_dir
    prices = {"price_per_1k_prompt_tokens": 1.0, "price_per_1k_completion_tokens": 10.0}
    run = execute(
        TINY, options(tmp_path, "model.model_path=''", *external(server, **prices)), in_process=True
    ).run_dir
    numbers = {
        n: series(read(run / "metrics.jsonl"), f"bench/copied/{n}")
        for n in ("mean@2", "pass@2", "best@2", "failed", "tasks")
    }
    assert numbers == {n: series(read(own / "metrics.jsonl"), f"bench/copied/{n}") for n in numbers}
    assert numbers["mean@2"][0][1] > 0 and numbers["tasks"] == [(0, 100.0)]
    told = {
        n: series(read(run / "metrics.jsonl"), f"bench/{n}")[0][1]
        for n in ("prompt_tokens", "completion_tokens", "cost_usd")
    }
    assert told["prompt_tokens"] > 200 and told["completion_tokens"] >= 200
    assert told["cost_usd"] == pytest.approx(
        (told["prompt_tokens"] + 10 * told["completion_tokens"]) / 1000
    )
    assert "cost_usd" in capsys.readouterr().out
    files = (next((r / "samples").glob("*.jsonl")) for r in (own, run))
    mine, theirs = ([json.loads(line) for line in f.read_text().splitlines()] for f in files)
    assert [(r["answer"], r["reward"]) for r in mine] == [
        (r["answer"], r["reward"]) for r in theirs
    ]
    kept = [p for p in run.rglob("*") if p.is_file() and KEY.encode() in p.read_bytes()]
    assert kept == [], "the key is in no file"


def test_a_wrong_key_and_a_missing_address_are_told(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_THIS_TEST", "sk-wrong")
    with pytest.raises(RunFailed, match=r"HTTP 401.*OF_THIS_TEST"):
        execute(TINY, options(tmp_path, *external(server)), in_process=True)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    with pytest.raises(SetupError, match="no address; set OPENAI_BASE_URL"):
        execute(TINY, options(tmp_path, *external("null")), in_process=True)


@pytest.mark.parametrize("mode", ["both", "train", "explore", "colocate"])
def test_a_server_is_not_trained(mode: str) -> None:
    with pytest.raises(ConfigErrors) as caught:
        resolve(
            load(TINY, [f"mode={mode}", *external("http://127.0.0.1:1/v1")]), Facts(cpus=2, gpus=0)
        )
    (error,) = [e for e in caught.value.errors if e.key == "model.external_model.enable"]
    assert "takes no new weights" in error.message and "mode: bench" in error.message

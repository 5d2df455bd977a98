"""The README's file is what it says: short, tested without a model in no time, and trained by its
configuration alone.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rft.launch.execute import execute
from rft.plugins import REGISTRY, load_all
from rft.testing.judge import FakeJudge
from tests.helpers.judge_server import JudgeServer

ROOT = Path(__file__).parents[3]
TITLED = re.compile(r'^```\w+ title="([^"]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)
FILES = dict(TITLED.findall((ROOT / "README.md").read_text(encoding="utf-8")))


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "questions.jsonl").write_text('{"prompt": "Why is the sky blue?"}\n' * 8)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_it_is_short_and_that_of_the_example() -> None:
    assert set(FILES) == {"my_plugins/explain.py", "my.yaml", "test_explain.py"}
    assert (
        FILES["my_plugins/explain.py"]
        == (ROOT / "examples" / "judge" / "plugins" / "explain.py").read_text()
    )
    assert len(FILES["my_plugins/explain.py"].splitlines()) <= 30
    example = (ROOT / "examples" / "judge" / "test_explain.py").read_text()
    assert FILES["test_explain.py"].replace("my_plugins", "plugins") == example


def test_code_comes_before_figures_and_no_lab_book_is_there() -> None:
    """N24: no code above the fold, and a list of speed ratios."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    above = "".join(text.splitlines(keepends=True)[:35])
    assert "make quickstart" in above and "@register.workflow" in above
    assert len(re.findall(r"\d\.\d+ ?(?:×|x\b|times)", text)) <= 1


def test_its_test_needs_no_model_and_no_time(written: Path) -> None:
    timed = (
        "import sys, time, test_explain as t; b = time.process_time(); "
        "t.test_the_second_answer_is_judged()"
    )
    tell = "print(time.process_time() - b, 'torch' in sys.modules)"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(written), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, "-c", f"{timed}; {tell}"],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    seconds, torch = done.stdout.split()
    assert float(seconds) < 1 and torch == "False"


@pytest.mark.e2e
def test_it_trains_by_its_configuration_alone(
    written: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it stands in the README, but for model, size, engine and the judge's address."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    load_all()  # the example in the repository marks the same names
    for key in [key for key in REGISTRY._plugins if key[1] in ("explain_twice", "child_judge")]:
        monkeypatch.delitem(REGISTRY._plugins, key)
    with JudgeServer(FakeJudge(lambda prompt: 1 + len(prompt) % 5)) as server:
        models = yaml.safe_load(FILES["my.yaml"])["explorer"]["auxiliary_models"]
        models[0]["external_model_config"]["base_url"] = server.url
        small = [
            "buffer.batch_size=4",
            "model.max_prompt_tokens=64",
            "model.max_response_tokens=120",
        ]
        engine = [
            "explorer.rollout_model.engine_type=transformers",
            "buffer.explorer_input.taskset.rollout_args.max_tokens=8",
        ]
        changes = [
            f"model.model_path={tiny_model}",
            f"explorer.auxiliary_models={json.dumps(models)}",
            *small,
            *engine,
        ]
        done = execute(written / "my.yaml", changes, in_process=True, plugin_dirs=["my_plugins"])
        assert done.version.step == 2 and len(server.asked) > 40

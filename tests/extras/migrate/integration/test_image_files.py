"""Files of veRL and Trinity-RFT whose rows show images: converted, they pass `rft check` with a tiny
model that sees and made rows, and play three steps.  One offers a tool.
"""

from __future__ import annotations

import io
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from rft.monitor.read import read, series
from rft.preflight.check import check
from rft.testing import tiny_vision
from tests.helpers.command import rft

HERE = Path(__file__).parents[1]
STEPS = 3
SMALL = (
    "model.max_prompt_tokens=200",
    "model.max_response_tokens=8",
    "model.max_model_len=208",
    "cluster.gpu_per_node=0",
    "buffer.batch_size=2",
    "buffer.train_batch_size=null",
    f"buffer.total_steps={STEPS}",
    "explorer.rollout_model.engine_type=transformers",
    "explorer.rollout_model.engine_num=1",
    "explorer.rollout_model.tensor_parallel_size=1",
    "explorer.rollout_model.dtype=float32",
    "synchronizer.sync_method=memory",
    "synchronizer.sync_interval=1",
    "trainer.enable_gradient_checkpointing=false",
    "monitor.monitor_type=[]",
)
IN = "buffer.explorer_input"
GIVEN = {
    "verl": ("verl", "scripts/grpo_images.sh"),
    "multiturn": (
        "verl",
        "scripts/geo3k_multiturn.sh",
        "--set",
        "explorer.rollout_model.engine_type=vllm",
    ),
    "trinity": ("trinity", "trinity_files/grpo_vlm.yaml"),
}
TOOL = """
tools:
  - class_name: grade.py:Grade
    tool_schema: {type: function, function: {name: grade, parameters: {type: object, properties: {}}}}
"""
GRADE = """
class Grade:
    def __init__(self, config, schema): ...
    def execute(self, instance_id, parameters): return "right", 1.0, {}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vision.make(tmp_path_factory.mktemp("sees") / "Qwen2.5-VL")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """train.parquet and test.parquet with the columns of both: GeoQA's (problem, answer, images as
    Hugging Face stores them) and veRL's.
    """
    folder = tmp_path_factory.mktemp("geometry")
    for split in ("train", "test"):
        rows = []
        for i in range(16):
            file = io.BytesIO()
            Image.new("RGB", (24, 16), (10 * i, 90, 200)).save(file, "PNG")
            rows.append(
                {
                    "problem": f"<image>How many times {i}?",
                    "answer": str(i),
                    "images": [{"bytes": file.getvalue(), "path": None}],
                    "data_source": "hiyouga/geometry3k",
                    "prompt": [{"role": "user", "content": f"<image>How many times {i}?"}],
                    "reward_model": {"style": "rule", "ground_truth": str(i)},
                    "extra_info": {"index": i},
                }
            )
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{split}.parquet")
    return folder


def converted(kind: str, folder: Path) -> Path:
    tool, name, *more = GIVEN[kind]
    out = folder / f"{kind}.yaml"
    done = rft("convert", tool, HERE / name, "-o", out, *more)
    assert done.code == 0, done.output
    return out


def brought(kind: str, model: Path, data: Path, folder: Path) -> list[str]:
    """Return the overrides that name model and data."""
    sets = ("taskset",) if kind == "trinity" else ("tasksets.0", "eval_tasksets.0")
    paths = [f"{IN}.{name}.path={data}" for name in sets]
    if kind == "multiturn":
        (folder / "tools.yaml").write_text(TOOL)
        (folder / "grade.py").write_text(GRADE)
        key = "workflow_args.tool_config_path"
        paths += [f"{IN}.{name}.{key}={folder}/tools.yaml" for name in sets]
    return [f"model.model_path={model}", f"checkpoint_root_dir={folder}/runs", *paths]


@pytest.mark.parametrize("kind", GIVEN)
def test_a_converted_file_passes_the_check_and_plays_three_steps(
    kind: str,
    model: Path,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = converted(kind, tmp_path)
    monkeypatch.setenv("HOME", str(data.parent))
    if "torchvision" not in sys.modules:  # looked for, not used: nothing is started
        stand_in = ModuleType("torchvision")
        stand_in.__spec__ = ModuleSpec("torchvision", None)
        monkeypatch.setitem(sys.modules, "torchvision", stand_in)
    more = brought(kind, model, data, tmp_path)
    short = [
        "model.max_prompt_tokens=200",
        "model.max_response_tokens=8",
        "model.max_model_len=208",
    ]
    report = check(file, [*more, *short])
    assert not report.errors, report.errors
    (taskset, *_) = report.tasksets
    assert taskset.rows[0].images == ("24 x 16 pixels, 6 tokens",)
    done = rft("run", "--in-process", "-c", file, *more, *SMALL)
    assert done.code == 0, done.output
    (metrics,) = (tmp_path / "runs").rglob("metrics.jsonl")
    norms = series(read(metrics), "actor/grad_norm")
    assert len(norms) == STEPS and all(norm >= 0 for _, norm in norms)

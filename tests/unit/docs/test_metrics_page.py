"""docs/reference/metrics.md names everything that runs write, and nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rft.launch.execute import execute
from rft.testing.judge import FakeJudge
from tests.helpers.judge_server import JudgeServer

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
ROLES = {
    "Explorer": "explorer",
    "Trainer": "trainer",
    "Synchronizer": "synchronizer",
    "Evaluation": "eval",
    "Alarms": "any",
}
FLOW = """
from rft.workflow.base import Workflow

class Flow(Workflow):
    async def run(self, task, ctx):
        await ctx.chat(task.chat())
        return ctx.transcript(metrics={"answer_chars": 1.0})

def parts(task, transcript):
    return {"exact": float(transcript.answer == task.truth), "luck": float(transcript.turns[0].completion.tokens[0] % 2)}
"""


def documented() -> dict[str, dict[str, bool]]:
    """role -> {name as written: whether every run writes it}."""
    found: dict[str, dict[str, bool]] = {}
    for section in PAGE.split("\n## ")[1:]:
        role = ROLES[re.match(r"\w+", section)[0]]  # type: ignore[index]
        rows = re.findall(r"^\| (\*?)`([^`]+)`\*? \|", section, re.MULTILINE)
        found[role] = {name: not star for star, name in rows}
    return found


def form(name: str) -> re.Pattern[str]:
    return re.compile(
        "".join(
            r"[^/]+" if part.startswith("<") else re.escape(part)
            for part in re.split(r"(<\w+>)", name)
        )
    )


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> dict[str, set[str]]:
    """role -> names of small runs that switch on what they can."""
    with pytest.MonkeyPatch.context() as patch, JudgeServer(FakeJudge(1)) as server:
        patch.setenv("NO_PROXY", "127.0.0.1")
        return _written(tmp_path_factory.mktemp("metrics"), tiny_model, server.url)


def _written(folder: Path, tiny_model: Path, judge: str) -> dict[str, set[str]]:
    (folder / "flow.py").write_text(FLOW)
    common = [
        f"model.model_path={tiny_model}",
        f"checkpoint_root_dir={folder}",
        "buffer.batch_size=4",
        "algorithm.repeat_times=4",
        "buffer.explorer_input.eval_tasksets.0.max_rows=4",
        "trainer.save_interval=1",
        f"buffer.explorer_input.default_workflow_type={folder}/flow.py:Flow",
        f"buffer.explorer_input.default_reward_fn_type={folder}/flow.py:parts",
    ]
    shaping = (
        "{name: reward_shaping_mapper, args: {reward_shaping_configs: [{stats_key: luck, "
        "weight: 0.1}]}}"
    )
    drops = "{name: deduplicate, args: {max_copies: 3}}, {name: reward_std_filter}"
    dapo = "{name: dapo_dynamic_sampling, args: {metric_key: luck}}"
    plain = [
        *(
            "name=plain",
            "trainer.total_steps=2",
            "buffer.max_refill=100",
            "explorer.dynamic_timeout.enable=true",
        ),
        f"data_processor.experience_pipeline.operators=[{shaping}, {{name: pass_rate_calculator}}, "
        f"{drops}, {dapo}]",
    ]
    more = [
        *(
            "name=more",
            "monitor.detailed_stats=true",
            "trainer.total_steps=2",
            "algorithm.kl_loss_fn=k2",
            "algorithm.entropy_loss_fn_args.entropy_coef=0.01",
        ),
        "buffer.explorer_input.eval_tasksets.0.rollout_args.temperature=0",
        "buffer.explorer_input.default_reward_fn_type=math_reward",
    ]
    valued = [
        *(
            "name=valued",
            "trainer.total_steps=2",
            "algorithm.algorithm_type=ppo",
            "algorithm.kl_penalty_fn=k1",
        ),
        *(
            "algorithm.rollout_correction.rollout_is=token",
            "algorithm.rollout_correction.rollout_rs=token_k1",
        ),
        *(
            "algorithm.rollout_correction.rollout_rs_threshold=5.0",
            "explorer.eval_on_startup=false",
        ),
        "buffer.explorer_input.default_reward_fn_type=rubric_judge",
        f"explorer.auxiliary_models=[{{engine_type: external, model_path: j, "
        f"external_model_config: {{base_url: {json.dumps(judge)}}}}}]",
    ]
    given = [*common[:2], "trainer.total_steps=1"]
    runs = [("tiny", [*common, *changes]) for changes in (plain, more, valued)] + [
        ("sft_tiny", given)
    ]
    names: dict[str, set[str]] = {}
    for example, changes in runs:
        outcome = execute(ROOT / "examples" / example / "config.yaml", changes, in_process=True)
        for line in (outcome.run_dir / "metrics.jsonl").read_text().splitlines():
            record = json.loads(line)
            if example == "sft_tiny" and record["role"] != "eval":
                continue  # what each loss tells stands in a table of its own
            names.setdefault(record["role"], set()).update(record["values"])
    return names


@pytest.mark.e2e
def test_everything_that_is_written_is_documented(written: dict[str, set[str]]) -> None:
    pages = documented()
    unknown = [
        f"{role}: {name}"
        for role, names in written.items()
        for name in sorted(names)
        if not any(form(known).fullmatch(name) for known in pages[role])
    ]
    assert not unknown, "add these to docs/reference/metrics.md:\n" + "\n".join(unknown)


@pytest.mark.e2e
def test_what_is_documented_as_always_there_is_written(written: dict[str, set[str]]) -> None:
    missing = [
        f"{role}: {known}"
        for role, names in documented().items()
        for known, always in names.items()
        if always and not any(form(known).fullmatch(name) for name in written[role])
    ]
    assert not missing, "these are not written:\n" + "\n".join(missing)


@pytest.mark.e2e
def test_most_conditional_names_were_seen(written: dict[str, set[str]]) -> None:
    every = set().union(*written.values())
    unseen = {
        k
        for names in documented().values()
        for k, always in names.items()
        if not always and not any(map(form(k).fullmatch, every))
    }
    vllm = {f"engine/{name}" for name in ("steps", "preemptions", "prefix_cache_hit_rate")}
    vllm |= {f"engine/{name}/mean" for name in ("running", "waiting", "kv_cache_usage")}
    # engines in processes of their own
    separate = {f"engine/{name}" for name in ("lost", "stalled", "asked_again")}
    # other algorithms
    parts = {"experience/incomplete_rewards", "maxrl/unsolved", "experience/teacher_top_bytes"}
    parts |= {"sync/average/<name>"}
    experts = {
        "actor/router_aux_loss",
        "actor/router_max_load",
        "experience/routed_rows",
        "experience/routed_experts_bytes",
    }
    # engines in bfloat16 or float16
    short_types = {f"sync/canary_{name}" for name in ("noise", "mean_abs", "mean_limit")}
    assert unseen <= vllm | separate | parts | experts | short_types | {
        "auxiliary/<name>/<what>/mean",
        "alarm/monitor_failed",
        "alarm/<name>",  # runs in which nothing is wrong
        "rollout/copied_answers",  # answers of one token
        "rollout/reward_length_corr",
        "experience_pipeline/masked_truncated_count",
    }  # every answer of this model is cut off


def test_every_row_has_a_unit_and_a_meaning() -> None:
    for line in re.findall(r"^\| \*?`.+$", PAGE, re.MULTILINE):
        name, unit, reduction, meaning = [c.strip() for c in re.split(r"(?<!\\)\|", line)[1:5]]
        assert unit or name in ("`actor/lr`",) or "ratio" in name or "advantage" in name, line
        assert reduction or meaning, line


@pytest.mark.e2e
def test_what_other_tools_show_is_there_under_the_given_name(
    written: dict[str, set[str]],
) -> None:
    text = (
        (ROOT / "docs" / "howto" / "from-verl.md")
        .read_text(encoding="utf-8")
        .split("## Names of metrics", 1)[1]
        .split("\n## ", 1)[0]
    )
    rows = re.findall(r"^\| `.*?\| (.+) \|$", text, re.MULTILINE)
    ours = [name for row in rows for name in re.findall(r"`([^`]+)`", row)]
    every = set().union(*written.values())
    assert (
        len(ours) > 40
        and [name for name in ours if not any(map(form(name).fullmatch, every))] == []
    )


@pytest.mark.e2e
def test_a_run_with_a_critic_tells_all_of_it(written: dict[str, set[str]]) -> None:
    """What PPO runs show everywhere, under the same names."""
    losses = (
        "pg_loss",
        "pg_clipfrac",
        "pg_clipfrac_lower",
        "ppo_kl",
        "kl_loss",
        "kl_coef",
        "entropy",
        "loss",
        "grad_norm",
        "lr",
    )
    wanted = {f"actor/{name}" for name in losses} | {"advantage/kl", "advantage/kl_coef"}
    wanted |= {
        f"critic/{what}/{how}"
        for what in ("score", "rewards", "advantages", "returns")
        for how in ("mean", "max", "min")
    }
    wanted |= {
        f"critic/{name}" for name in ("vf_loss", "vf_clipfrac", "vpred_mean", "grad_norm", "lr")
    }
    wanted |= {f"training/rollout_probs_diff_{how}" for how in ("mean", "max", "std")} | {
        "rollout_corr/kl"
    }
    assert wanted <= written["trainer"], wanted - written["trainer"]

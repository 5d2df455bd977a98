"""A key of a file, another value, and what the trainer then does: from the written configuration to
the tiny model's steps.

Each case names what has to differ; what is behind a key that only several ranks, GPUs or an engine
show is tested beside those.
"""

from __future__ import annotations

import asyncio
import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash

from rft.config.load import from_dict
from rft.config.plan import Facts, Plan
from rft.config.resolve import resolve
from rft.trainer.loop.learner import Learner
from rft.trainer.loop.ranks import Ranks
from rft.trainer.model import sharding
from rft.trainer.rows.pack import Budget, RankBatch, TrainRow, spread
from rft.trainer.rows.pack import plan as cut
from rft.trainer.settings import LearnerSettings

BASE: dict[str, Any] = {
    "model.model_path": "m",
    "model.max_prompt_tokens": 20,
    "model.max_response_tokens": 20,
    "algorithm.repeat_times": 4,
    "algorithm.optimizer.lr": 1e-3,
    "buffer.batch_size": 3,
    "buffer.total_steps": 8,
    "trainer.cpu_threads": 1,
    "buffer.explorer_input.default_workflow_type": "simple_workflow",
    "buffer.explorer_input.default_reward_fn_type": "exact_answer",
    "buffer.explorer_input.taskset.path": "rft.testing.tiny:copy_tasks",
}
STEPS = 3


def plan(gpus: int = 0, **values: Any) -> Plan:
    """The plan of BASE with `values`, dotted keys with __ for the dots."""
    tree: dict[str, Any] = {}
    for key, value in {**BASE, **values}.items():
        *above, name = key.split(".")
        place = tree
        for part in above:
            place = place.setdefault(part, {})
        place[name] = copy.deepcopy(value)
    return resolve(from_dict(tree), Facts(cpus=4, gpus=gpus))


def rows() -> list[TrainRow]:
    """3 groups of 4 rows, answers of 2 to 14 tokens; the sampler was somebody else, so that ratios
    are clipped on every side.
    """
    rng = np.random.default_rng(3)
    made = []
    for group in range(3):
        prompt = rng.integers(3, 250, 10)
        for run in range(4):
            length = int(rng.integers(2, 15))
            tokens = np.concatenate([prompt, rng.integers(3, 250, length)]).astype(np.int32)
            mask = np.arange(len(tokens)) >= len(prompt)
            sampled = np.where(mask, -5.5 - 2.5 * rng.random(len(tokens)), 0).astype(np.float32)
            advantages = np.full(length, (-1.0) ** run * (0.5 + rng.random()), np.float32)
            made.append(
                TrainRow(
                    tokens=tokens,
                    loss_mask=mask,
                    logprobs=sampled,
                    temperatures=1.0,
                    advantages=advantages,
                    group=str(group),
                )
            )
    return made


class Watched(Learner):
    """Writes down every micro-batch that a model reads."""

    def _micro_batch(self, given: Any, critic: Any = None) -> Any:
        made = super()._micro_batch(given, critic)
        who = "critic" if critic is not None else "policy"
        self.__dict__.setdefault("seen", {}).setdefault(who, []).append(
            (len(given), tuple(made.input_ids.shape), [int(r.tokens[-1]) for r in given])
        )
        return made


def digest(names: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(
        b"".join(p.detach().numpy().tobytes() for _, p in sorted(names.items()))
    )


@functools.cache
def learnt(model: Path, given: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    """What three train steps come to."""
    learner = Watched(
        plan(
            **{"model.model_path": str(model)}, **{k: msgspec.json.decode(v) for k, v in given}
        ).learner
    )
    layers = {"policy": 0}
    learner.policy.lm.model.layers[0].mlp.register_forward_pre_hook(
        lambda *_: layers.update(policy=layers["policy"] + 1)
    )
    if learner.critic is not None:
        layers["critic"] = 0
        learner.critic.model.lm.model.layers[0].mlp.register_forward_pre_hook(
            lambda *_: layers.update(critic=layers["critic"] + 1)
        )
    ranks = Ranks(learner)
    all_rows = rows()
    found: dict[str, Any] = {"lr": [], "norms": [], "sums": [], "critic_lr": [], "critic_sums": []}
    for step in range(1, STEPS + 1):
        asked = sorted(
            {*ranks.before, "old"} | ({"values"} if learner.critic is not None else set())
        )
        scores = asyncio.run(ranks.compute(all_rows, asked))
        counts = [int(r.loss_mask.sum()) for r in all_rows]
        made = [
            msgspec.structs.replace(
                r,
                old=s["old"] if "old" in ranks.before else None,
                ref=s.get("ref"),
                values=s.get("values"),
                returns=np.linspace(-2, 2, n, dtype=np.float32)
                if learner.critic is not None
                else None,
            )
            for r, s, n in zip(all_rows, scores, counts, strict=True)
        ]
        critic = None if ranks.critic_budget is None else dealt(made, ranks.critic_budget, step)
        result = learner.step(dealt(made, ranks.budget, step), critic)
        found["lr"].append(result.lr)
        found["norms"].append(result.grad_norm)
        found["sums"].append(dict(sorted(result.sums.items())))
        if result.critic is not None:
            found["critic_lr"].append(result.critic.lr)
            found["critic_sums"].append(dict(sorted(result.critic.sums.items())))
    found["weights"] = digest(learner.policy.names())
    if learner.critic is not None:
        found["critic_weights"] = digest(learner.critic.model.names())
    seen = learner.__dict__["seen"]
    found |= {
        "order": seen["policy"],
        "shapes": [s[:2] for s in seen["policy"]],
        "layers": layers["policy"],
    }
    found |= {
        "critic_shapes": [s[:2] for s in seen.get("critic", [])],
        "critic_layers": layers.get("critic"),
    }
    return found


def dealt(given: list[TrainRow], budget: Budget, step: int) -> RankBatch:
    (mine,) = cut(given, 1, budget)
    micro = tuple(tuple(given[i] for i in m) for m in mine)
    return RankBatch(
        step=step,
        micro_batches=micro,
        tokens=float(sum(r.counted for r in given)),
        rows=float(len(given)),
    )


PPO = {"algorithm.algorithm_type": "ppo"}
FIXED = {"trainer.use_dynamic_bsz": False, "trainer.micro_batch_size_per_gpu": 6}
KL = {"algorithm.kl_loss_fn": "k2", "algorithm.kl_loss_fn_args": {"kl_coef": 0.1}}
ENTROPY = {
    "algorithm.entropy_loss_fn": "default",
    "algorithm.entropy_loss_fn_args": {"entropy_coef": 0.1},
}
A = "algorithm"
OPT = "algorithm.optimizer"
T = "trainer"
C = "trainer.critic"
R = "trainer.ref"
CLIP = f"{A}.policy_loss_fn_args"
# key, another value, what differs, what is written beside both
CASES: list[tuple[str, Any, str, dict[str, Any]]] = [
    (f"{CLIP}.clip_range", 0.5, "weights", {}),
    (f"{CLIP}.clip_range_low", 0.5, "weights", {}),
    (f"{CLIP}.clip_range_high", 0.9, "weights", {}),
    (f"{CLIP}.clip_ratio_c", 1.5, "weights", {}),
    (f"{A}.loss_agg_mode", "seq-mean-token-sum", "weights", {}),
    (f"{A}.entropy_loss_fn_args.entropy_coef", 1.0, "weights", ENTROPY),
    (f"{A}.kl_loss_fn", "k3", "sums", KL),
    (f"{A}.kl_loss_fn_args.kl_coef", 5.0, "weights", KL),
    (f"{A}.bypass_old_logprobs", False, "weights", {}),
    (f"{OPT}.lr", 1e-2, "lr", {}),
    (f"{OPT}.lr_warmup_steps", 4, "lr", {}),
    (f"{OPT}.lr_warmup_steps_ratio", 0.5, "lr", {}),
    (f"{OPT}.lr_scheduler_type", "cosine", "lr", {}),
    (f"{OPT}.min_lr_ratio", 0.5, "lr", {f"{OPT}.lr_scheduler_type": "cosine"}),
    (f"{OPT}.num_cycles", 1.5, "lr", {f"{OPT}.lr_scheduler_type": "cosine"}),
    (f"{OPT}.weight_decay", 0.9, "weights", {}),
    (f"{OPT}.optimizer_type", "sgd", "weights", {}),
    (f"{T}.grad_clip", 0.01, "weights", {}),
    (f"{T}.ppo_epochs", 2, "weights", {}),
    (f"{T}.use_dynamic_bsz", False, "shapes", {f"{T}.micro_batch_size_per_gpu": 6}),
    (f"{T}.micro_batch_size_per_gpu", 3, "shapes", FIXED),
    (f"{T}.max_token_len_per_gpu", 60, "shapes", {}),
    (f"{T}.shuffle_minibatches", True, "order", {f"{T}.max_token_len_per_gpu": 60}),
    (
        f"{T}.data_seed",
        7,
        "order",
        {f"{T}.max_token_len_per_gpu": 60, f"{T}.shuffle_minibatches": True},
    ),
    (f"{T}.row_layout", "padded", "shapes", {}),
    (f"{T}.enable_gradient_checkpointing", True, "layers", {}),
    (f"{T}.log_prob_micro_batch_size_per_gpu", 3, "shapes", FIXED),
    (f"{T}.log_prob_max_token_len_per_gpu", 60, "shapes", {}),
    (f"{R}.log_prob_micro_batch_size_per_gpu", 3, "shapes", {**FIXED, **KL}),
    (f"{R}.use_dynamic_bsz", False, "shapes", {**KL, f"{R}.log_prob_micro_batch_size_per_gpu": 3}),
    (f"{R}.max_token_len_per_gpu", 60, "shapes", KL),
    (f"{C}.micro_batch_size_per_gpu", 3, "critic_shapes", {**PPO, **FIXED}),
    (f"{C}.max_token_len_per_gpu", 60, "critic_shapes", PPO),
    (f"{C}.forward_micro_batch_size_per_gpu", 3, "critic_shapes", {**PPO, **FIXED}),
    (f"{C}.forward_max_token_len_per_gpu", 60, "critic_shapes", PPO),
    (f"{C}.use_dynamic_bsz", False, "critic_shapes", {**PPO, f"{C}.micro_batch_size_per_gpu": 3}),
    (f"{C}.row_layout", "padded", "critic_shapes", PPO),
    (f"{C}.enable_gradient_checkpointing", True, "critic_layers", PPO),
    (f"{C}.optimizer.lr", 1e-2, "critic_lr", PPO),
    (f"{C}.optimizer.lr_warmup_steps_ratio", 0.5, "critic_lr", PPO),
    (f"{C}.optimizer.weight_decay", 0.9, "critic_weights", {**PPO, f"{C}.optimizer.lr": 1e-2}),
    (f"{C}.grad_clip", 0.01, "critic_weights", PPO),
    (f"{C}.cliprange_value", 1e-4, "critic_weights", {**PPO, f"{C}.ppo_epochs": 2}),
    (f"{C}.ppo_epochs", 3, "critic_weights", PPO),
    (f"{T}.critic_warmup", 2, "weights", PPO),
]


@pytest.mark.e2e
@pytest.mark.parametrize(("key", "value", "differs", "beside"), CASES, ids=[c[0] for c in CASES])
def test_it_changes_what_is_learnt(
    key: str, value: Any, differs: str, beside: dict[str, Any], tiny_model: Path
) -> None:
    def run(**more: Any) -> dict[str, Any]:
        given = {**beside, **more}
        for name in [n for n in given if "_args." in n]:  # an argument stands in its mapping
            above, _, argument = name.rpartition(".")
            given[above] = {**given.get(above, {}), argument: given.pop(name)}
        return learnt(
            tiny_model, tuple((k, msgspec.json.encode(v)) for k, v in sorted(given.items()))
        )

    before = run()
    after = run(**{key: value})
    assert before[differs] != after[differs], f"{key} {value!r} changes no {differs}"


# ---------------------------------------------------------------- of several ranks, and of GPUs


def test_balance_batch_deals_by_tokens_or_in_order() -> None:
    """A long row among short ones: by tokens it is alone on its rank, else both ranks have as many
    rows.
    """
    rng = np.random.default_rng(0)

    def row(length: int, group: int) -> TrainRow:
        tokens = rng.integers(3, 250, length + 2).astype(np.int32)
        mask = np.arange(length + 2) >= 2
        return TrainRow(
            tokens=tokens, loss_mask=mask, logprobs=tokens * 0.0, temperatures=1.0, group=str(group)
        )

    given = [row(30, 0), *(row(4, i) for i in range(1, 6))]
    counts = {}
    for balance in (True, False):
        made = Ranks(
            _learner(plan(**{"trainer.balance_batch": balance, "trainer.world_size": 2})),
            [_other()],
        )
        shares = cut(given, 2, made.budget)
        counts[balance] = [sorted(i for micro in mine for i in micro) for mine in shares]
    assert counts == {True: [[0], [1, 2, 3, 4, 5]], False: [[0, 1, 2], [3, 4, 5]]}
    assert spread(6, 2, 3) == [[[0, 1, 2]], [[3, 4, 5]]]


def _learner(made: Plan) -> Any:
    """Settings where a learner is asked for nothing else."""
    from types import SimpleNamespace

    from rft.algorithm.composition import build

    return SimpleNamespace(settings=made.learner, algorithm=build(made.learner.algorithm))


def _other() -> Any:
    return object()


def test_entropy_tiles() -> None:
    """entropy_chunking: how many tiles are computed; entropy_checkpointing: how many logits the
    backward pass finds kept.
    """
    import torch

    from rft.trainer.model import logprobs

    hidden = torch.randn(40, 8, requires_grad=True)
    weight = torch.randn(3000, 8)
    targets = torch.arange(40)
    ones = torch.ones(40)
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logprobs, "CPU_TILE", 1 << 12)
        patch.setattr(logprobs, "KEPT_BYTES", 100_000)
        seen: list[tuple[int, ...]] = []
        see = logprobs._see
        patch.setattr(
            logprobs,
            "_see",
            lambda tile, *more: (
                seen.append((len(tile.hidden), len(tile.weight))),
                see(tile, *more),
            )[1],
        )
        for whole, keep_all in ((False, False), (True, False), (False, True)):
            seen.clear()
            made, entropies, _ = logprobs.token_logprobs(
                hidden,
                weight,
                targets,
                ones,
                chunk_tokens=16,
                entropy=True,
                one_tile=whole,
                keep_all=keep_all,
            )
            assert entropies is not None and made.grad_fn is not None
            kept = made.grad_fn.saved_tensors[-1]  # type: ignore[attr-defined]
            (made.sum() + entropies.sum()).backward()
            found[whole, keep_all] = (len(seen), kept.shape[1], hidden.grad.clone())  # type: ignore[union-attr]
            hidden.grad = None
    tiles, kept_part, gradient = found[False, False]
    assert tiles > 3 and kept_part < 3000
    assert found[True, False][:2] == (1, 0), "one tile, too large to be kept"
    assert found[False, True][:2] == (tiles, 3000), "all of them"
    for _, _, other in found.values():
        torch.testing.assert_close(other, gradient)


@pytest.mark.parametrize("key", ["entropy_chunking", "entropy_checkpointing"])
def test_entropy_keys_reach_the_model(key: str, tiny_model: Path) -> None:
    for value in (True, False):
        learner = Learner(
            replace(plan(**{f"trainer.{key}": value}).learner, model_path=str(tiny_model))
        )
        assert getattr(learner.policy, key) is value


def _critics(made: LearnerSettings) -> LearnerSettings:
    return replace(made, offload_policy=made.critic.offload_policy)


DTYPE, STORED = (lambda m: (m.dtype, m.sharded)), sharding.storage_device
GPU_CASES: dict[str, tuple[Any, Callable[[LearnerSettings], Any], Any, Any, dict[str, Any]]] = {
    # key on GPUs: (another value, what is looked at, what it was, what it becomes, what is written
    # beside both)
    "trainer.param_dtype": (
        "float32",
        DTYPE,
        ("bfloat16", True),
        ("float32", False),
        {"trainer.world_size": 1},
    ),
    "trainer.offload_policy": (True, STORED, "cuda", "cpu", {}),
    "trainer.ref.param_offload": (True, lambda m: m.ref_offload, False, True, {}),
    "trainer.ref.reshard_after_forward": (
        False,
        lambda m: m.ref_reshard_after_forward,
        True,
        False,
        {},
    ),
    "trainer.reshard_after_forward": (False, lambda m: m.reshard_after_forward, True, False, {}),
    "trainer.critic.offload_policy": (True, lambda m: STORED(_critics(m)), "cuda", "cpu", {}),
    "trainer.fused_kernel_backend": (
        "triton",
        lambda m: m.fused_logprobs,
        False,
        True,
        {},
    ),
}


@pytest.mark.parametrize("key", GPU_CASES)
def test_on_gpus(key: str) -> None:
    """Where parameters live and how they are computed with; what the model and FSDP2 make of it is
    tested beside them.
    """
    value, look, before, after, beside = GPU_CASES[key]
    given = {"cluster.gpu_per_node": 4, **beside}
    assert look(plan(4, **given).learner) == before
    assert look(plan(4, **given, **{key: value}).learner) == after


def test_reshard_after_forward_reaches_fsdp(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """trainer.reshard_after_forward of the policy, trainer.ref.reshard_after_forward of the
    reference model.
    """
    import torch.distributed.fsdp as fsdp

    whole = fsdp.fully_shard
    seen = list[Any]()

    def watched(module: Any, **how: Any) -> Any:
        if "reshard_after_forward" in how:
            seen.append(how["reshard_after_forward"])
        return whole(module, **how)

    monkeypatch.setattr(fsdp, "fully_shard", watched)
    kl = {"algorithm.kl_loss_fn": "k2", "algorithm.kl_loss_fn_args": {"kl_coef": 0.1}}
    made = plan(
        **kl, **{"trainer.reshard_after_forward": False, "trainer.ref.reshard_after_forward": True}
    ).learner
    # which needs FSDP2 on one rank, too
    learner = Learner(replace(made, model_path=str(tiny_model), offload_policy=True))
    learner.close()
    assert seen == [False, False, True, True], "two layers each"


def test_activations_live_on_the_host(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """trainer.enable_activation_offload reaches the checkpointing of the layers."""
    from transformers import PreTrainedModel

    beside = {"trainer.enable_gradient_checkpointing": True, "cluster.gpu_per_node": 4}
    enable = PreTrainedModel.gradient_checkpointing_enable
    found = list[bool]()

    def watched(model: PreTrainedModel, offload: bool = False, **how: Any) -> None:
        found.append(offload)
        enable(model, **how)  # the host is where this test computes

    monkeypatch.setattr(PreTrainedModel, "gradient_checkpointing_enable", watched)
    for value in (False, True):
        made = plan(4, **beside, **{"trainer.enable_activation_offload": value}).learner
        Learner(
            replace(made, model_path=str(tiny_model), device="cpu", dtype="float32", world_size=1)
        )
    assert found == [False, True]


# ---------------------------------------------------------------- the run around it


def test_where_a_run_lives(tmp_path: Path) -> None:
    """checkpoint_root_dir, project and name are the folder."""
    from rft.launch.rundir import RunDir

    root = {"checkpoint_root_dir": str(tmp_path)}
    for more, folder in (
        ({}, "rft/run"),
        ({"project": "p", "name": "n"}, "p/n"),
        ({"name": "other"}, "rft/other"),
    ):
        made = RunDir.claim(plan(**root, **more).run_dir)
        made.release()
        assert (tmp_path / folder).is_dir() and made.path == tmp_path / folder


async def test_a_part_that_does_not_start_in_time_is_named() -> None:
    """cluster.actor_start_timeout is how long a process may take to start."""
    from rft.errors import DeadlineExceeded
    from rft.launch.remote import guarded

    async def start(value: float) -> str:
        built = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(0.2, built.set_result, "up")
        return str(
            await guarded(
                built,
                "engine-0",
                timeout_s=plan(
                    **{"cluster.actor_start_timeout": value}
                ).cluster.actor_start_timeout_s,
            )
        )

    assert await start(30) == "up"
    with pytest.raises(DeadlineExceeded, match="engine-0 did not answer within 0 s"):
        await start(0.01)


@pytest.mark.parametrize(
    ("written", "ranks"),
    [
        ({}, [0]),
        ({"trainer.profiler.ranks": [1]}, [1]),
        ({"trainer.profiler.all_ranks": True}, [0, 1]),
    ],
    ids=["rank 0", "ranks", "all_ranks"],
)
def test_who_is_traced(written: dict[str, Any], ranks: list[int], tmp_path: Path) -> None:
    from rft.trainer.loop.profiling import traced

    made = plan(
        **{
            "trainer.world_size": 2,
            "trainer.profiler.steps": [1],
            "checkpoint_root_dir": str(tmp_path),
        },
        **written,
    )
    for rank in (0, 1):
        with traced(made.learner.profiler, made.learner.profile_folder, rank, 1):
            np.zeros(3).sum()
    files = sorted(p.name for p in made.learner.profile_folder.iterdir())
    assert files == [f"step_1_rank_{rank}.json" for rank in ranks]


def test_log_files_of_a_machine_have_a_folder(tmp_path: Path) -> None:
    """log.group_by_node, of which `rft log` reads both forms (tests/unit/cli)."""
    import os

    from rft.secrets import node_folder

    found = [
        node_folder(tmp_path, plan(**{"log.group_by_node": value}).log_by_node)
        for value in (False, True)
    ]
    assert found == [tmp_path, tmp_path / os.uname().nodename]

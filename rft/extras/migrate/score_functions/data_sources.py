"""The reward that scores each of veRL's data sources.

A row's data source is in the column that `format.reward_fn_key` names.  docs/howto/reward.md says
where these rewards differ from veRL's.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any

from rft.plugins import REGISTRY
from rft.reward.build_reward import argument_names

REWARDS: dict[str, str] = {
    "openai/gsm8k": "gsm8k_reward",
    "lighteval/MATH": "math_boxed_reward",
    "DigitalLearningGmbH/MATH-lighteval": "math_boxed_reward",
    "HuggingFaceH4/MATH-500": "math_boxed_reward",
    "math": "math_dapo_reward",
    "math_dapo": "math_dapo_reward",
    "math_dapo_reasoning": "math_dapo_reward",
    "aime*": "math_dapo_reward",
    "numina_aops_forum": "accuracy_reward",
    "numina_synthetic_math": "accuracy_reward",
    "numina_amc_aime": "accuracy_reward",
    "numina_synthetic_amc": "accuracy_reward",
    "numina_cn_k12": "accuracy_reward",
    "numina_olympiads": "accuracy_reward",
    "hiyouga/geometry3k": "geo3k_reward",
    "searchR1_*": "search_qa_reward",
    **dict.fromkeys(("codecontests", "apps", "codeforces", "taco"), "prime_code_reward"),
}
SANDBOX_ARGS = ("sandbox_level", "sandbox_url", "sandbox_max_concurrent", "sandbox_memory_mb")
"""Arguments that may stand beside every data source and that only rewards of programs use."""


def translate(name: str, args: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """Return the reward of a data source and its arguments; None for an unknown data source."""
    rewards = (reward for pattern, reward in REWARDS.items() if fnmatch.fnmatchcase(name, pattern))
    reward = next(rewards, None)
    if reward is None or reward not in REGISTRY.names("reward"):
        return None
    names = argument_names(REGISTRY.get("reward", reward))
    return reward, {n: v for n, v in args.items() if n not in SANDBOX_ARGS or n in names}

"""veRL's data sources and the reward of ours that scores each; what veRL scores with pictures is
refused.

Knows names only.  A row's data source is in the column that `format.reward_fn_key` names.  The
rewards are written after the described meaning of veRL's; docs/howto/reward.md says where they
differ.
"""

from __future__ import annotations

import fnmatch

from rft.errors import ConfigError

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
    "searchR1_*": "search_qa_reward",
    **dict.fromkeys(("codecontests", "apps", "codeforces", "taco"), "prime_code_reward"),
}
REFUSED: dict[str, str] = {
    "hiyouga/geometry3k": "its questions hold pictures, which are not offered",
}
SANDBOX_ARGS = ("sandbox_level", "sandbox_url", "sandbox_max_concurrent", "sandbox_memory_mb")
"""Arguments that may stand beside every data source and that only programs use."""


def reward_of(data_source: str) -> str | None:
    """Name of the reward for a data source; None for one that has none.  Raises ConfigError for one
    that is refused.
    """
    if why := REFUSED.get(data_source):
        raise ConfigError(
            f"data source {data_source!r}: {why}.  Name a reward of your own in "
            f"default_reward_fn_type (path/file.py:compute_score)",
            given=data_source,
        )
    return next(
        (
            reward
            for pattern, reward in REWARDS.items()
            if fnmatch.fnmatchcase(data_source, pattern)
        ),
        None,
    )

"""Which requests vLLM's runner computes only the last token of, with vLLM's own scheduler output."""

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's imports are full of other people's deprecations
]

PROMPT = list(range(100, 144))


def request(name: str, prompt: list[int] = PROMPT, computed: int = 0, **changes: Any) -> Any:
    from vllm import SamplingParams
    from vllm.v1.core.sched.output import NewRequestData

    given: dict[str, Any] = {
        "sampling_params": SamplingParams(),
        "lora_request": None,
        "mm_features": [],
        **changes,
    }
    return NewRequestData(
        name,
        prompt,
        pooling_params=None,
        block_ids=([0, 1],),
        num_computed_tokens=computed,
        **given,
    )


def shortened(
    new: list[Any], counts: dict[str, int], running: dict[str, tuple[list[int], int]] | None = None
) -> dict[str, int]:
    """Tokens of each request that are computed; `running`: prompts, and tokens that have been
    computed.
    """
    from vllm import SamplingParams
    from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput

    from rft.engine.vllm_prompts import SharedPrompts

    running = running or {}
    states = {
        name: SimpleNamespace(
            prompt_token_ids=prompt,
            mm_features=[],
            prompt_embeds=None,
            sampling_params=SamplingParams(),
            lora_request=None,
        )
        for name, (prompt, _) in running.items()
    }
    cached = CachedRequestData.make_empty()
    cached.req_ids = list(running)
    cached.num_computed_tokens = [computed for _, computed in running.values()]
    scheduled = SchedulerOutput(new, cached, counts, sum(counts.values()), {}, {}, set(), [])
    before = dict(counts)
    out = SharedPrompts(SimpleNamespace(requests=states), 32, []).shorten(scheduled)
    assert scheduled.num_scheduled_tokens == before, "vLLM's scheduler reads it again"
    assert out.total_num_scheduled_tokens == sum(out.num_scheduled_tokens.values())
    for old, now in zip(new, out.scheduled_new_reqs, strict=True):
        assert (
            now.num_computed_tokens + out.num_scheduled_tokens[now.req_id]
            == old.num_computed_tokens + before[now.req_id]
        )
    return dict(out.num_scheduled_tokens)


def test_the_first_of_a_group_is_computed_whole() -> None:
    others = list(range(200, 244))
    new = [
        request("a"),
        request("b", computed=32),
        request("other", others),
        request("c", computed=32),
    ]
    assert shortened(new, {"a": 44, "b": 12, "other": 44, "c": 12}) == {
        "a": 44,
        "b": 1,
        "other": 44,
        "c": 1,
    }


def test_one_that_runs_has_the_prompt() -> None:
    assert shortened([request("b", computed=32)], {"run": 1, "b": 12}, {"run": (PROMPT, 50)}) == {
        "run": 1,
        "b": 1,
    }
    assert shortened([request("b", computed=32)], {"run": 4, "b": 12}, {"run": (PROMPT, 40)}) == {
        "run": 4,
        "b": 1,
    }, "with this step"


def test_pieces_are_left_as_they_are() -> None:
    assert shortened([request("b")], {"run": 20, "b": 44}, {"run": (PROMPT, 20)}) == {
        "run": 20,
        "b": 44,
    }, "not yet whole"
    assert shortened([request("a"), request("b", computed=32)], {"a": 44, "b": 5}) == {
        "a": 44,
        "b": 5,
    }
    assert shortened([request("a"), request("b", computed=32)], {"a": 30, "b": 12}) == {
        "a": 30,
        "b": 12,
    }, "the first is not whole"


def test_what_a_prompt_is_computed_for_is_computed() -> None:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    scored = SamplingParams(max_tokens=1, prompt_logprobs=0)
    counts = {"a": 44, "b": 44}
    assert shortened([request("a"), request("b", sampling_params=scored)], counts) == counts
    assert (
        shortened([request("a"), request("b", lora_request=LoRARequest("x", 1, "x"))], counts)
        == counts
    )
    assert (
        shortened(
            [request("a", mm_features=["image"]), request("b", mm_features=["other"])], counts
        )
        == counts
    )


@pytest.mark.parametrize(
    ("kinds", "caching", "there"),
    [("F", True, True), ("F", False, False), ("FS", True, False), ("S", True, False)],
)
def test_prompts_are_shared_where_all_layers_keep_them_and_caching_is_on(
    kinds: str, caching: bool, there: bool
) -> None:
    from rft.engine.vllm_prompts import SharedPrompts

    class FullAttentionSpec:
        block_size = 32

    class SlidingWindowSpec(FullAttentionSpec):
        pass

    specs = {"F": FullAttentionSpec(), "S": SlidingWindowSpec()}
    groups = [SimpleNamespace(kv_cache_spec=specs[kind]) for kind in kinds]
    worker = SimpleNamespace(
        vllm_config=SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context={})),
        cache_config=SimpleNamespace(enable_prefix_caching=caching),
        model_runner=None,
    )
    assert (
        SharedPrompts.for_worker(worker, SimpleNamespace(kv_cache_groups=groups)) is not None
    ) == there

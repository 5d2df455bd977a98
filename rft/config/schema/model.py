"""Section `model`: which model, how long its texts may be, how it is sampled."""

from __future__ import annotations

from rft.config.schema.base import Section, key


class ModelConfig(Section):
    """The policy.  Sampling values here hold for every taskset that does not say otherwise in its rollout_args."""

    model_path: str = key("", "Folder with config.json, tokenizer and safetensors, or a hub id that is in the local cache.")
    trust_remote_code: bool = key(False, "Run Python code that comes with the model.", on_resume="safe")
    custom_chat_template: str | None = key(None, "Chat template (Jinja text) instead of the model's own.")
    chat_template_path: str | None = key(None, "File with a chat template instead of the model's own.")
    enable_thinking: bool | None = key(None, "Value of `enable_thinking` for chat templates that know it.")
    temperature: float = key(1.0, "Sampling temperature; 0 = greedy (evaluation only).", ge=0, le=10)
    top_p: float = key(1.0, "Nucleus sampling; 1 = off.  Training needs 1.", gt=0, le=1)
    top_k: int = key(-1, "Sample from the k likeliest tokens; -1 = off.  Training needs -1.", ge=-1)
    repetition_penalty: float = key(1.0, "Penalty on tokens already seen; 1 = off.  Training needs 1.", gt=0)
    logprobs: int = key(
        0, "Accepted for compatibility; the log-prob of every generated token is always kept.", on_resume="safe", ge=0
    )
    max_model_len: int | None = key(None, "Prompt and response together.  Null: the sum of the two below.", unit="tokens", ge=2)
    max_prompt_tokens: int | None = key(
        None, "Longest prompt.  Null: the rest of max_model_len, or half of it.", unit="tokens", ge=1
    )
    max_response_tokens: int | None = key(
        None, "Longest response.  Null: the rest of max_model_len, or half of it.", unit="tokens", ge=1
    )
    min_response_tokens: int = key(0, "No end before this many tokens; 0 = off.  Training needs 0.", unit="tokens", ge=0)

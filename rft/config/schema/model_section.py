"""Section `model`: which model, how long its texts may be, how it is sampled."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from rft.engine.settings import ExternalPolicyConfig
from rft.images.decode import MAX_PIXELS
from rft.schema import units
from rft.schema.base import Diagnostics, IgnoreCase, Name, Section, key, safe_key, section
from rft.trainer.settings import LoraSettings


class LoraConfig(Section):
    """Low-rank adapters trained instead of the whole model (arXiv:2106.09685), kept in float32 and
    computed in trainer.param_dtype.
    """

    implied = ("lora_rank", "lora_alpha", "target_modules")

    name: Name = key(
        LoraSettings.name, "Name of the adapter, and of its folder in every checkpoint."
    )
    path: str | None = key(
        None,
        "Folder of an adapter to start from, in peft's format; keys not written below are taken "
        "from it, and where an algorithm needs a "
        "reference model it is the model with this adapter.  Null: a new one, whose reference is "
        "the model without it.",
    )
    base_model_name: str | None = key(
        None,
        "What adapter_config.json calls the base model, in the adapter of `path` and in those that "
        "are saved.  Null: model.model_path.",
    )
    lora_rank: int = key(32, "Rank of the two matrices.", ge=1)
    lora_alpha: float = key(32, "Scale: the product is multiplied by lora_alpha / lora_rank.", gt=0)
    target_modules: str | tuple[str, ...] = key(
        "all-linear",
        "Names of the layers that get an adapter, as [q_proj, v_proj]; all-linear: every linear "
        "layer but the output.  Any other text is a "
        "regular expression for their full names.",
    )
    exclude_modules: str | tuple[str, ...] | None = key(
        None, "Names of layers that get no adapter, or a regular expression."
    )
    merge: bool | None = safe_key(
        None,
        "What is sent to engines.  False: the adapter alone, which they apply to the weights of "
        "model_path.  True: whole "
        "weights with the adapter added.  Null: alone, where the engines can.",
    )


class ImageProcessorConfig(Section):
    """Entries that replace those of preprocessor_config.json, for families that have them."""

    min_pixels: int | None = key(
        None,
        "A smaller image is enlarged to it.  Null: the model's own.",
        unit="pixels",
        ge=1,
        le=MAX_PIXELS,
    )
    max_pixels: int | None = key(
        None,
        "A larger image is reduced to it.  Null: the model's own.",
        unit="pixels",
        ge=1,
    )

    def rules(self, at: str, diagnostics: Diagnostics) -> None:
        least, most = self.min_pixels, self.max_pixels
        if least is not None and most is not None and least > most:
            diagnostics.error(
                f"{at}.min_pixels", f"{least} is more than max_pixels {most}; lower it"
            )

    def written(self) -> dict[str, int]:
        """Return the values that are not null, by name."""
        return {name: value for name, value in self if value is not None}


class ModelConfig(Section):
    """The policy.  Sampling values here apply to every taskset that does not set its own in
    rollout_args.
    """

    model_path: str = key(
        "",
        "Folder with config.json, tokenizer and safetensors, or a hub id that is in the local "
        "cache.",
    )
    tokenizer_path: str | None = key(
        None,
        "Folder with another tokenizer and chat template; exported models get it.  Null: "
        "model_path.",
    )
    critic_model_path: str | None = key(
        None,
        "Model from which the critic starts: its transformer layers, with a new output layer that "
        "yields 0.  Null: model_path.",
    )
    trust_remote_code: bool = safe_key(False, "Run Python code that comes with the model.")
    external_lib: str | None = key(
        None,
        "Python module that trainer and engines import before they load a model.  It can run any "
        "code.",
    )
    override_config: dict[str, Any] = key(
        {}, "Entries that replace config.json's: trainer, engines, a critic of its family."
    )
    image_processor_args: ImageProcessorConfig = section(
        ImageProcessorConfig, "Sizes of images, for engines and trainer."
    )
    custom_chat_template: str | None = key(
        None, "Chat template (Jinja text, or a file) instead of the model's own."
    )
    enable_thinking: bool | None = key(
        None, "Value of `enable_thinking` for chat templates that know it."
    )
    temperature: float = key(
        1.0, "Sampling temperature; 0 = greedy (evaluation only).", ge=0, le=10
    )
    top_p: float = key(1.0, "Nucleus sampling; 1 = off.  Training needs 1.", gt=0, le=1)
    top_k: int = key(-1, "Sample from the k likeliest tokens; -1 = off.  Training needs -1.", ge=-1)
    repetition_penalty: float = key(
        1.0, "Penalty on tokens already seen; 1 = off.  Training needs 1.", gt=0
    )
    max_model_len: int | None = key(
        None, "Prompt and response together.  Null: the sum of the two below.", unit="tokens", ge=2
    )
    max_prompt_tokens: units.Tokens | None = key(
        None, "Longest prompt.  Null: the rest of max_model_len, or half of it."
    )
    max_response_tokens: units.Tokens | None = key(
        None, "Longest response.  Null: the rest of max_model_len, or half of it."
    )
    min_response_tokens: units.TokensOr0 = key(
        0, "No end before this many tokens; 0 = off.  Training needs 0."
    )
    enable_prompt_truncation: bool = key(
        True,
        "True: a run whose prompt exceeds max_prompt_tokens fails, and nothing of it is trained.  "
        "False: prompt_truncation_side decides.",
    )
    prompt_truncation_side: Annotated[Literal["error", "left", "right", "middle"], IgnoreCase] = (
        key(
            "error",
            "With enable_prompt_truncation: false, of a row's opening prompt that is too long: "
            "keep its end (left), its beginning (right) or "
            "both (middle); error: the taskset is refused.",
        )
    )
    lora_configs: Annotated[tuple[LoraConfig, ...], Field(max_length=1)] | None = key(
        None, "At most one adapter.  Null or []: the whole model is trained."
    )
    rope_scaling: dict[str, Any] | None = key(
        None,
        "Rotary embeddings beyond the trained length, for trainer, engines and exported models: "
        "rope_type and what it needs, "
        "e.g. {rope_type: yarn, factor: 4.0}.  Null: the model's own.",
    )
    rope_theta: float | None = key(
        None, "Base of the rotary embeddings, for all of them.  Null: the model's own.", gt=0
    )
    external_model: ExternalPolicyConfig = section(
        ExternalPolicyConfig, "mode: bench: a model behind a server."
    )

    def rules(self, at: str, diagnostics: Diagnostics) -> None:
        if not self.model_path and not self.external_model.enable:
            text = (
                "is required: a folder with config.json, tokenizer and safetensors, or a hub id "
                "in the local cache"
            )
            diagnostics.error(f"{at}.model_path", text)
        if self.enable_prompt_truncation:
            self.warn_unused(
                at, ("prompt_truncation_side",), "enable_prompt_truncation is true", diagnostics
            )
        if self.trust_remote_code:
            diagnostics.warn(
                f"{at}.trust_remote_code: Python code from the model's folder will run with your "
                f"rights"
            )
        if self.external_lib is not None and not all(
            part.isidentifier() for part in self.external_lib.split(".")
        ):
            diagnostics.error(
                f"{at}.external_lib",
                "is not the name of a Python module, such as my_models.register",
            )
        elif self.external_lib is not None:
            diagnostics.warn(
                f"{at}.external_lib: the module {self.external_lib} will be imported and can run "
                f"any code with your rights"
            )

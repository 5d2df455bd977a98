"""Check that the questions of judges fit into the context of the models that answer them.

Depends on the tokenizer's files of auxiliary models, on no engine.  Invariant: nothing is
generated.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from rft.config.context import Problems
from rft.engine.chat import load_images
from rft.engine.settings import AuxiliarySettings
from rft.errors import ConfigError
from rft.explorer.stored import transcript
from rft.reward.base import Reward
from rft.taskset.chatfiles import open_chat
from rft.types.images import names_in
from rft.types.task import Task


def fit(
    reward: Reward,
    task: Task,
    models: Mapping[str, AuxiliarySettings],
    key: str,
    problems: Problems,
) -> None:
    """Count the tokens of the questions about a task's gold answer.  A server's context is its own."""
    for name, messages in reward.questions(task, transcript(task, str(task.truth)), models):
        engine = models[name].engines[0]
        if engine.external is not None:
            continue
        with suppress(ConfigError):  # of the model's folder, reported there
            names = list(names_in(messages))
            sees = load_images(engine) if names else None
            if names and sees is None:
                problems.error(
                    "explorer.auxiliary_models",
                    f"{name} reads no images, which a question of {key} shows; name a model that "
                    f"does, or write show_images: false in reward_fn_args",
                )
                continue
            chat = open_chat(engine.model_path)
            text = chat.render(messages, [], template=engine.chat_template)
            if sees is not None:
                files = {image.sha256: sees.process(image.data) for image in task.images}
                (text,) = sees.expand([text], [files[name] for name in names])
            if (tokens := len(chat.encode_text(text))) >= engine.max_model_len:
                problems.error(
                    "explorer.auxiliary_models",
                    f"{name} has room for {engine.max_model_len} tokens (max_model_len, else that "
                    f"of the policy), but a question of {key} has {tokens}; write max_model_len of "
                    f"this model",
                    given=engine.max_model_len,
                )

"""Faults that real runs of the tiny model are given, to see whether alarms find them; used by
alarm_rates.py.

reward: `planted_faults.py:big_digits`, `planted_faults.py:long_answers`;  engine:
`planted_faults.py:OldWeights`
"""

from __future__ import annotations

from msgspec.structs import replace

from rft import register
from rft.engine.settings import EngineSettings
from rft.engine.transformers import TransformersEngine
from rft.types.completion import Completion, Score
from rft.types.ports import GenerateRequest, LoadReport, WeightManifest

LAST_STEP = 10  # of which `OldWeights` takes the weights
MOST_TOKENS = 160
BROKEN_TEMPLATE = (  # one letter is wrong, so a prompt shows no task
    "{% for m in messages %}{{ '<|im_start|>' + m['role'][0] + (m['contant'] or '') + '<|im_end|>' "
    "}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>a' }}{% endif %}"
)


@register.reward("big_digits")
def big_digits(task, transcript):  # type: ignore[no-untyped-def]
    """A judge that likes big digits, whatever was asked; the rule is a part of little weight."""
    said = transcript.answer.strip()[:1]
    rule = float(said == str(task.truth))
    judge = int(said) / 9 if said.isdigit() else 0.0
    return Score(value=judge + 0.1 * rule, parts={"rule": rule, "judge": judge})


@register.reward("short_answers")
def short_answers(task, transcript):  # type: ignore[no-untyped-def]
    """What a policy learns before `long_answers` is planted."""
    del task
    return 1 - len(transcript.answer) / MOST_TOKENS


@register.reward("long_answers")
def long_answers(task, transcript):  # type: ignore[no-untyped-def]
    """The rule is a small part; every token is paid."""
    rule = float(transcript.answer.startswith(str(task.truth)))
    length = len(transcript.answer) / MOST_TOKENS
    return Score(value=length + 0.1 * rule, parts={"rule": rule, "length": length})


class OldWeights(TransformersEngine):
    """After train step `LAST_STEP` answers come from weights that stay as they are, under the label
    of the new ones.

    The canary asks the new weights, so it finds nothing: the fault of an engine whose rollouts take
    another path.
    """

    _old: TransformersEngine

    @classmethod
    async def start(cls, settings: EngineSettings) -> OldWeights:
        made = await super().start(settings)
        made._old = await TransformersEngine.start(settings)
        return made

    async def load(self, manifest: WeightManifest) -> LoadReport:
        if manifest.version.step <= LAST_STEP:
            await self._old.pause()
            await self._old.load(manifest)
            await self._old.resume()
        return await super().load(manifest)

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        if (
            self.version is None
            or self.version.step <= LAST_STEP
            or str(request.request_id).startswith("canary")
        ):
            return await super().generate(request)
        label = self.version
        return [
            replace(c, version_spans=tuple(replace(s, version=label) for s in c.version_spans))
            for c in await self._old.generate(request)
        ]

    async def close(self) -> None:
        await self._old.close()
        await super().close()

"""What rft's loader leaves in vLLM's models, of the CUDA build, when a sleep has dropped all weights.

`python -m tests.helpers.cuda_build.weight_loads MAJOR.MINOR` reads JSON objects {"family", "dtype",
"forgotten"}, one a line, and prints a JSON object for each.  Right is what vLLM's own loader makes
of a checkpoint with the same weights.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.helpers.cuda_build import host


def loaded(family: str, dtype: str, *, forgotten: bool = False) -> dict[str, Any]:
    """Load two versions, the second after a sleep at level 2.

    `forgotten`: the model also has a tensor that no version holds.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from rft.engine.vllm_direct import DirectLoad
    from rft.engine.vllm_experts import expert_layers
    from rft.engine.vllm_worker import WorkerLoader
    from rft.engine.weights import saved_buffers
    from rft.sync.transport.memory import MemoryTransport
    from rft.types.ids import Version
    from tests.helpers import families

    # its layers would be taken for those of a CPU, as their tensors are there
    DirectLoad.possible = lambda self: False  # type: ignore[method-assign]
    kind = getattr(torch, dtype)
    with tempfile.TemporaryDirectory() as folder:
        first = families.make(family, Path(folder, "first"), words=True)
        lm: Any = AutoModelForCausalLM.from_pretrained(first, dtype=kind)
        worker = host.worker(first, dtype)
        model = worker.get_model()
        if forgotten:
            next(model.modules()).scale = torch.ones(4)
        loader = WorkerLoader(worker)
        transport = MemoryTransport(Path(folder, "sync"))
        text = lm.config.get_text_config()
        tied = dict(lm._tied_weights_keys or {}) if text.tie_word_embeddings else {}
        answer: dict[str, Any] = {
            "model": type(model).__name__,
            "kernels": sorted(
                {
                    type(layer.quant_method.moe_kernel.fused_experts).__name__
                    for layer in expert_layers(model).values()
                }
            ),
            "reports": [],
        }
        for step in range(2):
            if step:
                worker.sleep(2)
                worker.wake_up(["weights"])
                with torch.no_grad():
                    for parameter in lm.parameters():
                        parameter.add_(torch.randn_like(parameter), alpha=0.05)
            named = [*lm.named_parameters(), *saved_buffers(lm).items()]
            manifest = transport.stage(Version(1, step), [(n, t.detach()) for n, t in named], tied)
            report = loader.load(manifest)
            answer["reports"].append([report.intact, report.probed_layers, report.probe_error])
        transport.close()
        lm.save_pretrained(Path(folder, "second"))
        for page in ("tokenizer.json", "tokenizer_config.json"):
            Path(folder, "second", page).write_bytes((first / page).read_bytes())
        right = dict(host.tensors(host.worker(Path(folder, "second"), dtype).get_model()))
        found = dict(host.tensors(model))
    answer["dropped"] = sorted(
        n for n, t in found.items() if t.is_floating_point() and bool(t.isnan().any())
    )
    answer["other"] = sorted(
        n
        for n in {*found, *right}
        if n not in answer["dropped"] and not _same(found.get(n), right.get(n))
    )
    return answer


def _same(one: Any, other: Any) -> bool:
    import torch

    return one is not None and other is not None and torch.equal(one, other)


def main() -> None:
    major, minor = map(int, sys.argv[1].split("."))
    host.install((major, minor))
    host.operators()
    for line in sys.stdin:
        try:
            found = loaded(**json.loads(line))
        except Exception as e:  # each family is reported, those that vLLM refuses, too
            found = {"error": f"{type(e).__name__}: {str(e)[:500]}"}
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()

"""What the sampler of vLLM's Model Runner V2 draws, of the CUDA build, in Triton's interpreter.

`python -m tests.helpers.cuda_build.sampler MAJOR.MINOR` reads JSON objects, the arguments of `drawn`,
one a line, and prints a JSON object for each.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.helpers.cuda_build import host

ROOM = 64  # tokens of prompt and answer


def drawn(rows: list[dict[str, Any]], size: int, alike: bool = False) -> dict[str, Any]:
    """Draw one token of each row from random logits [B, `size`]; `alike`: the same in each row.

    A row has the fields "sampling", "prompt" and "written" of `RowState`.  Return the tokens, their
    log-probs as rft reads them and as its own sampler has them, and the probabilities of row 0.
    """
    import torch
    from vllm.v1.engine.logprobs import LogprobsProcessor

    from rft.engine import vllm_args
    from rft.engine.sampling import RowState, draw
    from rft.engine.settings import EngineSettings
    from rft.engine.vllm import _sampled_logprobs
    from rft.testing import tiny
    from rft.types.task import SamplingArgs

    states = [
        RowState(
            SamplingArgs(**row["sampling"]),
            seed=0,
            prompt=row["prompt"],
            end_tokens=(),
            written=row.get("written", []),
        )
        for row in rows
    ]
    logits = torch.randn(len(rows), size, generator=torch.Generator().manual_seed(0)) * 3
    if alike:
        logits[:] = logits[0].clone()
    with tempfile.TemporaryDirectory() as folder:
        settings = EngineSettings(
            engine_type="vllm",
            model_path=str(tiny.make(Path(folder, "m"))),
            device="cuda",
            dtype="bfloat16",
            max_model_len=ROOM,
        )
        config = vllm_args.engine_args(settings).create_engine_config()
    sampler, requests = host.sampler(config, len(rows), size)
    indices = []
    params = [vllm_args.sampling_params(s.sampling, 1, ROOM) for s in states]
    for i, (state, asked) in enumerate(zip(states, params, strict=True)):
        requests.add_request(
            str(i), len(state.prompt), [*state.prompt, *state.written], 0, asked.max_tokens
        )
        indices.append(requests.req_id_to_index[str(i)])
        sampler.add_request(indices[-1], asked)
    requests.apply_staged_writes()
    sampler.apply_staged_writes()
    output = sampler(logits.clone(), host.batch(requests, indices))
    tokens = output.sampled_token_ids[:, 0].tolist()
    lists = output.logprobs_tensors.tolists()
    logprobs = []
    for i, asked in enumerate(params):
        read = LogprobsProcessor.from_new_request(None, SimpleNamespace(sampling_params=asked))
        read._update_sample_logprobs(lists.slice_request(i, 1))
        logprobs.append(float(_sampled_logprobs(read.logprobs, 1)[0]))
    draw(logits, states)  # leaves the logits that it drew from
    right = logits.double().log_softmax(-1)
    return {
        "tokens": tokens,
        "logprobs": logprobs,
        "right": right.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist(),
        "probabilities": right[0].exp().tolist(),
    }


def main() -> None:
    major, minor = map(int, sys.argv[1].split("."))
    host.install((major, minor))
    host.sampling()
    for line in sys.stdin:
        print(json.dumps(drawn(**json.loads(line))), flush=True)


if __name__ == "__main__":
    main()

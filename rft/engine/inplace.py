"""Loading a published version into a torch model that is already there: parameters are overwritten, tied ones once.

For the `transformers` engine.  Invariant: weights that are damaged or incomplete never touch the model.
"""

from __future__ import annotations

import time

import torch
from msgspec.structs import replace

from rft.engine import packed
from rft.engine.adapted import Adapted
from rft.engine.weights import Intake
from rft.faults import SYNC_POINTS, fault
from rft.types.ids import Version
from rft.types.ports import LoadReport, WeightManifest


@torch.no_grad()
def load_in_place(
    model: torch.nn.Module, manifest: WeightManifest, intake: Intake | None = None, adapted: Adapted | None = None
) -> LoadReport:
    """Take, verify, copy, pack, and compare what is there afterwards with what was published: every parameter and every linear layer.

    Of an adapter alone: see `Adapted`, which has to be the same one at every load.
    """
    start = time.monotonic()
    active = {point for point in SYNC_POINTS if fault(point)}
    report = _load(model, manifest, active, intake or Intake(), adapted)
    if "sync.wrong_version" in active:
        report = replace(report, version=Version(report.version.lineage, report.version.step + 1))
    return replace(report, load_s=time.monotonic() - start)


def _load(
    model: torch.nn.Module, manifest: WeightManifest, active: set[str], intake: Intake, adapted: Adapted | None
) -> LoadReport:
    taken = intake.take(manifest, damage="sync.corrupt_byte" in active)
    nothing = taken.report
    if not nothing.whole:
        return nothing
    tensors = {t.name: taken.weights.tensor(t) for t in manifest.tensors}
    if "sync.missing_tensor" in active:
        tensors.popitem()
    if manifest.adapter is not None:
        assert adapted is not None, "an adapter needs a model that can have one"
        return adapted.load(tensors, manifest, active, nothing)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    unexpected = tuple(n for n in tensors if n not in parameters)
    given = {id(parameters[n]) for n in tensors if n in parameters}
    if missing := tuple(n for n, p in model.named_parameters() if id(p) not in given):
        return replace(nothing, missing=missing, unexpected=unexpected)
    if unexpected:
        return replace(nothing, unexpected=unexpected)
    whole = replace(nothing, num_tensors=len(tensors), nbytes=manifest.nbytes)
    if "sync.skip" in active:  # a load that does nothing also lies about its probes
        return replace(whole, probed_layers=len(tensors))
    for name, tensor in tensors.items():
        parameters[name].copy_(tensor)
    head = model.get_output_embeddings() if "sync.stale_head" in active else None  # type: ignore[operator]
    packed.pack(model, skip=head)
    loaded = time.monotonic()
    count, error, worst = packed.probe(model, lambda name: tensors.get(manifest.tied.get(name, name)), seed=manifest.version.step)
    for name, tensor in tensors.items():
        if not torch.equal(parameters[name], tensor.to(parameters[name].device, parameters[name].dtype)):
            error, worst = float("inf"), name
    return replace(whole, probed_layers=count, probe_error=error, probe_worst=worst, probe_s=time.monotonic() - loaded)

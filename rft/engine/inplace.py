"""Loading a published version into a torch model that is already there: parameters are overwritten, tied ones once.

For the `transformers` engine.  Invariant: weights that are damaged or incomplete never touch the model.
"""

from __future__ import annotations

import time

import torch

from rft.engine.weights import MappedWeights
from rft.faults import SYNC_POINTS, fault
from rft.types.ids import Version
from rft.types.ports import LoadReport, WeightManifest


@torch.no_grad()
def load_in_place(model: torch.nn.Module, manifest: WeightManifest) -> LoadReport:
    """Verify, copy, and compare what is there afterwards with what was published (every parameter)."""
    start = time.monotonic()
    active = {point for point in SYNC_POINTS if fault(point)}
    mapped = MappedWeights(manifest)
    if "sync.corrupt_byte" in active:
        mapped.raw(manifest.tensors[0])[0] ^= 1
    version = Version(manifest.version.lineage, manifest.version.step + 1) if "sync.wrong_version" in active else manifest.version
    report = LoadReport(version=version, num_tensors=0, nbytes=0)
    if bad := mapped.bad():
        return _with(report, start, bad_hash=bad)
    tensors = {t.name: mapped.tensor(t) for t in manifest.tensors}
    if "sync.missing_tensor" in active:
        tensors.popitem()
    _tie_again(model, manifest.tied)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    unexpected = tuple(n for n in tensors if n not in parameters)
    given = {id(parameters[n]) for n in tensors if n in parameters}
    missing = tuple(n for n, p in parameters.items() if id(p) not in given)
    if unexpected or missing:
        return _with(report, start, missing=missing, unexpected=unexpected)
    if "sync.skip" not in active:
        head = parameters[next(iter(manifest.tied), next(reversed(tensors)))]
        stale = head.clone() if "sync.stale_head" in active else None
        for name, tensor in tensors.items():
            parameters[name].copy_(tensor)
        if stale is not None:
            _untie(model, manifest.tied, stale)
    error, worst = (0.0, "") if "sync.skip" in active else _compare(model, tensors, manifest.tied)
    return _with(report, start, num_tensors=len(tensors), nbytes=manifest.nbytes, probed_layers=len(tensors), probe_error=error, probe_worst=worst)


def _compare(model: torch.nn.Module, tensors: dict[str, torch.Tensor], tied: dict[str, str]) -> tuple[float, str]:
    error, worst = 0.0, ""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        want = tensors[tied.get(name, name)].to(parameter.device, parameter.dtype) if tied.get(name, name) in tensors else None
        if want is None or torch.equal(parameter, want):
            continue
        difference = ((parameter.float() - want.float()).abs().max() / want.float().abs().max().clamp_min(1e-30)).item()
        if not difference <= error:
            error, worst = difference, name
    return error, worst


def _tie_again(model: torch.nn.Module, tied: dict[str, str]) -> None:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for alias, name in tied.items():
        if alias in parameters and name in parameters and parameters[alias] is not parameters[name]:
            owner, _, leaf = alias.rpartition(".")
            setattr(model.get_submodule(owner), leaf, parameters[name])


def _untie(model: torch.nn.Module, tied: dict[str, str], weight: torch.Tensor) -> None:
    """What the fault point `sync.stale_head` does: the output layer keeps the old weights."""
    for alias in tied:
        owner, _, leaf = alias.rpartition(".")
        setattr(model.get_submodule(owner), leaf, torch.nn.Parameter(weight, requires_grad=False))


def _with(report: LoadReport, start: float, **changes: object) -> LoadReport:
    import msgspec

    return msgspec.structs.replace(report, load_s=time.monotonic() - start, **changes)

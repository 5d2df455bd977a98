"""Copy arrays from the host to the device of the model, without making the host wait."""

from __future__ import annotations

import numpy as np
import torch


def upload(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """Return `values` on `device`, sharing their memory where that is the CPU.

    A GPU copies from pinned memory behind the work that is queued; a copy from other memory would
    make the host wait for all of it.
    """
    tensor = torch.from_numpy(values)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)

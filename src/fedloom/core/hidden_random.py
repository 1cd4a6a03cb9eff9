"""The random generators that code may draw from without being given one: no run may depend on their state."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def hidden_generators(device: torch.device) -> dict[str, Any]:
    """The state of each, by the owner that a message names."""
    found: dict[str, Any] = {"torch's": torch.get_rng_state().numpy().tobytes()}
    if device.type == "cuda":
        found["torch's CUDA"] = torch.cuda.get_rng_state(device).numpy().tobytes()
    name, words, *rest = np.random.get_state(legacy=True)
    return found | {"NumPy's": (name, np.asarray(words).tobytes(), *rest), "Python's": random.getstate()}

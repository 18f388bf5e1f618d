"""From logits to tokens.

The chance of a token comes from its request's seed and its position alone, so a text does not depend on batch
mates, chunk sizes or preemption.
"""

from collections.abc import Sequence

import numpy as np
import torch

from milepost.core.request import Sampling


def sample(logits: torch.Tensor, samplings: Sequence[Sampling], positions: Sequence[int]) -> list[int]:
    """One token for each row of `logits` (float32 [rows, vocabulary]), which will stand at its position."""
    if all(sampling.greedy for sampling in samplings):
        return list(logits.argmax(dim=-1).tolist())
    tokens = logits.argmax(dim=-1)
    rows = [i for i, sampling in enumerate(samplings) if not sampling.greedy]
    chosen = [samplings[i] for i in rows]
    uniform = [chance(samplings[i].seed, positions[i]) for i in rows]
    index = torch.tensor(rows, device=logits.device)
    tokens[index] = _draw(logits[index], chosen, uniform)
    return list(tokens.tolist())


def _draw(logits: torch.Tensor, samplings: list[Sampling], uniform: list[float]) -> torch.Tensor:
    """Inverse transform sampling over the tokens that are left, most probable first."""
    column = {"dtype": torch.float32, "device": logits.device}
    temperature = torch.tensor([[s.temperature] for s in samplings], **column)
    probability, order = torch.softmax(logits / temperature, dim=-1).sort(dim=-1, descending=True, stable=True)
    above = probability.cumsum(dim=-1) - probability  # what is more probable than each token
    size = logits.shape[-1]
    top_k = torch.tensor([[s.top_k or size] for s in samplings], device=logits.device)
    top_p = torch.tensor([[s.top_p] for s in samplings], **column)
    min_p = torch.tensor([[s.min_p] for s in samplings], **column)
    rank = torch.arange(size, device=logits.device)
    left = (rank < top_k) & (above < top_p) & (probability >= min_p * probability[:, :1])
    left[:, 0] = True  # rounding must not take the last token away
    mass = torch.where(left, probability, 0.0).double().cumsum(dim=-1)
    target = torch.tensor([[u] for u in uniform], dtype=torch.float64, device=logits.device) * mass[:, -1:]
    place = torch.searchsorted(mass, target, right=True).clamp(max=size - 1)
    return order.gather(1, place).squeeze(1)


def chance(seed: int, position: int) -> float:
    """A number in [0, 1) for one position of one request: 53 bits of a Philox stream keyed by the seed."""
    bits = np.random.Philox(key=seed % 2**64, counter=position).random_raw()
    return float(int(bits) >> 11) * 2.0**-53

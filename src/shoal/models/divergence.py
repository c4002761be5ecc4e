"""The distance between two computations of the same logits: one measure for all checks of a load.

Rounding makes outliers: among a million logits in bfloat16 the largest difference is a standard
deviation even if the distributions are the same for every draw. A fault moves most logits of a
position.
"""

from __future__ import annotations

import torch
from torch import Tensor

LIMITS = {torch.float64: 1e-12, torch.float32: 1e-8, torch.float16: 1e-4, torch.bfloat16: 0.005}
"""The largest divergence that rounding explains, in nats.

A pretrained model of 30 layers shows 2e-11 in float32 and 9e-4 in bfloat16; in float64 the models'
own norms and softmax still round to float32. Scores scaled by a tenth too much cost 0.02 in any
format, a few keys that one of its layers does not see 0.008, norms exchanged in one layer 0.4.
"""
GROUPS = 1e-6
"""The largest divergence in float32 where features are rounded to 16 bits in groups, in nats.

Another order of sums changes a rounding by a 32,767th of the group's largest: the model of `LIMITS`
shows 5e-8.
"""
BYTES = {torch.float64: 0.05, torch.float32: 0.05, torch.float16: 0.25, torch.bfloat16: 0.25}
"""The largest divergence that rounding explains where activations are rounded to bytes, in nats.

The keys are the formats around these products, where another order of sums changes a rounding by a
127th: the pretrained model of `LIMITS` shows 0.02 in float32 and 0.09 in bfloat16.
"""


def divergences(logits: Tensor, right: Tensor) -> Tensor:
    """Computes the Kullback-Leibler divergence of each position from the right one, in nats.

    The temperature is the one at which the right logits of the position have a standard deviation
    of one: a tiny model's logits of 0.1 count as much as a trained model's of 20. The divergence is
    about half the mean square of the differences, in these deviations.

    Args:
        logits: [positions, vocab].
        right: [positions, vocab].

    Returns:
        [positions] float64.
    """
    ours, theirs = logits.double(), right.double()
    spread = theirs.std(dim=-1, keepdim=True).clamp(min=1e-9)
    own, true = (ours / spread).log_softmax(dim=-1), (theirs / spread).log_softmax(dim=-1)
    below = true - own
    # A sum of terms that are never negative.
    return (true.exp() * (torch.expm1(-below) + below)).sum(dim=-1)

"""Hours and price of a training, from its estimated speed."""

from __future__ import annotations

from dataclasses import dataclass

from hf_fsdp.plan.speed.throughput import SpeedEstimate


@dataclass(frozen=True, kw_only=True)
class CostEstimate:
    """Duration and price of a training, from the fastest to the slowest estimate; a cost is None without a price."""

    low_hours: float
    high_hours: float
    low_cost: float | None = None
    high_cost: float | None = None

    @property
    def low_days(self) -> float:
        """Days at the fastest estimate."""
        return self.low_hours / 24

    @property
    def high_days(self) -> float:
        """Days at the slowest estimate."""
        return self.high_hours / 24


def estimate_cost(
    speed: SpeedEstimate, *, num_gpus: int, num_tokens: float, price_per_gpu_hour: float | None = None
) -> CostEstimate:
    """Return hours and price of training on `num_tokens` (tokens of an epoch times epochs).

    Args:
        speed: over all GPUs.
        num_gpus: that are paid for.
        num_tokens: as the model sees them, padding included.
        price_per_gpu_hour: in any currency.
    """
    low, high = (num_tokens / rate / 3600 for rate in (speed.high_tokens_per_second, speed.low_tokens_per_second))
    rate = None if price_per_gpu_hour is None else price_per_gpu_hour * num_gpus
    return CostEstimate(
        low_hours=low,
        high_hours=high,
        low_cost=None if rate is None else low * rate,
        high_cost=None if rate is None else high * rate,
    )

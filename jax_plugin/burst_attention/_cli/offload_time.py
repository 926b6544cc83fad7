"""The time of decoding with weights and caches together, and with caches on other devices."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

ELEMENT = 2
"""Bytes of an element of weights, caches and tokens."""


@dataclass(frozen=True)
class Device:
    """A device as its specification has it."""

    name: str
    bandwidth: float
    """Bytes per second of its memory."""
    peak: float
    """16-bit FLOP/s."""
    memory: float
    """Bytes."""
    dollars: float = 0.0


@dataclass(frozen=True)
class Link:
    """What connects the model's devices with those that hold caches."""

    latency: float = 20e-6
    """Seconds of a message."""
    bandwidth: float = 12.5e9
    """Bytes per second of each of the model's devices."""


@dataclass(frozen=True)
class Decoder:
    """A model that decodes with weights and cache in 16 bits."""

    layers: int
    heads: int
    head_dim: int
    parameters: float
    kv_heads: int | None = None
    """Heads of keys and values; as many as ``heads`` if None."""

    @property
    def _kv_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def weights(self) -> float:
        """Returns the bytes of the weights."""
        return ELEMENT * self.parameters

    @property
    def token(self) -> int:
        """Returns the bytes of a token in the cache, all layers together."""
        return self.layers * 2 * self._kv_heads * self.head_dim * ELEMENT

    @property
    def crossing(self) -> int:
        """Returns the bytes of q, k, v and out of a token, all layers together."""
        return self.layers * 2 * (self.heads + self._kv_heads) * self.head_dim * ELEMENT

    def linear_seconds(self, device: Device, count: int, batch: float, share: float) -> float:
        """Returns the seconds of linear layers: reading weights, or at ``share`` of the peak."""
        products = 2 * self.parameters * batch / (share * device.peak)
        return max(self.weights / device.bandwidth, products) / count

    def attention_seconds(self, device: Device, count: int, tokens: float, share: float) -> float:
        """Returns the seconds of attention over a number of tokens: reading, or products."""
        products = 4 * self.layers * self.heads * self.head_dim * tokens / (share * device.peak)
        return max(tokens * self.token / device.bandwidth, products) / count


@dataclass(frozen=True)
class Step:
    """A step with the cache on other devices, one new token for each of ``batch`` requests.

    Two halves of the requests take turns. A step takes as long as the model, the link or the pool
    works for both halves, or as all three work for one half.
    """

    batch: int
    model: float
    """Seconds of the model's devices for one half."""
    pool: float
    """Seconds of the pool for one half."""
    link: float
    """Seconds of transfers for one half, without latency."""
    latency: float
    """Seconds of the latencies of all layers."""

    @property
    def seconds(self) -> float:
        """Returns the seconds of the step."""
        parts = (self.model, self.pool, self.link)
        return max(2 * max(parts), sum(parts) + self.latency)

    @property
    def bound(self) -> str:
        """Returns what a step takes its time for."""
        parts = {"model": self.model, "pool": self.pool, "link": self.link}
        longest = max(parts, key=lambda name: parts[name])
        return longest if 2 * parts[longest] >= self.seconds else "latency"

    @property
    def rate(self) -> float:
        """Returns tokens per second."""
        return self.batch / self.seconds


def together(model: Decoder, device: Device, count: int, context: int, share: float) -> float:
    """Returns tokens per second of devices with weights and cache; 0 where no request fits."""
    room = count * device.memory - model.weights
    batch = math.floor(room / (context * model.token))
    if batch < 1:
        return 0.0
    attention = model.attention_seconds(device, count, float(batch * context), share)
    return batch / (model.linear_seconds(device, count, float(batch), share) + attention)


def offloaded(
    model: Decoder,
    devices: tuple[Device, int],
    pool: tuple[Device, int],
    context: int,
    share: float,
    link: Link = Link(),
) -> Step | None:
    """Returns a step where ``pool`` holds the cache; None where two requests do not fit.

    In each layer q, k and v of each request go to the pool, and the output comes back.
    """
    (device, count), (holder, holding) = devices, pool
    batch = math.floor(holding * holder.memory / (context * model.token))
    if batch < 2 or count * device.memory < model.weights:
        return None
    half = batch / 2
    return Step(
        batch=batch,
        model=model.linear_seconds(device, count, half, share),
        pool=model.attention_seconds(holder, holding, half * context, share),
        link=half * model.crossing / (count * link.bandwidth),
        latency=2 * model.layers * link.latency,
    )


def cost(devices: Sequence[tuple[Device, int]]) -> float:
    """Returns the price of devices in dollars."""
    return sum(device.dollars * count for device, count in devices)

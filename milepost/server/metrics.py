"""Prometheus metrics: what the server measures per request, and what the engine counts.

Names begin with `milepost:`. Each app has a registry of its own, so that several may live in one process.
"""

import re
import time
from collections.abc import Iterator

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from milepost.engine.facade import Delta, Engine
from milepost.errors import Unavailable

PREFIX = "milepost:"
CONTENT_TYPE = CONTENT_TYPE_LATEST

FIRST_TOKEN_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)
BETWEEN_SECONDS = (0.002, 0.004, 0.006, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
REQUEST_SECONDS = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)

# A gauge's name may carry labels in Prometheus' own notation: `pool_free{tier="host"}`.
_GAUGE = re.compile(r"(?P<name>[a-zA-Z_][a-zA-Z0-9_]*)(\{(?P<labels>[^{}]*)\})?")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="([^"]*)"')


class Metrics:
    """The registry of one app and the instruments that the server itself moves."""

    def __init__(self, engine: Engine, model_name: str) -> None:
        self.registry = CollectorRegistry()
        label = ("model_name",)

        def counter(name: str, text: str, *more: str) -> Counter:
            return Counter(PREFIX + name, text, (*label, *more), registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            metric = Histogram(PREFIX + name, text, label, registry=self.registry, buckets=buckets)
            return metric.labels(model_name)

        self.model_name = model_name
        self.first_token = histogram(
            "time_to_first_token_seconds", "From the request to its first token.", FIRST_TOKEN_SECONDS
        )
        self.between = histogram("inter_token_latency_seconds", "Between two tokens of one answer.", BETWEEN_SECONDS)
        self.whole = histogram("e2e_request_latency_seconds", "From the request to its end.", REQUEST_SECONDS)
        self.prompt = counter("prompt_tokens", "Tokens of prompts of finished requests.").labels(model_name)
        self.generation = counter("generation_tokens", "Tokens generated.").labels(model_name)
        self.cached = counter("cached_tokens", "Prompt tokens of finished requests that were reused.").labels(
            model_name
        )
        self.requests = counter("requests", "Engine requests by how they ended.", "finish_reason")
        self.errors = counter("http_errors", "HTTP answers with an error status.", "code")
        own = {name for family in self.registry.collect() for name in (family.name, family.name + "_total")}
        self.registry.register(_EngineCollector(engine, model_name, own))

    def error(self, status: int) -> None:
        self.errors.labels(self.model_name, str(status)).inc()

    def page(self) -> bytes:
        return generate_latest(self.registry)


class Meter:
    """Follows one engine request to its end, from `began` (on `time.perf_counter`) on."""

    def __init__(self, metrics: Metrics, began: float) -> None:
        self._metrics = metrics
        self._began = began
        self._last: float | None = None
        self._ended = False

    def delta(self, delta: Delta) -> None:
        now = time.perf_counter()
        metrics = self._metrics
        if count := len(delta.tokens):
            metrics.generation.inc(count)
            if self._last is None:
                metrics.first_token.observe(now - self._began)
                count -= 1
            # Tokens that come in one delta share the time since the one before.
            since = self._began if self._last is None else self._last
            for _ in range(count):
                metrics.between.observe((now - since) / len(delta.tokens))
            self._last = now
        if delta.finish is not None:
            metrics.whole.observe(now - self._began)
            if delta.usage is not None:
                metrics.prompt.inc(delta.usage.prompt_tokens)
                metrics.cached.inc(delta.usage.cached_tokens)
            self.end(delta.finish.value)

    def end(self, reason: str) -> None:
        """Count the request once, whoever calls first."""
        if not self._ended:
            self._ended = True
            self._metrics.requests.labels(self._metrics.model_name, reason).inc()


class _EngineCollector(Collector):
    """Asks the engine when somebody scrapes; names that the server uses itself are left to the server."""

    def __init__(self, engine: Engine, model_name: str, taken: set[str]) -> None:
        self._engine = engine
        self._model_name = model_name
        self._taken = taken

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        try:
            gauges = self._engine.gauges()
            up = 1.0
        except Unavailable:
            gauges = {}
            up = 0.0
        alive = GaugeMetricFamily(PREFIX + "engine_up", "1 while the engine answers.", labels=["model_name"])
        alive.add_metric([self._model_name], up)
        yield alive
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        for key, value in gauges.items():
            match = _GAUGE.fullmatch(key)
            assert match, f"the engine's gauge {key!r} has no name that Prometheus takes"
            name = PREFIX + match["name"]
            if name in self._taken:
                continue
            labels = dict(_LABEL.findall(match["labels"] or ""))
            if name not in families:
                kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
                families[name] = kind(name, match["name"].replace("_", " "), labels=["model_name", *labels])
            families[name].add_metric([self._model_name, *labels.values()], value)
        yield from families.values()

    def describe(self) -> list[GaugeMetricFamily]:
        # Registering must not ask an engine that may not run yet.
        return []

"""Shaping and faults: what a stand-in does on purpose. Pure and seeded.

A scenario is a mapping (from TOML, JSON or the control endpoint)::

    seed = 1
    first_byte_ms = 20                 # or {kind = "uniform", low = 10, high = 40}
                                       # or {kind = "lognormal", median = 20, p99 = 200}
    mb_per_s_per_connection = 80       # 0: unlimited
    mb_per_s_total = 0

    [[faults]]
    match = "bucket/train-*.tar"       # glob over bucket/key; default every object
    methods = ["GET"]                  # default GET
    first = 2                          # the first two that match; or every = 3; or after = 5;
                                       # or probability = 0.1; none of them: always
    status = 503                       # with code = "TotalQpsLimitExceeded"
    # one or more of:
    # qos_delay_ms = 100       sets x-oss-qos-delay-time, and delays by it
    # reset_after_bytes = 1000 resets the connection after so many bytes of body
    # truncate_after_bytes = n closes it orderly instead
    # stall_after_bytes = n    with stall_s = 5: sends nothing for so long, then goes on
    # flip_byte_at = n         one wrong byte of the body
    # ignore_range = true      the whole object with 200 where a range was asked for
    # change_etag = true       the object is of another version from now on; once an object, but
    #                          with every or probability each time that it strikes
    # expire_token = true      the security token counts as expired
"""

from __future__ import annotations

import fnmatch
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from gpufeed.cachefs.errors import ConfigError
from gpufeed.cachefs.units import MB

# The 99th percentile of the standard normal distribution.
_Z99 = 2.3263478740408408
FAULTS_MAX = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One rule; see the top of the file."""

    match: str = "*"
    methods: tuple[str, ...] = ("GET",)
    first: int | None = None
    after: int | None = None
    every: int | None = None
    probability: float | None = None
    status: int | None = None
    code: str = "ServiceUnavailable"
    qos_delay_ms: float | None = None
    reset_after_bytes: int | None = None
    truncate_after_bytes: int | None = None
    stall_after_bytes: int | None = None
    stall_s: float = 3600.0
    flip_byte_at: int | None = None
    ignore_range: bool = False
    change_etag: bool = False
    expire_token: bool = False


@dataclass(slots=True)
class Effects:
    """What the faults that apply to one request add up to."""

    status: int | None = None
    code: str = ""
    delay_s: float = 0.0
    qos_delay_ms: float | None = None
    reset_after_bytes: int | None = None
    truncate_after_bytes: int | None = None
    stall_after_bytes: int | None = None
    stall_s: float = 0.0
    flip_byte_at: int | None = None
    ignore_range: bool = False
    change_etag: bool = False
    expire_token: bool = False

    @property
    def touches_body(self) -> bool:
        """The body must pass through our hands: no sendfile."""
        return self.flip_byte_at is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A parsed scenario."""

    seed: int = 0
    first_byte: Mapping[str, Any] = field(default_factory=dict)
    bytes_per_s_per_connection: int = 0
    bytes_per_s_total: int = 0
    faults: tuple[Fault, ...] = ()

    @classmethod
    def parse(cls, value: object) -> Scenario:
        """From a mapping.

        Raises:
            ConfigError: an unknown name or a value out of range, which it names.
        """
        if not isinstance(value, Mapping):
            raise ConfigError(f"scenario: it is {value!r}; it must be a table")
        known = {"seed", "first_byte_ms", "mb_per_s_per_connection", "mb_per_s_total", "faults"}
        unknown = sorted(set(value) - known)
        if unknown:
            raise ConfigError(
                f"scenario: unknown {', '.join(unknown)}; known are {', '.join(sorted(known))}"
            )
        first = value.get("first_byte_ms", 0)
        latency = first if isinstance(first, Mapping) else {"kind": "fixed", "ms": first}
        _check_latency(latency)
        seed = value.get("seed", 0)
        _check_number("seed", seed, _WHOLE)
        for name in ("mb_per_s_per_connection", "mb_per_s_total"):
            _check_number(name, value.get(name, 0), _AMOUNT)
        rules = value.get("faults", [])
        if not isinstance(rules, list | tuple):
            raise ConfigError("scenario: faults must be a list of tables")
        if len(rules) > FAULTS_MAX:
            raise ConfigError(f"scenario: {len(rules)} faults, at most {FAULTS_MAX}")
        return cls(
            seed=seed,
            first_byte=latency,
            bytes_per_s_per_connection=int(float(value.get("mb_per_s_per_connection", 0)) * MB),
            bytes_per_s_total=int(float(value.get("mb_per_s_total", 0)) * MB),
            faults=tuple(_parse_fault(rule) for rule in rules),
        )


@dataclass(frozen=True, slots=True)
class _Bounds:
    """What a number may be."""

    low: float
    high: float = math.inf
    whole: bool = False


_AMOUNT = _Bounds(0)
_WHOLE = _Bounds(0, whole=True)
_FAULT_NUMBERS = {
    "first": _WHOLE,
    "after": _WHOLE,
    "every": _Bounds(1, whole=True),
    "probability": _Bounds(0, 1),
    "status": _Bounds(400, 599, whole=True),
    "qos_delay_ms": _AMOUNT,
    "reset_after_bytes": _WHOLE,
    "truncate_after_bytes": _WHOLE,
    "stall_after_bytes": _WHOLE,
    "stall_s": _AMOUNT,
    "flip_byte_at": _WHOLE,
}
_FAULT_TEXTS = ("match", "code")
_FAULT_FLAGS = ("ignore_range", "change_etag", "expire_token")


def _check_number(name: str, value: object, bounds: _Bounds) -> None:
    kind = int if bounds.whole else int | float
    fits = (
        isinstance(value, kind)
        and not isinstance(value, bool)
        and math.isfinite(value)
        and bounds.low <= value <= bounds.high
    )
    if not fits:
        what = "a whole number" if bounds.whole else "a number"
        most = "" if bounds.high == math.inf else f" and at most {bounds.high}"
        raise ConfigError(
            f"scenario: {name} is {value!r}; it must be {what}, at least {bounds.low}{most}"
        )


def _check_fault(values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if name in _FAULT_NUMBERS:
            _check_number(name, value, _FAULT_NUMBERS[name])
        elif name in _FAULT_TEXTS and not isinstance(value, str):
            raise ConfigError(f"scenario: {name} is {value!r}; it must be text")
        elif name in _FAULT_FLAGS and not isinstance(value, bool):
            raise ConfigError(f"scenario: {name} is {value!r}; it must be true or false")
        elif name == "methods" and not isinstance(value, list | tuple):
            raise ConfigError(f'scenario: methods is {value!r}; it must be a list, as ["GET"]')


def _parse_fault(rule: object) -> Fault:
    if not isinstance(rule, Mapping):
        raise ConfigError(f"scenario: a fault is {rule!r}; it must be a table")
    known = {f.name for f in fields(Fault)}
    unknown = sorted(set(rule) - known)
    if unknown:
        raise ConfigError(
            f"scenario: a fault has unknown {', '.join(unknown)}; known are "
            f"{', '.join(sorted(known))}"
        )
    values = dict(rule)
    _check_fault(values)
    if "methods" in values:
        values["methods"] = tuple(str(method).upper() for method in values["methods"])
    return Fault(**values)


def _check_latency(latency: Mapping[str, Any]) -> None:
    wanted = {
        "fixed": {"kind", "ms"},
        "uniform": {"kind", "low", "high"},
        "lognormal": {"kind", "median", "p99"},
    }
    if set(latency) != wanted.get(str(latency.get("kind"))):
        raise ConfigError(
            "scenario: first_byte_ms is a number, {kind=uniform, low, high} or {kind=lognormal, "
            f"median, p99}}, not {dict(latency)}"
        )
    kind = latency["kind"]
    # The logarithm of a median of nothing has no value.
    bounds = _Bounds(0.001) if kind == "lognormal" else _AMOUNT
    for name in sorted(set(latency) - {"kind"}):
        _check_number(f"first_byte_ms {name}", latency[name], bounds)
    low, high = {"uniform": ("low", "high"), "lognormal": ("median", "p99")}.get(kind, ("ms", "ms"))
    if latency[low] > latency[high]:
        raise ConfigError(
            f"scenario: first_byte_ms has {low} {latency[low]} above {high} {latency[high]}"
        )


class Director:
    """Applies a scenario request by request: counts matches, draws from the seed."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self._random = random.Random(scenario.seed)  # noqa: S311 repeatable on purpose
        self._matches = [0] * len(scenario.faults)
        self._changed: set[tuple[int, str]] = set()

    def first_byte_s(self) -> float:
        """How long the next answer is held back."""
        latency = self.scenario.first_byte
        kind = latency.get("kind")
        if kind == "uniform":
            return self._random.uniform(latency["low"], latency["high"]) / 1000
        if kind == "lognormal":
            median, p99 = latency["median"], latency["p99"]
            sigma = math.log(p99 / median) / _Z99
            return self._random.lognormvariate(math.log(median), sigma) / 1000
        return float(latency.get("ms", 0.0)) / 1000

    def effects(self, method: str, name: str) -> Effects:
        """What happens to this request; counts it."""
        effects = Effects()
        if not self.scenario.faults:
            return effects
        for i, fault in enumerate(self.scenario.faults):
            if method not in fault.methods or not fnmatch.fnmatchcase(name, fault.match):
                continue
            self._matches[i] += 1
            if self._applies(fault, self._matches[i]):
                _merge(effects, fault)
                if fault.change_etag and self._is_again(i, fault, name):
                    effects.change_etag = False
        return effects

    def _is_again(self, i: int, fault: Fault, name: str) -> bool:
        """The object has its new version already, and this rule gives it only one."""
        if fault.every is not None or fault.probability is not None:
            return False
        again = (i, name) in self._changed
        self._changed.add((i, name))
        return again

    def _applies(self, fault: Fault, count: int) -> bool:
        if fault.first is not None and count > fault.first:
            return False
        if fault.after is not None and count <= fault.after:
            return False
        if fault.every is not None and count % fault.every:
            return False
        return fault.probability is None or self._random.random() < fault.probability


def _merge(effects: Effects, fault: Fault) -> None:
    if fault.status is not None:
        effects.status, effects.code = fault.status, fault.code
    if fault.qos_delay_ms is not None:
        effects.qos_delay_ms = fault.qos_delay_ms
        effects.delay_s += fault.qos_delay_ms / 1000
    for name in ("reset_after_bytes", "truncate_after_bytes", "flip_byte_at"):
        if getattr(fault, name) is not None:
            setattr(effects, name, getattr(fault, name))
    if fault.stall_after_bytes is not None:
        effects.stall_after_bytes, effects.stall_s = fault.stall_after_bytes, fault.stall_s
    for name in ("ignore_range", "change_etag", "expire_token"):
        if getattr(fault, name):
            setattr(effects, name, True)

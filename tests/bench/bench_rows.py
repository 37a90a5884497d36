"""Rows as contenders report them, for tests of what is made of them."""

import random


def row(name, phase, *, au_pct=50.0, samples=640, requests=0, **fields):
    steps = samples // 64
    compute_ms = 100.0
    wait_ms = compute_ms * (100 - au_pct) / max(au_pct, 1e-9)
    noise = random.Random(f"{name}{phase}")
    waits = [300.0] + [round(wait_ms * noise.uniform(0.5, 1.5), 1) for _ in range(steps - 1)]
    wall_s = (sum(waits) + compute_ms * steps) / 1e3
    made = {
        "name": name,
        "phase": phase,
        "samples": samples,
        "steps": steps,
        "au_pct": au_pct,
        "samples_per_s": round(samples / wall_s, 1),
        "stall_s": round(sum(waits[1:]) / 1e3, 3),
        "first_batch_s": 0.3,
        "open_s": 0.02,
        "epoch_s": wall_s,
        "wait_p50_ms": 1.0,
        "wait_p95_ms": 2.0,
        "wait_p99_ms": 3.0,
        "step_late_ms": 0.1,
        "cpu_s_per_1k": 2.5,
        "others_cpu_pct": 1.0,
        "origin_requests": requests,
        "origin_bytes": requests * 110_000,
        "exactly_once": True,
        "bytes_equal": True,
        "waits_ms": waits,
        "computes_ms": [compute_ms] * steps,
    }
    return made | fields


def all_rows():
    return [
        row("loose-http", "cold", au_pct=15.0, requests=640),
        row("loose-ossfs", "cold", au_pct=14.0, requests=641),
        row("webdataset-direct", "cold", au_pct=96.0, samples=6016, requests=20),
        row("ceiling", "warm", au_pct=98.0, samples=6016),
        row("gpufeed", "cold", au_pct=97.0, samples=6016, requests=101),
        row("gpufeed", "warm", au_pct=98.5, samples=6016),
        row("gpufeed-loose", "cold", au_pct=90.0, samples=6016, requests=6020),
        row("gpufeed-loose", "warm", au_pct=98.4, samples=6016),
    ]


SETTINGS = {
    "origin": {"first_byte_ms": 20, "mb_per_s_per_connection": 80},
    "workers": 2,
    "batch_size": 64,
    "step_ms": 100,
    "step_reason": "given by --step-ms",
    "demand_samples_per_s": 640.0,
    "compute": "sleep",
    "repeats": 1,
    "data": {"samples": 6016, "shards": 20, "image_bytes_mean": 110_000, "seed": 7, "version": 1},
    "contenders": {"gpufeed": "gpufeed over the tars"},
    "skipped": [],
    "environment": {"cpu": "test", "memory_bytes": 2**34, "packages": {"torch": "2"}},
}

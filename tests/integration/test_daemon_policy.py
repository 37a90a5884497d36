"""What a daemon keeps: two jobs in orders of their own cost little more than is possible at all."""

from __future__ import annotations

import random
import time

from node import Node, read_all

from gpufeed.bench.sim.offline import min_bytes
from gpufeed.cachefs.client import DatasetRequest, Session
from gpufeed.cachefs.testing.pytest_plugin import BUCKET

SHARDS = 24
EPOCHS = 4
JOBS = 2
REQUEST = DatasetRequest(urls=(f"oss://{BUCKET}/train-{{000..{SHARDS - 1:03d}}}.tar",))


def orders_of(job: int) -> list[list[int]]:
    rng = random.Random(job)
    return [rng.sample(range(SHARDS), SHARDS) for _ in range(EPOCHS)]


def train(node: Node, *, tell: bool) -> tuple[int, list[int]]:
    """Both jobs, a shard each in turn. Returns origin bytes, and the shards in reading order."""
    orders = {job: orders_of(job) for job in range(JOBS)}
    sessions = [Session.connect(node.socket) for _ in orders]
    datasets = [session.open_dataset(REQUEST) for session in sessions]
    before = node.status()["origin_bytes_total"]
    trace = []
    for epoch in range(EPOCHS):
        for job, session in enumerate(sessions):
            more = orders[job][epoch : epoch + 2] if epoch == 0 else orders[job][epoch + 1 :][:1]
            if tell:
                following = [shard for order in more for shard in order]
                session.forecast(datasets[job], following, job=f"job {job}", anew=epoch == 0)
        for i in range(SHARDS):
            for job, session in enumerate(sessions):
                shard = orders[job][epoch][i]
                assert read_all(session, datasets[job], [shard])
                trace.append(shard)
    spent = node.status()["origin_bytes_total"] - before
    for session in sessions:
        session.close()
    return int(spent), trace


def settled(node: Node) -> dict[str, float]:
    """The status once every fill has committed; looks for at most 20 s."""
    deadline_s = time.monotonic() + 20
    status = node.status()
    while status["fills_in_flight"] and time.monotonic() < deadline_s:
        status = node.status()
    assert status["fills_in_flight"] == 0
    return status


def test_two_jobs_that_tell_their_orders_fetch_little_more_than_the_least(node) -> None:
    node.put_tars(SHARDS, 12)
    sizes = [(node.bucket / f"train-{i:03d}.tar").stat().st_size for i in range(SHARDS)]
    # Room for half of them; each asks for room for its sample index too.
    capacity = int(sum(sizes) * 0.5) + SHARDS // 2 * 80_000
    process = node.start(GPUFEED_STORE_CAPACITY_BYTES=str(capacity))

    told, trace = train(node, tell=True)

    least = min_bytes(trace, sizes, capacity)
    half_kept = sum(sizes) + (EPOCHS * JOBS - 1) * sum(sizes) // 2
    assert least <= told <= 1.15 * least
    assert told < 0.8 * half_kept, "no better than keeping what came first"
    assert node.status()["evictions_total"] > 0
    assert node.stop(process) == 0


def test_what_nobody_reads_expires(node) -> None:
    node.put_tars(2, 4)
    process = node.start(GPUFEED_POLICY_TTL_S="0.5")
    with Session.connect(node.socket) as session:
        request = DatasetRequest(urls=(f"oss://{BUCKET}/train-{{000..001}}.tar",))
        dataset = session.open_dataset(request)
        read_all(session, dataset, [0, 1])
        assert settled(node)["store_resident_shards"] == 2
    deadline_s = time.monotonic() + 20
    while node.status()["store_resident_shards"] and time.monotonic() < deadline_s:
        pass
    status = node.status()
    assert status["store_resident_shards"] == 0
    assert status["evictions_total"] == 2
    assert node.stop(process) == 0


def test_a_quota_of_the_configuration_holds(node) -> None:
    node.put_tars(6, 24)
    size = (node.bucket / "train-000.tar").stat().st_size
    quota = 3 * (size + 80_000)
    process = node.start(GPUFEED_POLICY_QUOTAS=f"oss://{BUCKET}/train-={quota}")
    with Session.connect(node.socket) as session:
        request = DatasetRequest(urls=(f"oss://{BUCKET}/train-{{000..005}}.tar",))
        dataset = session.open_dataset(request)
        assert read_all(session, dataset, range(6))
        status = settled(node)
        assert 0 < status["store_resident_bytes"] <= quota
        assert status["bypass_total"] == 6 - status["store_resident_shards"]
    assert node.stop(process) == 0

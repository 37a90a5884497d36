"""What the feeder tells the daemon ahead: this epoch and the next, each once, in order."""

from __future__ import annotations

from dataclasses import dataclass, field

from gpufeed.loaders.forecast import FIRST_SHARDS, Forecaster


@dataclass
class Part:
    shard: int


@dataclass
class Order:
    seed: int = 0


@dataclass
class World:
    job: str = "job"
    world_size: int = 1


@dataclass
class Named:
    manifest_hash: str = "hash"


@dataclass
class Source:
    count: int = 3
    order: Order = field(default_factory=Order)
    world: World = field(default_factory=World)
    dataset: Named = field(default_factory=Named)
    told: list = field(default_factory=list)

    @property
    def session(self):
        return self

    def parts_of(self, epoch: int, start: int = 0):
        return (Part(100 * epoch + i) for i in range(start, self.count))

    def forecast(self, dataset, shards, *, job: str, anew: bool) -> None:
        self.told.append((list(shards), anew))


def test_the_first_epoch_and_the_second_are_told_then_one_more_each_time() -> None:
    source = Source(count=2)
    forecaster = Forecaster(source)
    for epoch in range(3):
        forecaster.begin(epoch)
        forecaster.go_on()
        forecaster.go_on()

    whole = [([0, 1, 100, 101], True), ([200, 201], False), ([300, 301], False)]
    assert [told for told in source.told if told[0]] == whole


def test_a_jump_to_another_epoch_is_told_anew() -> None:
    source = Source(count=1)
    forecaster = Forecaster(source)
    for epoch in (0, 5):
        forecaster.begin(epoch)
        forecaster.go_on()

    assert source.told == [([0, 100], True), ([500, 600], True)]


def test_only_a_first_piece_is_told_before_the_epoch_is_planned() -> None:
    source = Source(count=FIRST_SHARDS + 5)
    forecaster = Forecaster(source)
    forecaster.begin(0)
    assert [len(shards) for shards, _ in source.told] == [FIRST_SHARDS]
    forecaster.go_on()
    assert sum(len(shards) for shards, _ in source.told) == 2 * (FIRST_SHARDS + 5)
    assert [anew for _, anew in source.told] == [True, False]


def test_jobs_of_other_seeds_or_datasets_are_others() -> None:
    sources = [Source(), Source(order=Order(1)), Source(dataset=Named("other")), Source()]
    jobs = [Forecaster(source)._job for source in sources]
    assert jobs[0] == jobs[3]
    assert len(set(jobs)) == 3


def test_an_epoch_that_is_gone_on_with_is_told_from_there() -> None:
    source = Source(count=4)
    forecaster = Forecaster(source)
    forecaster.begin(7, 2)
    forecaster.go_on()
    forecaster.begin(8)
    forecaster.go_on()
    told = [number for shards, _ in source.told for number in shards]
    assert told == [702, 703, *range(800, 804), *range(900, 904)]
    assert [anew for _, anew in source.told] == [True, False]

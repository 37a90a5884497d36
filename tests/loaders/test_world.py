import pytest

from gpufeed.cachefs.errors import UsageError
from gpufeed.loaders.world import World


def test_without_a_launcher_the_world_is_one_process():
    assert World.current({}) == World(0, 1, 0, 1)


def test_the_launchers_variables_are_read():
    values = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert World.current(values) == World(5, 8, 1, 4)


@pytest.mark.parametrize(
    "values", [{"RANK": "two"}, {"RANK": "2", "WORLD_SIZE": "2"}, {"WORLD_SIZE": "0"}]
)
def test_numbers_that_do_not_fit_are_refused(values):
    with pytest.raises(UsageError):
        World.current(values)


def test_ranks_of_a_job_agree_on_its_name_and_other_jobs_have_another() -> None:
    launched = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    ranks = [World.current({**launched, "RANK": str(rank)}) for rank in range(2)]
    other = World.current({**launched, "MASTER_PORT": "29501"})
    alone = World.current({"MASTER_PORT": "29500"})

    assert ranks[0].job == ranks[1].job
    assert len({ranks[0].job, other.job, alone.job}) == 3

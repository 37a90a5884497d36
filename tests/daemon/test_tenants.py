"""Tenants: who is which, what their settings say together, and what each may ask of origins."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from gpufeed.cachefs.clock import SystemClock
from gpufeed.cachefs.config import ArenaConfig, StoreConfig
from gpufeed.cachefs.errors import AccessDeniedError, CapacityError, ConfigError
from gpufeed.cachefs.metrics import Metrics, MetricsPart
from gpufeed.cachefs.store.store import ShardStore
from gpufeed.cachefs.units import MIB
from gpufeed.daemon import configcommand
from gpufeed.daemon.admission import COMMON_DOOR, Admission, read_tokens
from gpufeed.daemon.config import add_config_flags, load_settings
from gpufeed.daemon.datasets import Datasets, Rights
from gpufeed.daemon.startchecks import refusals
from gpufeed.daemon.tenantconfig import TenantConfig, arena_of, arena_ratios

RED, BLUE = "r" * 32, "b" * 32
ME = 1000


@pytest.fixture
def tokens(tmp_path: Path):
    """Writes a token file and returns its path."""

    def write(name: str, *lines: str) -> str:
        path = tmp_path / name
        path.write_text("\n".join(lines) + "\n")
        return str(path)

    return write


class TestAdmission:
    def test_without_tenants_everybody_is_of_one(self) -> None:
        assert Admission(()).admit(COMMON_DOOR, None, ME) == ""
        assert Admission(()).admit(COMMON_DOOR, "any token", ME) == ""

    def test_a_token_says_which_tenant_and_counts_until_it_leaves_the_file(self, tokens) -> None:
        red = TenantConfig(name="red", token_file=tokens("red", "# two", RED, "", "next" * 8))
        blue = TenantConfig(name="blue", token_file=tokens("blue", BLUE))
        admission = Admission((red, blue))
        assert admission.admit(COMMON_DOOR, RED, ME) == "red"
        assert admission.admit(COMMON_DOOR, "next" * 8, ME) == "red"
        assert admission.admit(COMMON_DOOR, BLUE, ME) == "blue"

        tokens("red", "next" * 8)
        with pytest.raises(AccessDeniedError, match="of no tenant of this daemon"):
            admission.admit(COMMON_DOOR, RED, ME)
        assert admission.admit(COMMON_DOOR, "next" * 8, ME) == "red"

    def test_who_says_nothing_learns_what_to_set(self, tokens) -> None:
        admission = Admission((TenantConfig(name="red", token_file=tokens("red", RED)),))
        with pytest.raises(AccessDeniedError, match="set GPUFEED_TOKEN"):
            admission.admit(COMMON_DOOR, None, ME)
        for wrong in (RED[:-1], RED + "r", "\udcff" * 32, "# two"):
            with pytest.raises(AccessDeniedError) as refusal:
                admission.admit(COMMON_DOOR, wrong, ME)
            assert RED not in str(refusal.value)

    def test_a_socket_of_its_own_needs_no_token_unless_it_has_one(self, tokens) -> None:
        red = TenantConfig(name="red", socket_path="/r/s")
        blue = TenantConfig(name="blue", socket_path="/b/s", token_file=tokens("blue", BLUE))
        admission = Admission((red, blue))
        assert admission.admit("/r/s", None, ME) == "red"
        assert admission.admit("/r/s", BLUE, ME) == "red", "the door decides"
        with pytest.raises(AccessDeniedError, match="asks for a token too"):
            admission.admit("/b/s", None, ME)
        assert admission.admit("/b/s", BLUE, ME) == "blue"

    def test_a_token_file_that_cannot_be_read_lets_nobody_in_and_others_go_on(
        self, tokens, tmp_path, caplog
    ) -> None:
        red = TenantConfig(name="red", token_file=str(tmp_path / "none"))
        blue = TenantConfig(name="blue", token_file=tokens("blue", BLUE))
        admission = Admission((red, blue))
        assert admission.admit(COMMON_DOOR, BLUE, ME) == "blue"
        assert "nobody can come as tenant red" in caplog.text

    def test_a_token_of_two_tenants_is_of_none(self, tokens) -> None:
        both = [TenantConfig(name=n, token_file=tokens(n, RED)) for n in ("red", "blue")]
        with pytest.raises(AccessDeniedError, match="more than one tenant"):
            Admission(both).admit(COMMON_DOOR, RED, ME)

    def test_users_are_asked_for_where_they_are_named(self, tokens) -> None:
        red = TenantConfig(name="red", socket_path="/r/s", uids=("1000", "1001"))
        admission = Admission((red,))
        assert admission.admit("/r/s", None, 1001) == "red"
        with pytest.raises(AccessDeniedError, match=r"user 0 is not one of tenants\.red\.uids"):
            admission.admit("/r/s", None, 0)
        with pytest.raises(AccessDeniedError, match="another user namespace"):
            admission.admit("/r/s", None, 65534)
        with pytest.raises(AccessDeniedError, match=r"daemon\.uids"):
            Admission((), ("5",)).admit(COMMON_DOOR, None, ME)

    @pytest.mark.parametrize(
        ("lines", "message"),
        [
            (("short",), "token 1 of .* has 5 characters; it must have 16 to 4096"),
            (("# only this",), "has 0 tokens"),
            ((RED,) * 3000, "in at most 65536 bytes"),
            (("x" * 5000,), "5000 characters"),
        ],
    )
    def test_token_files_that_will_not_do(self, tokens, lines, message) -> None:
        with pytest.raises(ConfigError, match=message) as error:
            read_tokens(tokens("t", *lines))
        assert RED not in str(error.value)


@pytest.fixture
def load(tmp_path: Path):
    """Settings of a file's text."""

    def loaded(text: str, **environ: str):
        path = tmp_path / "c.toml"
        path.write_text(text)
        parser = argparse.ArgumentParser()
        add_config_flags(parser)
        ours = {"GPUFEED_STORE_PATH": "", "GPUFEED_ARENA_SIZE_BYTES": "64MiB", **environ}
        return load_settings(parser.parse_args(["--config", str(path)]), environ=ours)

    return loaded


TWO = """
[tenants.red]
socket_path = "/r/s"
allow = ["oss://red/"]
key = "red-key"
secret = "red-secret"
quota_bytes = "1GiB"
[tenants.blue]
token_file = "/b/tokens"
role_arn = "acs:ram::1:role/blue"
weight = 3
"""


class TestSettings:
    def test_each_table_is_a_tenant(self, load) -> None:
        loaded = load(TWO)
        red, blue = loaded.settings.tenants
        assert (red.name, red.allow, red.share.quota_bytes) == ("red", ("oss://red/",), 1024 * MIB)
        assert red.origin_options == {"key": "red-key", "secret": "red-secret"}
        assert blue.origin_options == {"role_arn": "acs:ram::1:role/blue"}
        assert blue.share.weight == 3
        assert loaded.provenance["tenants.red.key"].startswith("file ")
        assert loaded.provenance["tenants.red.weight"] == "default"
        assert loaded.value("tenants.blue.weight") == 3

    def test_they_are_shown_and_no_credential_is(self, load) -> None:
        loaded = load(TWO)
        for shown in (configcommand._as_toml(loaded), configcommand._as_json(loaded)):
            assert "tenants.blue" in shown
            assert "red-key" not in shown
            assert "red-secret" not in shown
        assert "red-secret" not in repr(loaded.settings)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("[tenants.red]", "red has neither socket_path nor token_file"),
            ("[tenants.Red]\nweight = 1", r"\[tenants.Red\].*1 to 63 of a-z"),
            ("[tenants]\nweight = 1", r"each tenant has a table"),
            ("[tenant.red]\nweight = 1", r"did you mean \[tenants\]"),
            ("[tenants.red]\nwieght = 1", r"did you mean tenants\.red\.weight"),
            ("[tenants.red]\nname = 'x'", r"unknown setting tenants\.red\.name"),
            ("[tenants.red]\nsocket_path='/s'\nweight = 0", r"red\.weight is 0\.0.*file "),
            ("[tenants.red]\nsocket_path='/s'\nkey='k'", r"red\.key and .* belong together"),
            ("[tenants.red]\nsocket_path='/s'\ntoken='t'", r"red\.token is of no use without"),
            ("[tenants.red]\nsocket_path='/s'\ncredentials='magic'", "must be one of auto"),
            ("[tenants.red]\nsocket_path='/s'\ncredentials='static'", r"set tenants\.red\.key"),
            ("[tenants.red]\nsocket_path='/s'\nallow=['file:///']", "object stores only"),
            ("[tenants.red]\nsocket_path='/s'\nuids=['65534']", "another user namespace"),
            ("[tenants.red]\nsocket_path='/s'\nuids=['me']", "write numbers of users"),
            ("[daemon]\nallow=['file:///']\n[tenants.red]\nsocket_path='/s'", r"give tenants\.red"),
            ("[daemon]\nsocket_path='/s'\n[tenants.red]\nsocket_path='/s'", r"socket_path too"),
            (
                "[tenants.a]\nsocket_path='/s'\n[tenants.b]\nsocket_path='/s'",
                r"b\.socket_path is /s, which is tenants\.a\.socket_path too",
            ),
            (
                "[tenants.a]\nsocket_path='/a'\narena_ratio=0.7\n"
                "[tenants.b]\nsocket_path='/b'\narena_ratio=0.7",
                r"arena_ratio come to 1\.4",
            ),
            (
                "[tenants.a]\nsocket_path='/a'\narena_ratio=1\n[tenants.b]\nsocket_path='/b'",
                "leave nothing for b",
            ),
            (
                "[tenants.a]\nsocket_path='/a'\narena_ratio=0.1\n[tenants.b]\nsocket_path='/b'",
                r"tenants\.a has 0\.1 of the arena, which is too little",
            ),
        ],
    )  # fmt: skip
    def test_what_will_not_do_is_named(self, load, text, message) -> None:
        with pytest.raises(ConfigError, match=message):
            load(text)

    def test_variables_set_no_tenant(self, load) -> None:
        with pytest.raises(ConfigError, match=r"tenants are set in the file"):
            load("", GPUFEED_TENANTS_RED_KEY="k")

    def test_token_files_are_read_before_the_start(self, load, tokens) -> None:
        tables = "[tenants.a]\ntoken_file='{}'\n[tenants.b]\ntoken_file='{}'"
        good = load(tables.format(tokens("a", RED), tokens("b", BLUE)))
        assert not [str(e) for e in refusals(good) if "token" in str(e)]
        missing = load(tables.format("/none", tokens("b", BLUE)))
        assert any("tenants.a.token_file" in str(e) for e in refusals(missing))
        shared = load(tables.format(tokens("a", RED), tokens("b", BLUE, RED)))
        assert any("has a token that a has too" in str(e) for e in refusals(shared))

    def test_shares_of_the_arena(self) -> None:
        def of(*ratios: float) -> list[float]:
            return arena_ratios([TenantConfig(name=f"t{i}", socket_path=f"/{i}", arena_ratio=r)
                                 for i, r in enumerate(ratios)])  # fmt: skip

        assert of(0, 0) == [0.5, 0.5]
        assert of(0.5, 0, 0) == [0.5, 0.25, 0.25]
        assert sum(of(0.3334, 0.3333, 0.3334)) <= 1
        arena = ArenaConfig(size_bytes=100 * MIB, extent_bytes=MIB, in_flight_bytes_max=20 * MIB)
        part = arena_of(arena, 0.255)
        assert (part.size_bytes, part.in_flight_bytes_max) == (25 * MIB, int(5.1 * MIB))
        assert arena_of(arena, 1) is arena


def datasets(rights: Rights) -> Datasets:
    store = ShardStore.open(
        StoreConfig(), extent_bytes=1 << 20, metrics=Metrics(), clock=SystemClock()
    )
    return Datasets(None, store, rights, extent_bytes=1 << 20)


class TestRights:
    OSS = "https://oss-cn-hangzhou-internal.aliyuncs.com"

    def test_endpoints_that_nobody_configured_are_not_asked(self) -> None:
        own = {"endpoint": "http://10.0.0.2"}
        mine = datasets(
            Rights(tenant="t", endpoint=self.OSS, endpoints=("http://10.0.0.1:80",), options=own)
        )
        for good in ("oss-cn-beijing.aliyuncs.com", "http://10.0.0.1:80", "http://10.0.0.2"):
            assert mine.options([("endpoint", good)])["endpoint"] == good
        for evil in (
            "http://10.0.0.3", "http://10.0.0.1:8080", "oss-cn-beijing.aliyuncs.com.evil.example",
            "1234.cn-hangzhou.fc.aliyuncs.com", "http://127.0.0.1",
        ):  # fmt: skip
            with pytest.raises(AccessDeniedError, match=r"does not ask .*daemon\.endpoints"):
                mine.options([("endpoint", evil)])

    def test_an_embedded_daemon_asks_any(self) -> None:
        mine = datasets(Rights(endpoint=self.OSS, endpoints=None))
        assert mine.options([("endpoint", "http://10.0.0.3")]) == {"endpoint": "http://10.0.0.3"}

    def test_a_clients_credential_takes_the_place_of_the_tenants_whole(self) -> None:
        own = {"region": "r", "key": "k", "secret": "s", "token": "t", "role_arn": "a"}
        mine = datasets(Rights(tenant="t", endpoints=(), options=own))
        assert mine.options([]) == own
        given = {"key": "K", "secret": "S"}
        assert mine.options(given.items()) == {"region": "r", **given}

    def test_the_tenants_own_list_is_named_where_it_refuses(self) -> None:
        mine = datasets(Rights(tenant="red", allow=("oss://red/",)))
        mine.check_allowed("oss://red/x")
        with pytest.raises(AccessDeniedError, match=r"add the prefix to tenants\.red\.allow"):
            mine.check_allowed("oss://blue/x")

    def test_a_tenants_endpoint_is_part_of_its_shards_identities(self) -> None:
        mine = datasets(Rights(tenant="t", endpoint=self.OSS, options={"endpoint": "10.0.0.2:80"}))
        assert mine.origin_of(mine.options([])) == "10.0.0.2:80"


def test_gauges_of_parts_add_up() -> None:
    whole = Metrics()
    parts = [MetricsPart(whole), MetricsPart(whole)]
    parts[0].set("arena_slots", 5)
    parts[1].set("arena_slots", 7)
    parts[0].set("arena_slots", 3)
    parts[1].add("hits_total")
    assert whole.get("arena_slots") == 10
    assert whole.get("hits_total") == parts[0].get("hits_total") == 1


def test_a_tenant_has_as_many_sessions_as_it_may(house) -> None:
    tenant = house.server.tenants.admit(COMMON_DOOR, None, ME)
    tenant.config = TenantConfig(name="red", socket_path="/r", sessions_max=1)
    tenant.enter()
    with pytest.raises(CapacityError, match=r"tenants\.red\.sessions_max"):
        tenant.enter()
    tenant.leave()
    tenant.enter()
    tenant.leave()

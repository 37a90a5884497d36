"""Where settings come from, which wins, and what a wrong one says."""

from __future__ import annotations

import argparse
import json
import os
import re

import pytest

from gpufeed.cachefs.errors import ConfigError
from gpufeed.cachefs.units import GIB, MIB
from gpufeed.daemon import configcommand
from gpufeed.daemon.config import KEYS, add_config_flags, load_settings
from gpufeed.daemon.machine import Machine


@pytest.fixture
def load(tmp_path):
    """Load with a file's text, an environment and flags, on a machine without surprises."""

    def loaded(text: str | None = None, flags: tuple[str, ...] = (), **environ: str):
        parser = argparse.ArgumentParser()
        add_config_flags(parser)
        if text is not None:
            (tmp_path / "c.toml").write_text(text)
            flags = ("--config", str(tmp_path / "c.toml"), *flags)
        machine = Machine(root=str(tmp_path / "none"), environ={"HOME": str(tmp_path)}, uid=1000)
        return load_settings(parser.parse_args(flags), environ=environ, machine=machine)

    return loaded


FILE = """
[origin]
endpoint = "https://file"
[store]
capacity_bytes = "1.5GiB"
[daemon]
allow = ["oss://a/", "oss://b/"]
linger_s = 3
"""


class TestPrecedence:
    def test_flags_beat_the_environment_which_beats_the_file(self, load, tmp_path):
        assert load(FILE).settings.origin.endpoint == "https://file"
        both = load(FILE, GPUFEED_ORIGIN_ENDPOINT="https://env")
        assert both.settings.origin.endpoint == "https://env"
        every = load(FILE, ("--endpoint", "https://flag"), GPUFEED_ORIGIN_ENDPOINT="https://env")
        assert every.settings.origin.endpoint == "https://flag"
        assert every.provenance["origin.endpoint"] == "flag --endpoint"
        assert both.provenance["origin.endpoint"] == "environment variable GPUFEED_ORIGIN_ENDPOINT"
        assert both.provenance["store.capacity_bytes"] == f"file {tmp_path}/c.toml"
        assert both.provenance["origin.part_bytes"] == "default"

    def test_every_key_has_a_provenance_and_a_variable(self, load):
        assert set(load().provenance) == set(KEYS)
        assert KEYS["store.path"].variable == "GPUFEED_STORE_PATH"

    def test_values_are_read_as_their_slice_wants_them(self, load):
        settings = load(
            FILE,
            ("--arena", "256MiB", "--extent-size", "1MiB", "--http-port", "-1"),
            GPUFEED_ARENA_LOCK_MEMORY="no",
            GPUFEED_STORE_FREE_FLOOR_RATIO="0.1",
        ).settings
        assert settings.store.capacity_bytes == GIB * 3 // 2
        assert settings.daemon.allow == ("oss://a/", "oss://b/")
        assert settings.daemon.linger_s == 3.0
        assert settings.arena.size_bytes == 256 * MIB
        assert settings.arena.lock_memory is False
        assert settings.store.free_floor_ratio == 0.1
        assert settings.daemon.http_port == -1

    def test_lists_come_by_commas_or_by_repeated_flags(self, load):
        assert load(GPUFEED_DAEMON_ALLOW="oss://a/, s3://").settings.daemon.allow == (
            "oss://a/", "s3://",
        )  # fmt: skip
        flags = ("--allow", "oss://a/", "--allow", "oss://b,c/")
        assert load(flags=flags).settings.daemon.allow == ("oss://a/", "oss://b,c/")

    def test_a_list_in_text_may_be_a_toml_array(self, load):
        both = ("oss://a/", "oss://b,c/")
        array = '["oss://a/", "oss://b,c/"]'
        assert load(GPUFEED_DAEMON_ALLOW=array).settings.daemon.allow == both
        assert load(flags=("--allow", array)).settings.daemon.allow == both

    @pytest.mark.parametrize("text", ["[oss://a/]", "['oss://a/'", "[1]", "oss://a/,,oss://b/"])
    def test_a_list_that_is_none_is_refused(self, load, text):
        with pytest.raises(ConfigError, match=r"pins is .*POLICY_PINS\); it must be a list of str"):
            load(GPUFEED_POLICY_PINS=text)

    def test_the_file_may_be_named_by_the_environment(self, load, tmp_path):
        (tmp_path / "e.toml").write_text("[store]\nio_threads = 7\n")
        loaded = load(GPUFEED_CONFIG=str(tmp_path / "e.toml"))
        assert loaded.settings.store.io_threads == 7
        assert loaded.config_path == f"{tmp_path}/e.toml"

    def test_mappings_do_instead_of_a_command_line(self, tmp_path):
        loaded = load_settings(flags={"store.path": str(tmp_path)}, environ={})
        assert loaded.settings.store.path == str(tmp_path)

    def test_what_is_not_given_is_derived_and_says_how(self, load, tmp_path):
        loaded = load()
        assert loaded.settings.store.path == f"{tmp_path}/.cache/gpufeed"
        assert loaded.settings.store.capacity_bytes > 0
        assert loaded.settings.arena.size_bytes == 64 * MIB
        for name in (
            "store.path",
            "store.capacity_bytes",
            "arena.size_bytes",
            "daemon.socket_path",
        ):
            assert loaded.provenance[name].startswith("derived: ")

    def test_memory_only_keeps_nothing_on_disk(self, load):
        for loaded in (load(FILE, ("--memory-only",)), load(GPUFEED_STORE_PATH="")):
            assert loaded.settings.store.path == ""
            assert loaded.settings.store.capacity_bytes == 0
        with pytest.raises(SystemExit):
            load(flags=("--memory-only", "--cache-path", "/x"))


class TestOssVariables:
    def test_are_the_weakest_source(self, load):
        oss = {"OSS_ACCESS_KEY_ID": "i", "OSS_ACCESS_KEY_SECRET": "s", "OSS_SESSION_TOKEN": "t",
               "OSS_ENDPOINT": "https://oss", "OSS_REGION": "r"}  # fmt: skip
        origin = load(**oss).settings.origin
        assert (origin.key, origin.secret, origin.token) == ("i", "s", "t")
        assert (origin.endpoint, origin.region) == ("https://oss", "r")
        assert load(FILE, **oss).settings.origin.endpoint == "https://file"

    def test_never_mix_their_token_with_another_key(self, load):
        origin = load(
            GPUFEED_ORIGIN_KEY="k", GPUFEED_ORIGIN_SECRET="x",
            OSS_ACCESS_KEY_ID="i", OSS_ACCESS_KEY_SECRET="s", OSS_SESSION_TOKEN="t",
        ).settings.origin  # fmt: skip
        assert (origin.key, origin.secret, origin.token) == ("k", "x", "")

    def test_are_not_looked_at_where_credentials_come_from_elsewhere(self, load):
        pair = {"OSS_ACCESS_KEY_ID": "i", "OSS_ACCESS_KEY_SECRET": "s", "OSS_REGION": "r"}
        origin = load(GPUFEED_ORIGIN_CREDENTIALS="rrsa", **pair).settings.origin
        assert (origin.credentials, origin.key, origin.region) == ("rrsa", "", "r")
        origin = load("[origin]\ncredentials = 'static'", **pair).settings.origin
        assert (origin.credentials, origin.key) == ("static", "i")


class TestErrors:
    @pytest.mark.parametrize(
        ("text", "message"),
        [
            (
                "[stor]\npath = '/x'",
                r"section \[stor\] \(file .*c\.toml\); did you mean \[store\]",
            ),
            ("[stor]", r"unknown section \[stor\]"),
            ("[zzzz]\na = 1", "there are origin, store, arena, daemon"),
            (
                "[store]\ncapacity = 1",
                r"store\.capacity .*did you mean store\.capacity_bytes",
            ),
            ("[store]\nzzz = 1", "there are path, "),
            ("path = '/x'", "path stands outside of a section"),
            ("[store\n", "c.toml is not TOML"),
            (
                "[store]\nio_threads = 'x'",
                r"is 'x' \(file .*\); it must be a whole number",
            ),
            ("[store]\nio_threads = true", "whole number"),
            ("[store]\nio_threads = 2.5", "whole number"),
            ("[store]\ncapacity_bytes = '5 parsecs'", "must be a size"),
            ("[store]\ncapacity_bytes = 1.5", "must be a size"),
            ("[arena]\nlock_memory = 'perhaps'", "true or false"),
            ("[daemon]\nlinger_s = 'x'", "a number"),
            ("[daemon]\nallow = [1]", "list of strings"),
            ("[daemon]\nallow = ['bucket']", "write prefixes with their scheme"),
            ("[policy]\npins = ['']", "policy.pins is .*none of them empty"),
            ("[policy]\npins = ['oss://']", r"policy.pins has 'oss://'.*\(policy.pins: file "),
            ("[policy]\npins = ['O!://b/']", "with their scheme"),
            ("[policy]\nquotas = ['://b/=1GB']", "policy.quotas has '://b/'"),
            ("[policy]\nquotas = ['oss://b/=10XB']", r"policy.quotas: '10XB' is not a size.*file "),
            ("[policy]\nquotas = ['oss://b/=1GB', 'oss://b/=2GB']", "'oss://b/' is given twice"),
            ("[daemon]\nlog_level = 'loud'", "must be one of debug"),
            ("[daemon]\nsessions_max = 0", r"sessions_max is 0.*\(daemon\.sessions_max: file "),
            ("[store]\nfree_floor_ratio = 2", r"must be in \[0, 1\).*file "),
            ("[store]\npath = 3", "a string"),
            ("[origin]\nkey = 'a'", "belong together"),
            ("[origin]\ncredentials = 'x'", r"must be one of auto.*\(origin.credentials: file "),
            ("[origin]\ncredentials = 'static'", "set origin.key and origin.secret"),
            (
                "[origin]\ncredentials = 'ecs'\nkey = 'a'\nsecret = 'b'",
                "credentials is ecs, but origin.key is set too",
            ),
        ],
    )
    def test_in_the_file_are_named_with_it(self, load, text, message):
        with pytest.raises(ConfigError, match=message):
            load(text)

    @pytest.mark.parametrize("variable", ["GPUFEED_STORE_PTH", "GPUFEED_STOREPATH"])
    def test_a_misspelt_variable_is_named(self, load, variable):
        with pytest.raises(
            ConfigError, match=f"variable {variable}; did you mean GPUFEED_STORE_PATH|X"
        ):
            load(**{variable: "1"})

    def test_variables_that_are_not_settings_are_let_be(self, load):
        load(
            GPUFEED_DAEMON="auto", GPUFEED_SERVICE_HOST="10.0.0.1", GPUFEED_PORT="tcp://10.0.0.1:9",
            GPUFEED_DAEMON_PORT_9478_TCP_ADDR="10.0.0.1", GPUFEED_DAEMON_SERVICE_PORT_HTTP="9",
            GPUFEED_DAEMON_PORT="tcp://1", PATH="/bin",
        )  # fmt: skip

    def test_a_missing_file_is_named(self, load, tmp_path):
        with pytest.raises(ConfigError, match=r"cannot read the configuration .*no\.toml"):
            load(flags=("--config", str(tmp_path / "no.toml")))

    def test_no_message_holds_a_secret(self, load):
        with pytest.raises(ConfigError) as raised:
            load("[origin]\nkey = 'a'\nsecret = 12345678")
        assert "12345678" not in str(raised.value)


class TestCommand:
    @pytest.fixture(autouse=True)
    def _clean(self, monkeypatch, tmp_path):
        for name in os.environ:
            if name.startswith(("GPUFEED_", "OSS_")):
                monkeypatch.delenv(name)
        monkeypatch.setenv("GPUFEED_STORE_PATH", str(tmp_path))
        monkeypatch.setenv("GPUFEED_DAEMON_SOCKET_PATH", str(tmp_path / "d.sock"))
        monkeypatch.setenv("GPUFEED_DAEMON_HTTP_PORT", "-1")
        monkeypatch.setenv("GPUFEED_ORIGIN_KEY", "the-key")
        monkeypatch.setenv("GPUFEED_ORIGIN_SECRET", "the-secret")

    def test_show_prints_toml_that_reads_back_and_no_secret(self, capsys, load):
        assert configcommand.command(["show", "--capacity", "3GB", "--arena", "1GiB"]) == 0
        out = capsys.readouterr().out
        assert "the-key" not in out
        assert "the-secret" not in out
        assert "# secret = (set)" in out
        assert "# token = (unset)" in out
        again = load(out).settings
        assert again.store.capacity_bytes == 3_000_000_000
        assert again.arena.size_bytes == GIB

    def test_show_prints_json_with_sources(self, capsys):
        assert configcommand.command(["show", "--json", "--http-port", "0"]) == 0
        out = capsys.readouterr().out
        assert "the-secret" not in out
        settings = json.loads(out)["settings"]
        assert settings["daemon.http_port"] == {"value": 0, "source": "flag --http-port"}
        assert settings["origin.secret"]["value"] == "(set)"

    def test_no_repr_holds_a_secret(self):
        assert "the-secret" not in repr(load_settings())

    def test_check_says_that_it_will_do(self, capsys):
        assert configcommand.command(["check", "--arena", "64MiB"]) == 0
        assert "the configuration is valid" in capsys.readouterr().out

    def test_check_tells_what_would_do_but_costs_money(self, capsys):
        flags = ("--endpoint", "oss-cn-hangzhou.aliyuncs.com", "--region", "cn-beijing")
        assert configcommand.command(["check", "--arena", "64MiB", *flags]) == 0
        out = capsys.readouterr().out
        assert "note: oss-cn-hangzhou.aliyuncs.com is a public endpoint" in out
        assert "note: origin.region is cn-beijing, but the endpoint" in out
        flags = ("--endpoint", "h/path", "--allow", "s3://")
        assert configcommand.command(["check", "--arena", "64MiB", *flags]) == 0
        assert "note: the endpoint 'h/path' is no address" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            (("--socket", "/tmp/" + "s" * 120), "the system allows 107"),
            (("--cache-path", __file__ + "/x"), "cannot be written"),
            (("--arena", "100TB"), "more than (total memory|the cgroup)"),
        ],
    )
    def test_check_names_what_will_not_do(self, capsys, flags, message):
        assert configcommand.command(["check", *flags]) == 2
        assert re.search(message, capsys.readouterr().err)

"""The page stands alone, escapes what it shows, and bears results that lack optional parts."""

import re

from bench_rows import SETTINGS, all_rows, row

from gpufeed.bench import html, report
from gpufeed.bench.report import Price


def page(rows=None, **settings):
    return html.page(report.assemble(rows or all_rows(), {**SETTINGS, **settings}, Price(2.0, 8)))


def test_the_page_refers_to_nothing_outside_itself():
    text = page()
    assert not re.search(r"<(script|link|img|iframe)\b", text)
    assert not re.search(r"(src|href)=", text)
    assert "url(" not in text
    assert "@import" not in text
    assert "http://" not in text
    assert "https://" not in text
    assert len(text) < 200_000


def test_verdict_and_money_come_before_the_table():
    text = page()
    assert text.index("<h1>") < text.index("idle GPU time costs") < text.index("<table>")


def test_all_that_comes_from_a_result_is_escaped():
    evil = "<script>alert('&\"')</script>"
    rows = [*all_rows(), row(evil, evil)]
    skipped = [{"name": evil, "reason": evil}]
    text = page(
        rows, step_reason=evil, skipped=skipped, environment={"cpu": evil, "memory_bytes": 1}
    )
    assert "<script" not in text
    assert "alert(&#x27;" in text


def test_every_plot_says_what_it_shows():
    text = page()
    assert text.count("<svg") == 5
    assert text.count('role="img"') == text.count("<svg") == text.count("<title>") - 1


def test_a_result_with_only_the_required_fields_makes_a_page():
    names = (*report.REQUIRED,)
    least = {name: SETTINGS[name] for name in names if name != "rows"}
    fields = ("name", "phase", "au_pct", "samples_per_s", "stall_s", "first_batch_s")
    entry = {name: row("ceiling", "warm")[name] for name in fields}
    entry |= {"origin_requests": 0, "origin_bytes": 0}
    text = html.page(report.validate({**least, "rows": [entry]}))
    assert "ceiling" in text
    assert "No verdict" in text


def test_a_result_without_rows_makes_a_page():
    assert "No verdict" in html.page(report.validate({**SETTINGS, "rows": []}))


def test_repetitions_show_their_spread():
    rows = [row("ceiling", "warm", au_pct=value) for value in (97.0, 98.0, 99.0)]
    assert "97.0 to 99.0" in page(rows, repeats=3)


def test_light_and_dark_are_both_defined():
    assert "prefers-color-scheme: dark" in page()

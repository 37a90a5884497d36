"""The report in a real browser: it parses as meant, fits its width and asks the network nothing."""

import html.parser
import shutil
import subprocess

import pytest
from bench_rows import SETTINGS, all_rows

from gpufeed.bench import html as report_page
from gpufeed.bench import report
from gpufeed.bench.report import Price

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
LIMIT_S = 120


class Counter(html.parser.HTMLParser):
    """Counts elements and collects text."""

    def __init__(self):
        super().__init__()
        self.counts, self.text, self.attributes = {}, [], []

    def handle_starttag(self, tag, attrs):
        self.counts[tag] = self.counts.get(tag, 0) + 1
        self.attributes.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text.append(data)


def browse(tmp_path, page, *flags):
    """Run chromium without a network on a page of ours; returns its standard output."""
    path = tmp_path / "report.html"
    path.write_text(page, encoding="utf-8")
    profile = tmp_path / "profile"
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic",
        "--no-first-run", "--disable-background-networking", "--disable-component-update",
        "--disable-sync", "--host-resolver-rules=MAP * ~NOTFOUND",
        f"--user-data-dir={profile}", *flags, path.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    shutil.rmtree(profile, ignore_errors=True)
    return done.stdout


@pytest.fixture
def page():
    return report_page.page(report.assemble(all_rows(), SETTINGS, Price(2.0, 8)))


def test_a_browser_reads_the_page_as_it_was_written(tmp_path, page):
    seen = Counter()
    seen.feed(browse(tmp_path, page, "--dump-dom"))
    wanted = Counter()
    wanted.feed(page)
    for tag in ("svg", "table", "tr", "td", "th", "path", "rect", "text", "h1", "h2", "dt"):
        assert seen.counts.get(tag) == wanted.counts.get(tag), tag
    assert seen.counts["h1"] == 1
    assert any("15\xa0% of the time" in text for text in seen.text)


def test_the_page_fits_a_narrow_window_without_scrolling_sideways(tmp_path, page):
    probe = (
        "<script>addEventListener('load',()=>{const d=document.documentElement;"
        "document.title=d.scrollWidth+' '+d.clientWidth+' '+"
        "[...document.querySelectorAll('svg')].every(s=>s.getBoundingClientRect().width>200)})"
        "</script>"
    )
    probed = page.replace("</head>", probe + "</head>")
    dom = browse(tmp_path, probed, "--window-size=600,900", "--dump-dom")
    scroll, client, drawn = dom.split("<title>", 1)[1].split("</title>", 1)[0].split()
    assert int(scroll) <= int(client)
    assert drawn == "true"


def test_a_picture_of_the_page_can_be_taken(tmp_path, page):
    picture = tmp_path / "report.png"
    browse(tmp_path, page, f"--screenshot={picture}", "--window-size=1200,2400")
    assert picture.stat().st_size > 50_000

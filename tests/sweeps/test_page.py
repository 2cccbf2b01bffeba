"""Promises of the page: one file, all runs named, everything from a run escaped, of a bounded size."""

import html.parser
import json
import re

import pytest
from synthetic_runs import write_run

from headlab.cli import main
from headlab.errors import UsageError
from headlab.sweeps.page import write_report

EVIL = "<script>alert(1)</script>"
MB = 1_000_000


class Reader(html.parser.HTMLParser):
    """Collects the elements of a page, the text outside scripts and styles, and what it would fetch."""

    def __init__(self, page: str):
        super().__init__()
        self.elements: list[tuple[str, dict]] = []
        self.texts: list[str] = []
        # the library of plots takes longer to parse than all the rest
        before, _, after = page.partition('id="plotly">')
        self.feed(before + 'id="plotly">' + after[after.index("</script>") :])
        self.text = " ".join(" ".join(self.texts).split())

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_data(self, data):
        if self.elements and self.elements[-1][0] not in ("script", "style"):
            self.texts.append(data)

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


def write_sweep(folder, *, steps=100, log_every=10, seeds=3, heads=("tied", "untied")):
    for number, head in enumerate(heads):
        for seed in range(seeds):
            loss = 4 + number / 10 + seed / 100 + number * seed / 1000
            write_run(
                folder / f"{head}-{seed}",
                head=head,
                seed=seed,
                loss=loss,
                steps=steps,
                log_every=log_every,
            )
    return folder


def page_of(folder, tmp_path, **options):
    return write_report(folder, tmp_path / "page.html", **options).read_text(encoding="utf-8")


def plot_data(page):
    [found] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page)
    return json.loads(found)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = write_sweep(tmp_path_factory.mktemp("sweep"))
    write_run(folder / "half", head="untied", seed=9, steps=100, reached=50, finished=False)
    bad = write_run(folder / "bad", head="tied", seed=8)
    (bad / "result.json").write_text("{")
    points = [{"name": name, "overrides": {}} for name in ("tied-0", "later")]
    sweep = {
        "question": "Is untying worth it?",
        "command": ["headlab", "sweep", "--title=a b"],
        "baseline": {"head.name": "tied"},
        "points": points,
    }
    (folder / "sweep.json").write_text(json.dumps(sweep))
    return page_of(folder, tmp_path_factory.mktemp("page"))


def test_the_page_fetches_nothing(page):
    read = Reader(page)
    assert [a for a in read.all("script") if "src" in a] == []
    assert [a for a in read.all("link") if not a["href"].startswith("data:")] == []
    assert all(a["href"].startswith("#") for a in read.all("a"))
    assert read.all("img") == read.all("iframe") == []
    [policy] = [a["content"] for a in read.all("meta") if "http-equiv" in a]
    assert "default-src 'none'" in policy


def test_the_library_of_plots_is_there_once(page):
    assert page.count('id="plotly"') == 1
    assert len(page) < 6 * MB


def test_question_command_and_every_run_are_named(page):
    text = Reader(page).text
    assert "Is untying worth it?" in text
    assert "headlab sweep '--title=a b'" in text
    for name in ("tied-0", "untied-2", "half", "bad", "later"):
        assert name in text
    assert "unfinished, step 50 of 100" in text
    assert "6 of 7 runs finished · 1 left out · 1 not begun" in text


def test_differing_options_are_marked_and_all_are_there(page):
    rows = re.findall(r"<tr( class=\"differs\")?><th scope=\"row\"><code>(.*?)</code>", page)
    assert {key for mark, key in rows if mark} == {"head.name", "seed"}
    assert len(rows) > 40


def test_versions_commit_and_seeds_are_there(page):
    text = Reader(page).text
    assert "ab" * 20 in text
    assert "0.10.2" in text


def test_tables_and_sections_say_what_they_are(page):
    read = Reader(page)
    assert read.all("html") == [{"lang": "en"}]
    assert len(read.all("caption")) == len(read.all("table"))
    assert all("scope" in attributes for attributes in read.all("th"))
    assert all(a.get("aria-label") for a in read.all("div") if a.get("role") in ("img", "region"))
    assert len(read.all("h1")) == 1


def test_curves_and_differences_are_the_runs_own(page):
    data = plot_data(page)
    assert [run["name"] for run in data["runs"]] == [
        "tied-0",  # the sweep's order, then that of the names
        "half",
        "tied-1",
        "tied-2",
        "untied-0",
        "untied-1",
        "untied-2",
    ]
    first = data["runs"][0]
    assert first["heldOut"][0][-1] == 100
    assert first["heldOut"][1][-1] == 4.0
    [difference] = data["differences"]
    assert difference["baseline"] == "head=tied"
    assert difference["values"] == pytest.approx([0.1, 0.101, 0.102])
    assert difference["low"] < 0.101 < difference["high"]


def test_rank_bounds_and_costs_are_there(page):
    data = plot_data(page)
    assert [size["rank"] for size in data["sizes"]] == [129, 129]  # d + 1
    assert all(size["bounded"] and size["flops"] > 0 for size in data["sizes"])


@pytest.mark.parametrize(
    "evil", [EVIL, "</title><b>", '"><img src=x onerror=alert(1)>', "{{a}} ${b} \\u003c"]
)
def test_text_of_runs_is_shown_as_it_is(tmp_path, evil):
    name = evil.replace("/", "⁄")
    write_run(tmp_path / "s" / name, values={"data.corpus": f"text:{evil}"})
    write_run(tmp_path / "s" / "b", head="untied", values={"data.corpus": f"text:{evil}"})
    sweep = {"question": evil, "command": evil, "points": [{"name": f"no {name}"}]}
    (tmp_path / "s" / "sweep.json").write_text(json.dumps(sweep))
    sample = {"head": evil, "prompt": evil, "temperature": 0.8, "text": evil}
    (tmp_path / "s" / "samples.json").write_text(json.dumps([sample]))
    (tmp_path / "s" / "b" / "rank.json").write_text(json.dumps({evil: {"spectrum": [2, 1]}}))
    read = Reader(page_of(tmp_path / "s", tmp_path, title=evil))
    plain = Reader(page_of(write_sweep(tmp_path / "t"), tmp_path))
    # no element comes from a run: the same scripts, and no image
    assert len(read.all("script")) == len(plain.all("script"))
    assert read.all("img") == read.all("b") == []
    shown = " ".join(evil.split())
    assert read.text.count(shown) >= 6  # title, heading, question, command, prompt, sample, corpus
    assert name in read.text


def test_a_long_run_that_logged_every_step_stays_small(tmp_path):
    write_run(tmp_path / "s" / "a", steps=6000, log_every=1)
    page = page_of(tmp_path / "s", tmp_path)
    [run] = plot_data(page)["runs"]
    assert len(run["train"][0]) <= 1000
    assert "Training curves have at most 1,000 points here" in Reader(page).text


def test_twenty_runs_of_6000_steps_stay_under_6_mb(tmp_path):
    write_sweep(
        tmp_path / "s",
        steps=6000,
        log_every=10,
        seeds=5,
        heads=("tied", "untied", "sigsoftmax", "mixtape"),
    )
    page = page_of(tmp_path / "s", tmp_path)
    assert len(page.encode()) < 6 * MB
    # nothing is thinned at this length
    assert {len(run["train"][0]) for run in plot_data(page)["runs"]} == {600}


def test_runs_that_have_not_finished_make_a_page(tmp_path):
    write_run(tmp_path / "s" / "a", finished=False, steps=200, reached=100)
    text = Reader(page_of(tmp_path / "s", tmp_path)).text
    assert "No run has finished" in text
    assert "unfinished, step 100 of 200" in text


def test_a_head_that_is_not_known_here_is_named_and_the_rest_is_shown(tmp_path):
    path = write_run(tmp_path / "s" / "a")
    for name in ("config.json", "result.json"):
        text = (path / name).read_text().replace('"tied"', '"of_a_colleague"')
        (path / name).write_text(text)
    text = Reader(page_of(tmp_path / "s", tmp_path)).text
    assert "The cost and the rank bound of head=of_a_colleague are not known" in text
    assert "4.0000" in text


def test_the_command_writes_the_page(tmp_path, capsys):
    folder = write_sweep(tmp_path / "s", seeds=1)
    file = tmp_path / "page.html"
    assert main(["report", str(folder), "-o", str(file), "--title=Tied & untied"]) == 0
    assert capsys.readouterr().out.strip() == str(file)
    assert "<h1>Tied &amp; untied</h1>" in file.read_text()


def test_what_cannot_be_compared_as_asked_is_refused(tmp_path):
    folder = write_sweep(tmp_path / "s", seeds=1)
    with pytest.raises(UsageError, match="none of the groups"):
        page_of(folder, tmp_path, baseline="head=mixtape")

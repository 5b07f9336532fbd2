"""The page of a speed-up measurement, in a real browser."""

import copy
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eval.report.html_page import Axis, make_interval_axis, write_html_page
from heads.decoding.tree import Tree, make_static_tree

BROWSER, DRIVER = (shutil.which(name) for name in ("chromium", "chromedriver"))
CATEGORIES = ("writing", "math", "coding", "qa", "retrieval_augmented_generation")
DRAFTING = (
    "medusa_chain", "medusa_tree", "eagle_chain", "eagle_tree", "ngram", "medusa_tree_typical",
)  # fmt: skip
HOSTILE = [
    ["<script>alert(1)</script>", 0], ["\n\n", 1], ["  déjà", 2], [" 👩‍🔬", 3], ["\t}}{{ x }}", 4],
    ["\r\n", 1], ["</div>", 9], ["\"'&amp;", 2], ["supercalifragilistic" * 12, 1],
]  # fmt: skip


def drafting(name: str) -> dict[str, Any]:
    """A method that drafts."""
    number = DRAFTING.index(name)
    tau, speedup, num_tokens = 1.6 + 0.4 * number, 0.8 + 0.3 * number, 5120
    tree = make_static_tree(4, 24) if "tree" in name else Tree.make_chain(5)
    figures = {
        "tau": tau, "tau_ci95": [tau * 0.95, tau * 1.05],
        "speedup": speedup, "speedup_ci95": [speedup * 0.94, speedup * 1.06],
    }  # fmt: skip
    return {
        **figures, "tokens_per_s": 83 * speedup, "efficiency": speedup / tau,
        "decode_tokens_per_s": 86 * speedup, "decode_speedup": speedup * 1.01,
        "num_tokens": num_tokens, "num_steps": int(num_tokens / tau), "alpha": [0.7] * tree.depth,
        "per_position": [0.7**depth for depth in range(1, tree.depth + 1)],
        "by_category": {category: {**figures, "num_prompts": 10} for category in CATEGORIES},
        "breakdown": {"prefill": 0.5, "draft": 16, "verify": 36, "accept": 5, "host": 3},
        "tree": {
            "parents": tree.parents, "ranks": tree.ranks,
            "acceptance": [0.7**depth for depth in tree.depths],
        },
        "lossy": "typical" in name,
    }  # fmt: skip


def sizes(methods: dict[str, Any]) -> dict[str, Any]:
    """Results with 1 and 16 texts at a time."""
    waits = {"p50": 12.25, "p99": 1234.5}
    return {
        str(size): {
            "baseline": "vanilla",
            "methods": {
                name: {
                    "tokens_per_s": size * row["tokens_per_s"], "speedup": row["speedup"] / size,
                    "speedup_ci95": None, "first_token_ms": waits,
                    "between_tokens_ms": None if name == "generate" else waits,
                }
                for name, row in methods.items()
            },
        }
        for size in (1, 16)
    }  # fmt: skip


def large() -> dict[str, Any]:
    """Methods of every kind, categories, hostile texts."""
    plain = {
        "tau": 1.0, "tokens_per_s": 83.0, "speedup": 1.0, "speedup_ci95": None, "efficiency": 1.0,
    }  # fmt: skip
    vanilla = {
        **plain, "num_tokens": 5120, "num_steps": 5120,
        "breakdown": {"prefill": 0.5, "draft": 0.0, "verify": 60.0, "accept": 0.3, "host": 0.9},
    }  # fmt: skip
    generate = {
        **plain, "speedup": 0.91, "num_tokens": 5120, "num_steps": 0,
        "breakdown": {"prefill": 0.0, "draft": 0.0, "verify": 0.0, "accept": 0.0, "host": 67.8},
    }  # fmt: skip
    story = [[f" word {n}", n % 6] for n in range(160)]
    methods = {name: drafting(name) for name in DRAFTING}
    for ends in ("tau_ci95", "speedup_ci95"):  # of a category with one dialogue
        methods["ngram"]["by_category"]["qa"][ends] = None
    texts = {name: [*HOSTILE, *story, ["\u202eevil", 0]] for name in methods}
    return {
        "methods": {"vanilla": vanilla, "generate": generate, **methods},
        "baseline": "vanilla",
        "baselines": ["vanilla", "generate"],
        "lossless": {
            "num_prompts": 80, "num_equal": 78,
            "first_divergences": [
                {"prompt": 7, "method": "eagle_tree", "position": 31, "top2_margin": 0.002},
                {"prompt": 9, "method": "medusa_tree_typical", "position": 4},
            ],
        },
        "texts": [
            {"prompt": 0, "category": "writing", "turn": 1, "methods": texts,
             "question": "Write <b>three</b> lines.\nNo more."},
            {"prompt": 3, "category": "qa", "turn": 2, "methods": texts, "question": "Why?" * 90},
        ],
        "target": "organisation/Some-Target-8B-Instruct", "head": "outputs/head", "device": "cpu",
        "concurrency": sizes({"vanilla": vanilla, "generate": generate, **methods}),
        "torch_threads": 1, "batch_size": 1, "max_new_tokens": 64, "temperature": 0.0,
        "num_repeats": 3, "target_dtype": "float32", "data": {"path": "p.jsonl", "num_prompts": 80},
        "versions": {"torch": "2.11.0", "headsmith": None}, "argv": ["eval/speedup.py"],
        "config": {"target": {"path": "organisation/Some-Target-8B-Instruct"}, "methods": ["all"]},
    }  # fmt: skip


def small() -> dict[str, Any]:
    """Only what every result has."""
    result = copy.deepcopy(large())
    kept = ("vanilla", "generate", "medusa_tree")
    needed = ("tau", "tokens_per_s", "speedup", "efficiency", "num_tokens", "breakdown")
    rows = {name: {key: result["methods"][name][key] for key in needed} for name in kept}
    for key in ("head", "batch_size", "num_repeats", "argv"):
        del result[key]
    return {**result, "methods": rows, "lossless": None, "texts": [], "temperature": 0.7}


def test_names_are_text(tmp_path: Path) -> None:
    write_html_page(large() | {"target": "<b>me</b>"}, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "&lt;b&gt;me&lt;/b&gt;" in page
    assert "<b>me" not in page


def test_tau_by_mode_stands_in_a_table_of_methods(tmp_path: Path) -> None:
    methods = large()["methods"]
    row = {"tau": 1.25, "tau_ci95": [1.0, 1.5]}
    # A method whose texts have no tool call, and two that no mode divides.
    methods["medusa_tree"]["by_mode"] = {"text": {"tool call": row, "prose": row}}
    methods["eagle_tree"]["by_mode"] = {"text": {"code block": row, "prose": row | {"tau": 2.0}}}
    methods["vanilla"]["by_mode"] = methods["medusa_tree"]["by_mode"]
    kept = {name: methods[name] for name in ("vanilla", "medusa_tree", "eagle_tree")}
    whole = {**large(), "methods": kept, "baselines": ["vanilla"], "lossless": None}
    write_html_page(whole, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    section = page[page.index('<section id="modes">') :].partition("</section>")[0]
    cells = re.findall(
        r"<t[hd](?: [^>]*)?>(.*?)</t[hd]>", re.sub(r"<small>.*?</small>|<wbr>", "", section)
    )
    assert [cell.strip() for cell in cells] == [
        "mode", "medusa_tree", "eagle_tree",
        "text: tool call", "1.25", "-",
        "text: prose", "1.25", "2.00",
        "text: code block", "-", "1.25",
    ]  # fmt: skip
    write_html_page(large(), tmp_path / "page.html")
    assert 'id="modes"' not in (tmp_path / "page.html").read_text()


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("report")
    for name, result in (("large", large()), ("small", small())):
        write_html_page(json.loads(json.dumps(result)), folder / f"{name}.html")
    assert {path.name for path in folder.iterdir()} == {"large.html", "small.html"}
    return {name: folder / f"{name}.html" for name in ("large", "small")}


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver")
    if not (BROWSER and DRIVER):
        pytest.skip("needs chromium and chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for switch in (
        "headless=new", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run",
        "disable-background-networking", "disable-component-update", "disable-sync",
        f"user-data-dir={tmp_path_factory.mktemp('browser')}",
    ):  # fmt: skip
        options.add_argument(f"--{switch}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


def show(browser, page: Path, width: int, height: int, scheme: str = "light") -> None:
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    scheme_is = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", scheme_is)
    # The driver may come back while the page before is still there.
    browser.execute_script("window.before = true")
    browser.get(page.as_uri())
    loaded = "return !window.before && document.readyState === 'complete'"
    wait = pytest.importorskip("selenium.webdriver.support.ui").WebDriverWait(browser, 30)
    wait.until(lambda _: browser.execute_script(loaded))


@pytest.fixture(scope="module", params=["large", "small"])
def page(request, browser, pages) -> dict[str, Any]:
    """A result whose page the browser shows."""
    show(browser, pages[request.param], 1280, 900)
    return {"large": large, "small": small}[request.param]()


def test_a_page_is_quiet_and_asks_for_nothing(browser, page, pages) -> None:
    text = pages["large" if page["texts"] else "small"].read_text()
    assert not re.search(r"(src|href|url)\s*[=(]\s*[\"']?(https?:)?//", text)
    assert "<script" not in text
    assert browser.get_log("browser") == []
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0


def test_every_method_and_node_is_drawn(browser, page) -> None:
    rows = "return document.querySelectorAll('#methods table.wide tbody tr').length"
    assert browser.execute_script(rows) == len(page["methods"])
    nodes = browser.execute_script(
        "return [...document.querySelectorAll('svg.tree')].map("
        "t => t.querySelectorAll('.node').length)"
    )
    trees = [row["tree"] for row in page["methods"].values() if "tree" in row]
    assert nodes == [len(tree["parents"]) for tree in trees]


def test_every_chart_is_named_and_no_label_covers_another(browser, page) -> None:
    script = "return [...document.querySelectorAll('svg')].every(s => s.ariaLabel)"
    assert browser.execute_script(script)
    covered = browser.execute_script("""
      const found = [];
      for (const svg of document.querySelectorAll('svg')) {
        const boxes = [...svg.querySelectorAll('text')].map(t => [t, t.getBoundingClientRect()]);
        boxes.forEach(([one, a], i) => boxes.slice(i + 1).forEach(([other, b]) => {
          const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
          const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
          if (wide > -2 && high > 3) found.push(one.textContent + ' / ' + other.textContent);
        }));
      }
      return found;""")
    assert covered == []


def test_texts_are_shown_as_they_are(browser, page) -> None:
    shown = browser.execute_script(
        "return [...document.querySelectorAll('.tokens')].map(t => [t.textContent,"
        "[...t.children].map(s => [s.textContent, s.title, s.className])])"
    )
    given = page["texts"]
    assert len(shown) == len(given) * len(DRAFTING)
    for text, spans in shown:
        tokens = given[0]["methods"][DRAFTING[0]]
        assert text == "".join(token for token, _ in tokens)
        assert [span[0] for span in spans] == [token for token, _ in tokens]
        assert spans[0][1:] == ["target's own", "d0"]
        assert spans[2][1:] == ["accepted at depth 2", "d2"]
        assert spans[6][1:] == ["accepted at depth 9", "d8"]
    if given:
        question = browser.execute_script("return document.querySelector('.question').textContent")
        assert question == given[0]["question"]


def test_a_tab_picks_the_method_of_all_texts(browser, page) -> None:
    visible = "return [...document.querySelectorAll('.answer')].filter(a => a.offsetHeight)" + (
        ".map(a => a.querySelector('p').textContent.split(':')[0])"
    )
    if page["texts"]:
        best = max(DRAFTING[:-1], key=lambda name: page["methods"][name]["speedup"])
        assert browser.execute_script(visible) == [best, best]
        browser.execute_script("document.querySelector('.tabs label:last-child').click()")
        assert browser.execute_script(visible) == ["medusa_tree_typical (lossy)"] * 2


@pytest.mark.parametrize(("width", "height"), [(1280, 900), (390, 844), (360, 740)])
def test_a_page_never_scrolls_sideways(browser, pages, width, height) -> None:
    show(browser, pages["small" if width == 390 else "large"], width, height)
    browser.execute_script("for (const d of document.querySelectorAll('details')) d.open = true")
    # A phone widens its viewport to what overflows, so the asked width is what counts.
    found = browser.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
    assert max(found) <= width


CONTRASTS = """
const rgb = text => text.match(/[\\d.]+/g).map(Number);
const light = color => rgb(color).slice(0, 3)
  .map(c => c / 255).map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
  .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
const ground = node => {
  for (; node; node = node.parentElement) {
    const color = getComputedStyle(node).backgroundColor;
    if ((rgb(color)[3] ?? 1) > 0) return color;
  }
};
const svg = '.panels text, .beside text, .trees text, th text';
return [...document.querySelectorAll(
  'body, h1, h2, h3, p, dt, dd, th, td, td small, .cards span, .cards b, .tag, summary, ' +
  '.tabs label, .tokens span, .token, ' + svg)]
  .map(node => {
    const style = getComputedStyle(node);
    const [a, b] = [node.matches(svg) ? style.fill : style.color, ground(node)].map(light);
    return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), node.outerHTML.slice(0, 80)];
  })
  .sort((one, other) => one[0] - other[0])[0];
"""


def test_both_colour_schemes_are_legible(browser, pages) -> None:
    grounds = []
    for scheme in ("light", "dark"):
        show(browser, pages["large"], 1280, 900, scheme)
        contrast, where = browser.execute_script(CONTRASTS)
        assert contrast >= 4.5, (scheme, where)
        script = "return getComputedStyle(document.body).backgroundColor"
        grounds.append(browser.execute_script(script))
    assert grounds[0] != grounds[1]


def test_lossy_methods_do_not_lead(pages) -> None:
    text = pages["large"].read_text()
    assert text.count('<span class="tag lossy">⚠ lossy</span>') >= 2
    assert "79 of 80" in text  # the lossy method's other text is no broken promise
    result = large()
    result["methods"]["medusa_tree_typical"]["speedup"] = 9.0
    write_html_page(result, pages["large"].with_name("lossy.html"))
    head = pages["large"].with_name("lossy.html").read_text().split("</header>")[0]
    assert "9.00\u00d7" not in head


def test_both_baselines_are_named_and_one_dialogue_has_no_interval(pages) -> None:
    text = pages["large"].read_text()
    assert "of vanilla and 83.0 of generate" in text
    assert "those of vanilla. That is the faster of two loops without drafts" in " ".join(
        text.split()
    )
    assert "qa, 10 prompts: speed-up " in text
    assert "(-), tau" in text


def test_alpha_is_told_down_to_the_deepest_draft(pages) -> None:
    head = pages["large"].read_text().split("alpha at depth</th>")[1].split("</tr>")[0]
    assert re.findall(r">(\d+)<", head) == ["1", "2", "3", "4", "5"]


def test_lines_of_alpha_fill_their_chart(pages) -> None:
    chart = pages["large"].read_text().split('<section id="alpha">')[1].split("</section>")[0]
    height = float(re.search(r'viewBox="0 0 \S+ (\S+)"', chart)[1]) - 44
    rates = [row["alpha"][:5] for row in large()["methods"].values() if row.get("alpha")]
    drawn = re.findall(r'<polyline class="line" points="([^"]*)"', chart)
    assert len(drawn) == len(rates)
    for line, alphas in zip(drawn, rates, strict=True):
        found = [tuple(map(float, point.split(","))) for point in line.split()]
        expected = [(36 + 50 * d, 10 + height * (1 - alpha)) for d, alpha in enumerate(alphas)]
        assert found == [pytest.approx(point, abs=0.06) for point in expected]


@pytest.mark.parametrize(("low", "high", "ticks"), [(0, 1, [0, 0.5, 1]), (0.9, 1.1, [0.9, 1, 1.1])])
def test_ticks_are_round(low, high, ticks) -> None:
    assert Axis(low, high, 0, 100).ticks == pytest.approx(ticks)


def test_axis_of_equal_figures_has_a_length() -> None:
    axis = make_interval_axis([{"speedup": 1.0}], "speedup", 0, 100)
    assert axis(1.0) == pytest.approx(50)
    faster = make_interval_axis([{"speedup": 2.0, "speedup_ci95": (1.5, 3.0)}], "speedup", 0, 100)
    assert (faster(1.0), faster(3.0)) == (5.4, 94.6)  # 0.12 beside 2 at both ends

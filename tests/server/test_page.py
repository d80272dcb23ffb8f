"""The page at `/` in a real browser; skipped where there is none."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from .conftest import Running, Script

sync_api = pytest.importorskip("playwright.sync_api")

BROWSERS = "chromium", "chromium-browser", "google-chrome"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    with sync_api.sync_playwright() as playwright:
        if found is None and not os.path.exists(playwright.chromium.executable_path):
            pytest.skip("there is no Chromium")
        opened = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """Without history; its scripts may raise nothing, and it may load nothing from elsewhere."""
    context = browser.new_context()
    context.set_default_timeout(60_000)
    opened = context.new_page()
    failed: list[str] = []
    opened.on("pageerror", lambda error: failed.append(str(error)))
    opened.on("dialog", lambda dialog: failed.append(dialog.message))
    opened.on(
        "request",
        lambda request: request.url.startswith("http://127.0.0.1:") or failed.append(request.url),
    )
    yield opened
    context.close()
    assert not [url for url in failed if not url.startswith("data:")]


def ask(page: Any, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")
    page.get_by_text("The answer is complete", exact=False).wait_for(state="attached")
    page.get_by_role("button", name="Send").wait_for()


def bodies(page: Any) -> list[str]:
    """The messages' texts."""
    return page.locator("article .body").all_text_contents()


RICH = """<think>Let me see.</think># Title

**bold**, `x < 1`, [good](https://example.org/ "its title"), [bad](javascript:alert(1)), ![](data:,)
<script>alert(2)</script><img src=x onerror=alert(3)>

```python
def f(x):
    return "<b>"
```

1. one
2. two:
   - inner

- [x] done
- [ ] to do

| a | b |
|---|--:|
| 1 | 1,234,567.89 |
"""


def test_a_conversation_is_shown_edited_and_kept(scripted: Script, page: Any) -> None:
    server = scripted([RICH, "second", "third", "fourth"])
    page.goto(server.url)
    ask(page, "first question")
    answer = page.get_by_role("article", name="The model")
    assert answer.get_by_role("heading", name="Title").is_visible()
    assert answer.locator("pre code").text_content() == 'def f(x):\n    return "<b>"'
    number = answer.get_by_role("cell", name="1,234,567.89")
    assert number.evaluate("cell => getComputedStyle(cell).textAlign") == "right"
    boxes = answer.get_by_role("checkbox")
    assert [box.is_checked() for box in boxes.all()] == [True, False]
    assert answer.get_by_role("link").get_attribute("title") == "its title"
    assert answer.locator("ol > li:nth-child(2) > ul > li").text_content() == "inner"
    assert [a.get_attribute("href") for a in answer.locator("a").all()] == ["https://example.org/"]
    assert answer.locator("script, img, b").count() == 0
    assert "<script>alert(2)</script>" in answer.text_content()
    thought = answer.locator(".reasoning")
    assert thought.get_attribute("open") is None
    thought.locator("summary").click()
    assert thought.get_by_text("Let me see.").is_visible()
    assert " tokens\xa0· " in answer.locator(".figures").text_content()
    answer.get_by_label("More").click()
    answer.get_by_role("button", name="Regenerate").click()
    answer.get_by_text("second").wait_for()
    page.get_by_role("button", name="Edit").click()
    page.get_by_label("Edit your message").fill("another question")
    page.get_by_role("button", name="Send again").click()
    answer.get_by_text("third").wait_for()
    page.get_by_role("button", name="New chat").click()
    ask(page, "elsewhere")
    page.reload()
    assert bodies(page) == ["elsewhere", "fourth"]
    page.get_by_role("button", name="another question", exact=True).click()
    assert bodies(page) == ["another question", "third"]


def test_an_answer_stops(scripted: Script, page: Any) -> None:
    server = scripted(["x" * 500, "after"])
    page.goto(server.url)
    server.llm.runner.held.set()  # type: ignore[attr-defined]
    page.get_by_label("Message", exact=True).fill("go")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Stop").wait_for()
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Send").wait_for()
    server.llm.runner.held.clear()  # type: ignore[attr-defined]
    assert server.idle()
    assert page.get_by_role("article").count() == 1


def test_an_answer_that_breaks_off_is_kept_and_goes_on(scripted: Script, page: Any) -> None:
    """The stream ends in the middle, then there is no server, then there is one again."""
    server = scripted(["rest of it."])
    asked: list[Any] = []
    begun = json.dumps({"choices": [{"delta": {"content": "The "}, "finish_reason": None}]})

    def breaks(route: Any) -> None:
        asked.append(route.request.post_data_json)
        if len(asked) == 1:
            route.fulfill(content_type="text/event-stream", body=f"data: {begun}\n\n")
        elif len(asked) == 2:
            route.abort("connectionrefused")
        else:
            route.continue_()

    page.route("**/v1/chat/completions", breaks)
    page.goto(server.url)
    page.get_by_label("Message", exact=True).fill("go")
    page.keyboard.press("Enter")
    answer = page.get_by_role("article", name="The model")
    answer.get_by_text("broke off").wait_for()
    assert bodies(page)[1].strip() == "The"
    page.reload()
    answer.get_by_role("button", name="Go on").click()
    answer.get_by_text("The server does not answer").wait_for()
    assert bodies(page)[1].strip() == "The"
    answer.get_by_role("button", name="Go on").click()
    answer.get_by_text("rest of it.").wait_for()
    assert not answer.get_by_role("alert").get_by_text("server").count()
    assert asked[-1]["continue_final_message"]
    assert asked[-1]["messages"][-1] == {"role": "assistant", "content": "The"}


def test_a_server_that_is_gone_is_asked_again(scripted: Script, page: Any) -> None:
    server = scripted([])
    page.route("**/v1/pykernels", lambda route: route.abort("connectionrefused"))
    page.goto(server.url)
    page.get_by_text("The server does not answer", exact=False).wait_for()
    page.unroute("**/v1/pykernels")
    page.get_by_role("button", name="Try again").click()
    page.get_by_role("heading", name="tested").first.wait_for()


@pytest.mark.parametrize("width", [390, 360])
def test_a_narrow_page_has_drawers(scripted: Script, page: Any, width: int) -> None:
    server = scripted(["word " * 300])
    page.set_viewport_size({"width": width, "height": 640})
    page.goto(server.url)
    ask(page, "hi")
    chats, inside = page.locator("#side"), page.locator("#insight")
    assert not chats.is_visible() and not inside.is_visible()
    box = page.get_by_role("button", name="Send").bounding_box()
    assert box["y"] + box["height"] <= 640 and box["x"] + box["width"] <= width
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.get_by_role("button", name="Inside").click()
    page.get_by_role("button", name="Chats").click()
    assert chats.is_visible() and not inside.is_visible()
    page.keyboard.press("Escape")
    assert not chats.is_visible()
    assert page.get_by_role("button", name="Chats").evaluate("e => e === document.activeElement")


def test_a_key_is_asked_for(scripted: Script, page: Any) -> None:
    server = scripted(["hello"], api_key="secret")
    page.goto(server.url)
    page.get_by_label("API key").fill("secret")
    page.keyboard.press("Tab")
    page.get_by_text("tested", exact=False).first.wait_for()
    ask(page, "hi")
    assert bodies(page) == ["hi", "hello"]


def test_experts_and_workers_are_shown(served: Running, page: Any) -> None:
    page.goto(served.url)
    page.get_by_text("Settings", exact=True).click()
    page.get_by_label("Most new tokens").fill("64")
    page.get_by_label("Temperature").fill("0")
    page.get_by_role("button", name="Inside").first.click()
    page.get_by_role("tab", name="Workers").click()
    ask(page, "def quicksort(xs):")
    page.get_by_role("rowheader", name="moe_ffn routed").wait_for()
    assert page.get_by_role("rowheader", name="worker 0").is_visible()
    assert page.get_by_role("status").get_by_text("some worker computed in").is_visible()
    page.get_by_role("tab", name="Experts").click()
    tokens = page.get_by_role("option")
    assert tokens.count() > 64
    page.get_by_role("listbox", name="Tokens").press("Home")
    title = page.get_by_role("heading", name="Experts of")
    assert "position" in title.text_content()
    page.get_by_text("The same as a table").click()
    row = page.get_by_role("row").filter(has=page.get_by_role("rowheader", name="3", exact=True))
    (cell,) = row.get_by_role("cell").all_text_contents()
    assert len(cell.split(", ")) == 6
    page.locator("#map").press("Escape")
    assert "all" in title.text_content()
    page.get_by_role("tab", name="Devices").click()
    page.get_by_role("rowheader", name="disk").wait_for()
    assert not page.get_by_role("table", name="Nodes of this router").is_visible()

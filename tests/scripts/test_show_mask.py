"""The command that shows what is learnt of rows."""

from conf.settings.data import PackedConfig
from conf.settings.scripts import ShowMaskRun
from conf.settings.target import TargetConfig
from data.embedded import TARGET_PATH
from scripts import show_mask
from tests.chats import assistant, user, write_rows

TOOL = {"name": "look", "parameters": {"type": "object", "properties": {}}}


def test_parts_that_the_template_leaves_out_have_a_line_of_their_own(tmp_path, capsys) -> None:
    path = tmp_path / ("a" * 70 + "[row 7].jsonl")
    answer = assistant("Yes") | {"reasoning_content": "Hm"}
    write_rows(path, [{"messages": [user("Hi"), answer], "tools": [TOOL]}])
    target, data = TargetConfig(path=TARGET_PATH), PackedConfig(path=str(path))
    show_mask.main(ShowMaskRun(target=target, data=data))
    lines = capsys.readouterr().out.splitlines()
    assert "not rendered by the chat template: thinking, tools" in lines
    assert f"{path}:1: 3 of 13 tokens learnt (23.1%)" in lines

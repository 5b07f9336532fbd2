"""Shows the learnt tokens of a few samples in colour, before a long training run."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # repo root

from conf.command.entry import Command
from conf.settings.scripts import ShowMaskRun

COMMAND = Command(__doc__, ShowMaskRun, "show_mask")
if __name__ == "__main__":
    COMMAND.parse_command_line()

from itertools import groupby

from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from data.embedded import fill_default_paths
from data.rows.records import load_records
from data.templates.record_encoder import RecordEncoder, Sample
from heads.target_model.load import load_target_tokenizer


def main(config: ShowMaskRun) -> None:
    """Print `num_samples` samples with their learnt tokens coloured."""
    fill_default_paths(config)
    tokenizer = load_target_tokenizer(config.target)
    encoder = RecordEncoder(tokenizer, config.data.chat_template_kwargs)
    data = str(config.data.path)
    rows = load_records(data, config.data)
    console = Console(highlight=False)
    console.print(f"{data}: {len(rows.records):,} records of form {rows.form.value}", markup=False)
    for line in rows.format_lines():
        console.print(line, markup=False)
    for record in rows.records[: config.num_samples]:
        for sample in encoder.encode_record(record):
            console.rule()
            learnt, total = sum(sample.loss_mask), len(sample.input_ids)
            cut = config.data.max_length
            line = f"{record.where}: {learnt} of {total} tokens learnt"
            line += f" ({learnt / max(total, 1):.1%})"
            line += f", cut at data.max_length={cut}" if total > cut else ""
            console.print(line, markup=False, soft_wrap=True)
            if sample.unrendered_parts:
                lost = ", ".join(sample.unrendered_parts)
                console.print(f"not rendered by the chat template: {lost}", markup=False)
            console.print(colour_tokens(sample, tokenizer, brackets=console.color_system is None))
    console.rule("[black on green]learnt[/] [dim]context[/]")


def colour_tokens(sample: Sample, tokenizer: PreTrainedTokenizerBase, *, brackets: bool) -> Text:
    """Decode a sample, with learnt tokens on green, or in [[ ]] without colours."""
    text = Text()
    pairs = zip(sample.loss_mask, sample.input_ids, strict=True)
    for learnt, run_of_tokens in groupby(pairs, key=lambda pair: pair[0]):
        piece = str(tokenizer.decode([token for _, token in run_of_tokens]))
        if learnt and brackets:
            piece = f"[[{piece}]]"
        text.append(piece, style="black on green" if learnt else "dim")
    return text


if __name__ == "__main__":
    COMMAND.run(main)

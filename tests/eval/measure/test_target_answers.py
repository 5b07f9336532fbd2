"""The target's own texts, many at a time."""

import torch
from toys import random_target

from eval.decode.engine import NoDraft, Request, decode
from eval.measure.target_answers import ANSWER_BATCH_SIZE, generate_greedy_answers, stream_answers


def test_answers_are_those_that_are_written_alone() -> None:
    target, number = random_target(), ANSWER_BATCH_SIZE + 5
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 20, (number,), generator=generator).tolist()
    prompts = [torch.randint(3, 90, (n,), generator=generator).tolist() for n in lengths]
    target.model.generation_config.eos_token_id = decode(target, NoDraft(), prompts[0], 4).token_ids
    alone = [decode(target, NoDraft(), prompt, 12).token_ids for prompt in prompts]
    assert len({len(ids) for ids in alone}) > 1
    assert generate_greedy_answers(target, prompts, 12) == alone
    few = dict(stream_answers(target, list(map(Request, prompts)), 12, batch_size=3))
    assert [few[place] for place in range(number)] == alone
    assert generate_greedy_answers(target, [], 12) == []

"""A server on loopback that answers and counts as vLLM or SGLang do, as told."""

from collections.abc import Callable

from tests.chat_server import ChatServer

# As vLLM 0.32 writes it, but for more counters of its own.
METRICS = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{{engine="0",model_name="toy"}} {drafts:.1f}
# TYPE vllm:spec_decode_num_drafts_created gauge
vllm:spec_decode_num_drafts_created{{engine="0",model_name="toy"}} 1.7952553050919838e+09
vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="toy"}} {total:.1f}
{positions}
"""
POSITION = (
    'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="toy",'
    'position="{place}"}} {count:.1f}'
)

Answers = Callable[[list[int], int], tuple[list[int], list[int]]]


class DraftServer(ChatServer):
    """Context manager; `root` is the URL without `/v1`.

    Attributes:
        kind: `vllm` or `sglang`.
        depth: draft tokens of a pass; 0 is a server without a head.
        answers: the text after a prompt, of so many tokens at most, and what each pass accepted.
        server_info: changes to what SGLang says of its start.
    """

    def __init__(self, kind: str, depth: int, answers: Answers) -> None:
        super().__init__()
        self.kind, self.depth, self.answers = kind, depth, answers
        self.models = ({"id": "toy", "owned_by": kind, "max_model_len": 256},)
        self.path = {"vllm": "/v1/completions", "sglang": "/generate"}[kind]
        self.root = self.url.removesuffix("/v1")
        self.server_info: dict = {}
        # Other people's, from before.
        self.drafts, self.accepted = 7, [depth - place for place in range(depth)]

    def page(self, path: str) -> dict | str | None:
        if path == "/metrics" and self.kind == "vllm":
            return self._metrics()
        if path == "/get_server_info" and self.kind == "sglang":
            algorithm = "EAGLE3" if self.depth else None
            steps = {"speculative_num_steps": self.depth, "speculative_eagle_topk": 1}
            return {"speculative_algorithm": algorithm, **steps, **self.server_info}
        return super().page(path)

    def answer(self, body: dict) -> dict:
        if self.kind == "sglang":
            sampling = body["sampling_params"]
            assert (sampling["temperature"], sampling["repetition_penalty"]) == (0, 1.0)
            text, lengths = self.answers(body["input_ids"], sampling["max_new_tokens"])
            histogram = [lengths.count(n) for n in range(max(lengths, default=-1) + 1)]
            meta = {"spec_correct_drafts_histogram": histogram} if histogram else {}
            return {"text": "", "output_ids": text, "meta_info": meta}
        assert (body["temperature"], body["repetition_penalty"]) == (0, 1.0)
        assert body["return_token_ids"]
        text, lengths = self.answers(body["prompt"], body["max_tokens"])
        self.drafts += len(lengths)
        for place in range(self.depth):
            self.accepted[place] += sum(length > place for length in lengths)
        return {"choices": [{"text": "", "token_ids": text}]}

    def _metrics(self) -> str:
        if not self.depth:
            return "vllm:num_requests_running 0.0\n"
        lines = [POSITION.format(place=i, count=n) for i, n in enumerate(self.accepted)]
        values = {"drafts": self.drafts, "total": sum(self.accepted)}
        return METRICS.format(**values, positions="\n".join(lines))

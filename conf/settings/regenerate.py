"""Settings of `scripts/regenerate.py`."""

from dataclasses import dataclass

from conf.errors import InputError
from conf.settings.checks import not_negative, positive
from conf.settings.data import DataRun


@dataclass
class RegenerateRun(DataRun):
    """`scripts/regenerate.py`."""

    endpoint: str | None = None
    """URL of an OpenAI-compatible server, e.g. http://localhost:8000/v1; unset is in process."""
    model: str | None = None
    """Model name sent to the endpoint; unset takes the first it lists."""
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable that holds the endpoint's key, if it needs one."""
    concurrency: int = 16
    """Requests in flight."""
    max_retries: int = 5
    """Further attempts of a request that failed."""
    timeout_s: float = 300.0
    """Seconds that a request is waited for."""
    batch_size: int = 16
    """Conversations generated together in process."""
    max_new_tokens: int = 512
    """Tokens of an answer at most."""
    temperature: float = 0.0
    """0 takes the likeliest token."""
    plain: bool = False
    """In process, leave out what the target's generation config asks for (repetition penalty, stop
    texts and the like)."""
    out_dir: str = "outputs/regenerated"
    """Holds `conversations.jsonl`; a second start continues it."""
    seed: int = 0
    """Of the draws, above temperature 0."""

    def __post_init__(self) -> None:
        positive("", self, "concurrency", "batch_size", "max_new_tokens", "timeout_s")
        not_negative("", self, "temperature", "max_retries")
        if self.endpoint is None and self.model is not None:
            raise InputError(
                f"model={self.model}: names an endpoint's model, and endpoint is not set; "
                "in process it is target.path"
            )
        if self.endpoint is not None and self.plain:
            raise InputError(
                "plain=true: says how answers are written in process, and endpoint is set: serve "
                "the model with --generation-config vllm instead"
            )
        if self.endpoint is not None and "chat_template" in (self.data.chat_template_kwargs or {}):
            raise InputError(
                "data.chat_template_kwargs.chat_template: a server renders by the template that it "
                "was started with: unset it, and serve the model with --chat-template FILE"
            )

"""What decoding gives for a text."""

from dataclasses import dataclass, field

from conf.command.clock import Times


@dataclass(frozen=True)
class Step:
    """One text's share of a verify pass.

    Attributes:
        num_accepted: draft tokens kept.
        num_emitted: tokens kept, the bonus token included; a text that ends inside the accepted
            run is cut there and what is cut is not counted.
        num_left: tokens that the text still had to give when the pass started; depths beyond it
            could not be tested.
    """

    num_accepted: int
    num_emitted: int
    num_left: int


@dataclass(frozen=True)
class Request:
    """A text that is asked for.

    Attributes:
        prompt_ids: the rendered prompt, at least one token; with the text it is within the
            target's window.
        seed: of everything that sampling draws for it.
    """

    prompt_ids: list[int]
    seed: int = 0


@dataclass
class Generation:
    """What a decode gave for one text.

    Attributes:
        token_ids: the text.
        steps: its share of the verify passes.
        paths: the accepted nodes of each step, without the root.
        times: its shares of what its batches took.
        drafted: draft tokens that each step checked.
        arrivals: seconds from when it got its place, at which the prompt's pass and each step gave
            their tokens.
    """

    token_ids: list[int]
    steps: list[Step] = field(default_factory=list)
    paths: list[tuple[int, ...]] = field(default_factory=list)
    times: Times = field(default_factory=Times)
    drafted: list[int] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)


def left_at_end(steps: list[Step]) -> list[Step]:
    """Sets each step's `num_left` to the tokens that the text really had left."""
    left, ended = 0, []
    for step in reversed(steps):
        left += step.num_emitted
        ended.append(Step(step.num_accepted, step.num_emitted, left))
    return ended[::-1]
